"""Gated delta nets and their gated attention in SGLang without CUDA: torch versions of the
functions that SGLang calls in sgl_kernel, and of three Triton kernels.

`sgl_kernel.mamba` and the operators of sgl_kernel are built only for CPUs with AMX, and are on no
package index. This module replaces both. SGLang keeps two states of a request in a slot of its
pool: the newest inputs of the convolution, [slots, channels, width - 1], and for each head the
state of the delta rule, [slots, heads, dv, dk].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megarl.kernels.gated_delta_rule import gated_delta_rule, gated_delta_step, l2norm


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    norms = "sglang.kernels.ops.attention.fla."
    # Qwen3-Next's and Qwen3.5's
    for norm in ("fused_norm_gate.FusedRMSNormGated", "layernorm_gated.RMSNorm"):
        HookRegistry.register(f"{norms}{norm}.forward", gated_norm, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.models.qwen3_next.Qwen3GatedDeltaNet.__init__", built, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.models.qwen2_moe.fused_gate_sigmoid_mul_add", add_gated, HookType.AROUND
    )


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """x [channels, t], new tokens of several requests end to end -> the same shape.

    Updates the requests' states.
    """
    assert bias is None and activation == "silu"
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    for start, end, slot, goes_on in zip(
        starts, starts[1:], cache_indices.tolist(), has_initial_state.tolist()
    ):
        before = conv_states[slot].to(x.dtype) if goes_on else x.new_zeros(conv_states[slot].shape)
        window = torch.cat([before, x[:, start:end]], dim=1)
        out[:, start:end] = F.silu(
            F.conv1d(window.float()[None], weight.float()[:, None], groups=len(x))[0]
        ).to(x.dtype)
        conv_states[slot] = window[:, -before.size(1) :]
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """x [requests, channels], one new token of each request -> the same shape.

    Updates the requests' states.
    """
    assert bias is None and activation == "silu"
    slots = conv_state_indices.long()
    window = torch.cat([conv_states[slots].to(x.dtype), x[..., None]], dim=-1)
    conv_states[slots] = window[..., 1:].to(conv_states.dtype)
    return F.silu((window.float() * weight.float()).sum(-1)).to(x.dtype)


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """q and k [1, t, key heads, dk], v [1, t, heads, dv], g and beta [1, t, heads] -> [1, t, heads,
    dv]. Updates the states.
    """
    q, k = (_of_value_heads(x[0], v.size(2)) for x in (q, k))
    slots = initial_state_indices.long()
    out, states = gated_delta_rule(
        q, k, v[0], g[0], beta[0], cu_seqlens.tolist(), initial_state[slots].mT
    )
    initial_state[slots] = states.mT.to(initial_state.dtype)
    return out[None], None, None


def fused_gdn_gating_cpu(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of each head's decay, and the strength of its writes: both [1, t, heads], from
    a and b [t, heads].
    """
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """The gated delta rule for one new token of each request: q and k [1, requests, key heads, dk]
    -> [1, requests, heads, dv].
    """
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    q, k = (_of_value_heads(x[0], v.size(2)) for x in (q, k))
    slots = initial_state_indices.long()
    out, states = gated_delta_step(q, k, v[0], g[0], beta[0], initial_state_source[slots].mT)
    initial_state_source[slots] = states.mT.to(initial_state_source.dtype)
    return out[None]


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, key_heads: int, heads: int, dk: int, dv: int
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values [t, channels], output gates [t, heads, dv], betas and alphas [t,
    heads]. The inputs are sorted by kind.
    """
    qkv, z = qkvz.split([2 * key_heads * dk + heads * dv, heads * dv], dim=-1)
    b, a = ba.split(heads, dim=-1)
    return (
        qkv.contiguous(),
        z.unflatten(-1, (heads, dv)).contiguous(),
        b.contiguous(),
        a.contiguous(),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    d: int,
    heads: int,
) -> tuple[torch.Tensor, ...]:
    """Normed queries [t, heads, d] and keys, and the gates [t, heads, d], which follow each head's
    queries in `q_gate`.
    """
    q, gate = q_gate.unflatten(-1, (heads, 2, d)).unbind(-2)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, d), gate.contiguous()


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    d: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, normalised per head with zero-centred weights."""
    q, k = (
        F.rms_norm(x.float().unflatten(-1, (-1, d)), (d,), 1.0 + weight.float(), eps)
        .to(x.dtype)
        .contiguous()
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return q, k


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """In place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


OPERATORS = (
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_sigmoid_mul_cpu,
)


def _of_value_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Normalised queries or keys in float32, repeated for each value head of their key head."""
    return l2norm(x.float()).repeat_interleave(heads // x.size(1), dim=1)


def built(original: Callable[..., None], layer: Any, *arguments: Any, **named: Any) -> None:
    """Runs around the constructor of a layer, which asks torch for the device's module.

    A torch for CUDA would return CUDA's.
    """
    get_device_module = torch.get_device_module
    torch.get_device_module = lambda *_: torch.cpu  # type: ignore[assignment]
    try:
        original(layer, *arguments, **named)
    finally:
        torch.get_device_module = get_device_module


def gated_norm(
    original: Callable[..., torch.Tensor],
    norm: Any,
    x: torch.Tensor,
    gate: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Replaces the Triton kernel of a gated norm."""
    assert norm.activation in ("swish", "silu")
    return (
        F.rms_norm(x.float(), (x.size(-1),), norm.weight.float(), norm.eps) * F.silu(gate.float())
    ).to(x.dtype)


def add_gated(
    original: Callable[..., None],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    shared: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Replaces the Triton kernel that adds the gated output of the shared expert to `output`."""
    output += (hidden.float() @ weight.float()).sigmoid()[:, None].to(shared.dtype) * shared
