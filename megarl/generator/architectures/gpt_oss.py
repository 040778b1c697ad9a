from typing import Any

import torch
from sglang.srt.models import gpt_oss


class GptOssForCausalLM(gpt_oss.GptOssForCausalLM):
    """SGLang's (0.5.23) keeps sinks in bfloat16, in a model of float32 too, and loads all experts on every rank."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        layers: Any = self.model.layers  # which a checker takes for any module
        for layer in layers:
            attention = layer.self_attn
            sinks = attention.sinks.to(torch.promote_types(attention.sinks.dtype, attention.qkv_proj.weight.dtype))
            attention.sinks = torch.nn.Parameter(sinks, requires_grad=False)

    def _load_normal_weights(self, weights, *args, **kwargs):
        layers: Any = self.model.layers
        experts = layers[0].mlp.experts
        first = experts.moe_ep_rank * experts.num_local_experts
        own = slice(first, first + experts.num_local_experts)
        weights = ((name, values[own] if ".mlp.experts." in name else values) for name, values in weights)
        super()._load_normal_weights(weights, *args, **kwargs)


EntryClass = GptOssForCausalLM
