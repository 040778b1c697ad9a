from sglang.srt.models.deepseek_v2 import EntryClass  # noqa: F401  the name SGLang's registry looks for
