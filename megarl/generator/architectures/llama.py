from sglang.srt.models.llama import EntryClass  # noqa: F401  the name SGLang's registry looks for
