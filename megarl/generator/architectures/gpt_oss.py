from typing import Any

import torch
from sglang.srt.models import gpt_oss


class GptOssForCausalLM(gpt_oss.GptOssForCausalLM):
    """SGLang's (0.5.23) keeps sinks in bfloat16, in a model of float32 too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        layers: Any = self.model.layers  # which a checker takes for any module
        for layer in layers:
            attention = layer.self_attn
            sinks = attention.sinks.to(torch.promote_types(attention.sinks.dtype, attention.qkv_proj.weight.dtype))
            attention.sinks = torch.nn.Parameter(sinks, requires_grad=False)


EntryClass = GptOssForCausalLM
