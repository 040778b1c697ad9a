from typing import Any

import torch
from sglang.srt.models import gpt_oss


class GptOssForCausalLM(gpt_oss.GptOssForCausalLM):
    """Like SGLang's class (0.5.23), which keeps sinks in bfloat16 even in a float32 model, and
    loads all experts on every rank.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        layers: Any = self.model.layers  # Any, since a type checker does not know its elements
        for layer in layers:
            attention = layer.self_attn
            sinks = attention.sinks.to(
                torch.promote_types(attention.sinks.dtype, attention.qkv_proj.weight.dtype)
            )
            attention.sinks = torch.nn.Parameter(sinks, requires_grad=False)

    def _load_normal_weights(self, weights, *args, **kwargs):
        layers: Any = self.model.layers
        experts = layers[0].mlp.experts
        first_expert = experts.moe_ep_rank * experts.num_local_experts
        local_experts = slice(first_expert, first_expert + experts.num_local_experts)
        weights = (
            (name, values[local_experts] if ".mlp.experts." in name else values)
            for name, values in weights
        )
        super()._load_normal_weights(weights, *args, **kwargs)


EntryClass = GptOssForCausalLM
