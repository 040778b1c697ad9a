"""fp8 weights in SGLang without fp8 hardware.

They are kept as loaded and dequantised for each product. Activations are not quantised.

SGLang's own CPU path requires AMX and would repack the weights. Its results on GPUs differ, since
it quantises activations there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

_FORMATS = "sglang.srt.layers.quantization."
_COMPRESSED = _FORMATS + "compressed_tensors."
_SCHEMES = _COMPRESSED + "schemes.compressed_tensors_w8a8_"


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in {
        _FORMATS + "fp8.Fp8LinearMethod.process_weights_after_loading": keep,
        _FORMATS + "fp8.Fp8MoEMethod.process_weights_after_loading": keep,
        _FORMATS + "fp8.Fp8LinearMethod.apply": apply_block_linear,
        _FORMATS + "fp8.Fp8MoEMethod.apply": apply_block_experts,
        _FORMATS + "w8a8_fp8.W8A8Fp8LinearMethod.apply": apply_linear,
        _FORMATS + "w8a8_fp8.W8A8FP8MoEMethod.apply": apply_experts,
        _SCHEMES + "fp8.CompressedTensorsW8A8Fp8.apply_weights": apply_linear,
        _SCHEMES + "fp8_moe.CompressedTensorsW8A8Fp8MoE.apply_weights": apply_experts,
        _COMPRESSED
        + "compressed_tensors.CompressedTensorsConfig._check_scheme_supported": supported,
        "sglang.kernels.ops.quantization.fp8_kernel.scaled_fp8_quant": scaled_fp8_quant,
    }.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def keep(original: Callable[..., None], method: Any, layer: torch.nn.Module) -> None:
    """Replaces process_weights_after_loading of linear layers and experts.

    Keeps the weights as they are.
    """
    if not method.block_quant:
        raise NotImplementedError("without CUDA, quantization=fp8 is served in blocks only")


def supported(
    original: Callable[..., bool], config: Any, min_capability: int, error: bool = True
) -> bool:
    """Replaces the check of a compressed-tensors scheme against the capability of the GPU."""
    return True


def scaled_fp8_quant(
    original: Callable[..., Any],
    values: torch.Tensor,
    scale: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces the kernel that converts the parts of a fused weight to one scale after loading."""
    assert scale is not None and not options
    limit = torch.finfo(torch.float8_e4m3fn).max
    return (values.float() / scale).clamp(-limit, limit).to(torch.float8_e4m3fn), scale


def apply_block_linear(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return F.linear(
        x,
        dequantised(layer.weight, layer.weight_scale_inv, method.weight_block_size).to(x.dtype),
        bias,
    )


def apply_linear(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Applies a linear layer with a weight [in, out] and a scale [out, 1] or []."""
    return F.linear(x, (layer.weight.t().float() * layer.weight_scale).to(x.dtype), bias)


def apply_block_experts(
    original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any
) -> Any:
    block = method.weight_block_size
    w13 = dequantised(layer.w13_weight, layer.w13_weight_scale_inv, block)
    w2 = dequantised(layer.w2_weight, layer.w2_weight_scale_inv, block)
    return _experts(w13, w2, method, layer, dispatch_output)


def apply_experts(
    original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any
) -> Any:
    w13 = of_experts(layer.w13_weight, layer.w13_weight_scale)
    w2 = of_experts(layer.w2_weight, layer.w2_weight_scale)
    return _experts(w13, w2, method, layer, dispatch_output)


def _experts(
    w13: torch.Tensor, w2: torch.Tensor, method: Any, layer: Any, dispatch_output: Any
) -> Any:
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    weights: Any = SimpleNamespace(
        num_experts=layer.num_experts, w13_weight=w13.to(x.dtype), w2_weight=w2.to(x.dtype)
    )
    result = fused_moe_native.moe_forward_native(
        weights, x, dispatch_output.topk_output, method.moe_runner_config
    )
    return StandardCombineInput(hidden_states=result)


def of_experts(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantises codes [E, out, in] with scales [E, out, 1] or [E] to float32 [E, out, in]."""
    return codes.float() * scales.view(len(codes), -1, 1)


def dequantised(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Dequantises e4m3 codes [..., out, in] to float32; scales are [..., ceil(out / rows), ceil(in
    / cols)] for blocks of [rows, cols].
    """
    rows, cols = codes.shape[-2:]
    spread = scales.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[
        ..., :cols
    ]
    return codes.float() * spread
