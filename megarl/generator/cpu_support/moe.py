"""SGLang's native mixture of experts under expert parallelism: the original cannot handle tokens that go to another rank's experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def forward(original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
    """Runs around moe_forward_native. x: [T, H]; `topk_ids` [T, k] number this rank's experts from 0, and are -1 for other ranks'."""
    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    if bool((ids >= 0).all()) or config.activation != "silu" or config.gemm1_alpha is not None:
        return original(layer, x, topk_output, config)
    output = torch.zeros_like(x)
    for expert in range(layer.w13_weight.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], layer.w13_weight[expert]).chunk(2, -1)
        result = F.linear(F.silu(gate) * up, layer.w2_weight[expert])
        output.index_add_(0, token, result * weights[token, slot, None].to(x.dtype))
    return output
