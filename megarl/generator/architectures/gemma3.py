from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM as EntryClass  # noqa: F401  the name SGLang's registry looks for
