"""SGLang's native mixture of experts under expert parallelism: the original cannot handle tokens
for experts of another rank. Also gpt-oss's activation, which SGLang would compile with a C++
compiler that may be missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def forward(
    original: Callable[..., torch.Tensor],
    layer: Any,
    x: torch.Tensor,
    topk_output: Any,
    config: Any,
) -> torch.Tensor:
    """Runs around moe_forward_native. x: [T, H]; `topk_ids` [T, k] number this rank's experts from
    0, and are -1 for experts of other ranks.
    """
    ids = topk_output.topk_ids
    weights = topk_output.topk_weights
    own_activation = config.gemm1_alpha is not None
    if config.activation != "silu" or (bool((ids >= 0).all()) and not own_activation):
        return original(layer, x, topk_output, config)
    output = torch.zeros_like(x)
    for expert in range(layer.w13_weight.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate_up = _linear(layer, "w13_weight", expert, x[token])
        if own_activation:
            inner = _clamped_swiglu(gate_up, config.gemm1_alpha, config.gemm1_clamp_limit)
        else:
            gate, up = gate_up.chunk(2, -1)
            inner = F.silu(gate) * up
        result = _linear(layer, "w2_weight", expert, inner)
        output.index_add_(0, token, result * weights[token, slot, None].to(x.dtype))
    return output


def _linear(layer: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    """Biases are float32."""
    result = F.linear(x, getattr(layer, name)[expert])
    bias = getattr(layer, name + "_bias", None)
    return result if bias is None else (result.float() + bias[expert]).to(x.dtype)


def _clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gpt-oss's activation. In `both`, gate and up alternate."""
    gate = gate_up[..., ::2].clamp(max=limit)
    up = gate_up[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)
