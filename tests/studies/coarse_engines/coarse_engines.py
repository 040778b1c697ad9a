"""A plugin for SGLang with which engines compute with 4-bit weights, as if they were kept in int4.

The folder of this file on PYTHONPATH makes it an installed distribution, whose entry point SGLang
calls in every process of an engine. The parameters stay as the trainer wrote them, so audits of
weights still compare every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

GROUP = 32  # inputs that share a scale, as in formats such as Q4_0
LARGEST_CODE = 7  # codes from -7 to 7


def activate() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    linear = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
    HookRegistry.register(linear, apply_linear, HookType.AROUND)


def apply_linear(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Replaces the product of a linear layer; embeddings and the output layer stay as they are."""
    return F.linear(x, rounded(layer.weight), bias)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] what a weight becomes in 4 bits; `in` is a multiple of GROUP."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST_CODE
    return ((groups / scales).round() * scales).flatten(-2)
