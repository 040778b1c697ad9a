from sglang.srt.models.olmo2 import EntryClass  # noqa: F401  the name SGLang's registry looks for
