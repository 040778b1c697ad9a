from sglang.srt.models.qwen2 import EntryClass  # noqa: F401  the name SGLang's registry looks for
