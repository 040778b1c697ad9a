from sglang.srt.models.mixtral import EntryClass  # noqa: F401  the name SGLang's registry looks for
