from sglang.srt.models.qwen3_moe import EntryClass  # noqa: F401  the name SGLang's registry looks for
