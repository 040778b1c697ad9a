"""Context parallelism: every sequence is cut into 2n chunks, and rank r of n holds chunks r and 2n - 1 - r.

So each rank has early positions, which attend to few tokens, and late ones: under a causal mask all ranks have the same work. It is
Megatron's and Transformer Engine's own order for packed sequences (thd_get_partitioned_indices), which their rotary embeddings follow.

`boundaries`, of the sequences in the whole row, are those of a MicrobatchPlan; 2n divides all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.trainer.sending import sent


def held_positions(boundaries: Sequence[int], ranks: int, rank: int) -> torch.Tensor:
    """[t / ranks] int64: the positions of a row that `rank` of `ranks` holds, in its order."""
    lengths = np.diff(boundaries)
    within = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], lengths)
    chunk = within // np.repeat(lengths // (2 * ranks), lengths)
    return torch.from_numpy(np.flatnonzero((chunk == rank) | (chunk == 2 * ranks - 1 - rank)))


def all_positions(boundaries: Sequence[int], ranks: int) -> torch.Tensor:
    """[t] int64: the positions that all ranks hold, rank after rank."""
    return torch.cat([held_positions(boundaries, ranks, rank) for rank in range(ranks)])


def cut(x: torch.Tensor, boundaries: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part, [t / n, ...], of x [t, ...]."""
    return x if group.size() == 1 else x[sent(held_positions(boundaries, group.size(), group.rank()), x.device)]


def join(x: torch.Tensor, boundaries: Sequence[int], group: dist.ProcessGroup, summed: bool = False) -> torch.Tensor:
    """Joins every rank's part x [t / n, ...] to [t, ...] on all ranks; differentiable.

    Either all ranks compute the same function of the result: then its gradient is the same on all, and each takes its own part of it. Or
    each computes its own, and with `summed` the ranks' gradients are summed.
    """
    if group.size() == 1:
        return x
    parts = _Gather.apply(x, group, summed)
    return torch.empty_like(parts).index_copy(0, sent(all_positions(boundaries, group.size()), x.device), parts)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, summed: bool) -> torch.Tensor:
        ctx.group, ctx.summed = group, summed
        out = x.new_empty((group.size() * x.size(0), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        if ctx.summed:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None, None
