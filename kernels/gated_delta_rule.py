"""The gated delta rule for packed sequences, and the convolution before it, in torch (Yang et al.
2024, arXiv 2412.06464).

Each head keeps a state S [dk, dv] that maps keys to values. Token t makes it decay, corrects the
value at its key, and reads:

    S <- exp(g_t) S;    S <- S + k_t (beta_t (v_t - S^T k_t))^T;    o_t = S^T q_t / sqrt(dk)

On GPUs, the engines' own kernels do this: Flash Linear Attention's in Megatron, SGLang's copy of
them in engines. These functions are for CPUs and for tests. The caller normalises keys and queries.
Sums are float32, or float64 if the values are. Every sequence has its own state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

CHUNK = 64  # number of tokens whose writes are solved for together


def causal_conv(x: torch.Tensor, weight: torch.Tensor, boundaries: Sequence[int]) -> torch.Tensor:
    """[t, c]: the depthwise convolution of x [t, c] with weight [c, w], over each token and the w -
    1 tokens before it in its sequence.
    """
    lengths = [end - start for start, end in itertools.pairwise(boundaries)]
    within = torch.cat([torch.arange(length, device=x.device) for length in lengths])
    out = x * weight[:, -1]
    for distance in range(1, weight.size(1)):
        shifted = F.pad(x, (0, 0, distance, 0))[: len(x)]
        earlier = torch.where((within >= distance)[:, None], shifted, 0)
        out = out + earlier * weight[:, -1 - distance]
    return out


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    boundaries: Sequence[int],
    states: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs [t, h, dv] in the dtype of v, the states [n, h, dk, dv] after each of n sequences).

    q and k [t, h, dk], v [t, h, dv], g and beta [t, h]; `states`: before each sequence, None for
    zeros. Sequences are cut into chunks that are solved in parallel; only the states pass from
    chunk to chunk. Differentiable.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    places, first = _chunks(boundaries)
    q, k, v_, g, beta = (
        _by_chunk(x.to(dtype), places) for x in (q * k.size(-1) ** -0.5, k, v, g, beta)
    )
    decay = g.cumsum(-1)  # [chunks, h, C]
    # decay from each token to each later one
    between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
    write = k * beta[..., None]
    system = (write @ k.mT) * between
    new = torch.linalg.solve_triangular(
        system, v_ * beta[..., None], upper=False, unitriangular=True
    )
    state_reads = torch.linalg.solve_triangular(
        system, write * decay.exp()[..., None], upper=False, unitriangular=True
    )
    inside = (q @ k.mT) * between
    reading = q * decay.exp()[..., None]
    carried_keys = k * (decay[..., -1:] - decay).exp()[..., None]
    at_end = decay[..., -1].exp()[..., None, None]
    outs = []
    ends = []
    state = q.new_zeros(())
    for chunk in range(len(places)):
        if chunk in first:
            if states is None:
                state = q.new_zeros(q.size(1), q.size(-1), v_.size(-1))
            else:
                state = states[first[chunk]].to(dtype)
        written = new[chunk] - state_reads[chunk] @ state
        outs.append(reading[chunk] @ state + inside[chunk] @ written)
        state = state * at_end[chunk] + carried_keys[chunk].mT @ written
        if chunk + 1 in first or chunk + 1 == len(places):
            ends.append(state)
    flat = torch.stack(outs).transpose(1, 2).flatten(0, 1)  # [chunks * C, h, dv]
    return flat[(places.flatten() < boundaries[-1]).nonzero()[:, 0]].to(v.dtype), torch.stack(ends)


def gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule for one token of each of n sequences: q and k [n, h, dk], v [n, h, dv], g and beta
    [n, h], states [n, h, dk, dv]. Returns outputs and states.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k, value, g, beta, states = (
        x.to(dtype) for x in (q * k.size(-1) ** -0.5, k, v, g, beta, states)
    )
    states = states * g.exp()[..., None, None]
    missing = (value - torch.einsum("nhkv,nhk->nhv", states, k)) * beta[..., None]
    states = states + k[..., None] * missing[..., None, :]
    return torch.einsum("nhkv,nhk->nhv", states, q).to(v.dtype), states


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x divided by the L2 norm over its last dim, as the GPU kernels compute it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _chunks(boundaries: Sequence[int]) -> tuple[torch.Tensor, dict[int, int]]:
    """(the token at each place of a chunk, [chunks, C], or the position after the last token if the
    place is empty; chunk -> number of the sequence that begins there).
    """
    rows = []
    first = {}
    for number, (start, end) in enumerate(itertools.pairwise(boundaries)):
        first[len(rows)] = number
        for begin in range(start, end, CHUNK):
            row = np.full(CHUNK, boundaries[-1])
            row[: min(CHUNK, end - begin)] = np.arange(begin, min(begin + CHUNK, end))
            rows.append(row)
    return torch.from_numpy(np.stack(rows)), first


def _by_chunk(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[chunks, h, C, ...] from x [t, h, ...].

    Empty places are zero: they neither write nor decay.
    """
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1))[places].transpose(1, 2)
