from sglang.srt.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Like SGLang's class (0.5.23).

    Its own module takes seconds to import, since it also imports vision models.
    """


EntryClass = MistralForCausalLM
