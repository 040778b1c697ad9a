"""fp8 weights in SGLang without fp8 hardware: kept as loaded, dequantised for each product. Activations stay as they are.

SGLang's own CPU path asserts AMX and would repack the weights; its numbers on GPUs differ by the quantised activations.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F


def keep(original: Callable[..., None], method: Any, layer: torch.nn.Module) -> None:
    """Around process_weights_after_loading, of linear layers and of experts."""
    if not method.block_quant:
        raise NotImplementedError("without CUDA, only block-quantised fp8 weights are served")


def apply_linear(
    original: Callable[..., torch.Tensor], method: Any, layer: torch.nn.Module, x: torch.Tensor, bias: Optional[torch.Tensor] = None
) -> torch.Tensor:
    return F.linear(x, dequantised(layer.weight, layer.weight_scale_inv, method.weight_block_size).to(x.dtype), bias)


def apply_experts(original: Callable[..., Any], method: Any, layer: torch.nn.Module, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, block = dispatch_output.hidden_states, method.weight_block_size
    weights = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=dequantised(layer.w13_weight, layer.w13_weight_scale_inv, block).to(x.dtype),
        w2_weight=dequantised(layer.w2_weight, layer.w2_weight_scale_inv, block).to(x.dtype),
    )
    result = fused_moe_native.moe_forward_native(weights, x, dispatch_output.topk_output, method.moe_runner_config)
    return StandardCombineInput(hidden_states=result)


def dequantised(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float32 [..., out, in] of e4m3 codes [..., out, in] and scales [..., ceil(out / rows), ceil(in / cols)] of blocks [rows, cols]."""
    rows, cols = codes.shape[-2:]
    spread = scales.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :cols]
    return codes.float() * spread
