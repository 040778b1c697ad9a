from sglang.srt.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """As SGLang's own (0.5.23), whose module takes seconds to import, because it also imports models that see."""


EntryClass = MistralForCausalLM
