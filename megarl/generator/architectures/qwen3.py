from sglang.srt.models.qwen3 import EntryClass  # noqa: F401  the name SGLang's registry looks for
