from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM as EntryClass  # noqa: F401  the name SGLang's registry looks for
