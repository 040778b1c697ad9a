from sglang.srt.models.qwen3_next import Qwen3NextForCausalLM as EntryClass  # noqa: F401  the name SGLang's registry looks for
