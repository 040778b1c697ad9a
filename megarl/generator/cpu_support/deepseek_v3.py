"""DeepSeek-V3 in SGLang without CUDA: one form of latent attention, the rotary embedding, and the
router as GPUs compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megarl.generator.cpu_support.fp8 import dequantised


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    model = "sglang.srt.models.deepseek_v2."
    loader = "sglang.srt.models.deepseek_common.deepseek_weight_loader."
    HookRegistry.register(
        loader + "block_quant_to_tensor_quant", dequantised_projection, HookType.AROUND
    )
    HookRegistry.register(
        model + "DeepseekV2AttentionMLA.dispatch_attn_forward_method",
        always_absorbed,
        HookType.AFTER,
    )
    HookRegistry.register(model + "MoEGate.forward", router_logits, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", rope, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.layers.moe.topk.biased_grouped_topk_impl", uncompiled, HookType.AROUND
    )


def always_absorbed(result: Any, *_: Any) -> Any:
    """Runs after the choice of a form of attention, and always takes the absorbed one.

    For prompts SGLang would compute keys and values of all heads, and `torch_native` would look for
    them in the cache. But the cache has only latents, which the absorbed form reads and writes.
    """
    return type(result).MLA


def router_logits(
    original: Callable[..., torch.Tensor],
    gate: Any,
    hidden_states: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Router logits, float32 [T, E], from hidden states [T, H].

    GPUs keep bf16 products in float32. The original would round them.
    """
    return F.linear(hidden_states.float(), gate.weight.float())


def rope(
    original: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,  # declared so by SGLang, but may be a float
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    *options: Any,
) -> Any:
    """Runs around the choice of a rotary embedding on CPUs, which knows only DeepSeek's YaRN."""
    if rope_scaling is not None:
        return original(
            head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, *options
        )
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(head_size, rotary_dim, max_position, base, is_neox_style)


def dequantised_projection(
    original: Callable[..., Any], codes: torch.Tensor, scales: torch.Tensor, block: list[int]
) -> tuple[torch.Tensor, None]:
    """Dequantises kv_b_proj to bf16, as SGLang does on GPUs.

    Elsewhere it would requantise it with one scale.
    """
    return dequantised(codes, scales, (block[0], block[1])).to(torch.bfloat16), None


def uncompiled(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a function eagerly. torch would compile it, with a C++ compiler that may be missing."""
    with torch.compiler.set_stance("force_eager"):
        return original(*args, **kwargs)
