"""Context parallelism: every sequence is cut into 2n chunks, and rank r of n holds chunks r and 2n - 1 - r.

So each rank has early positions, which attend to few tokens, and late ones: under a causal mask all ranks have the same work. It is
Megatron's own order (megatron/core/utils.py, get_batch_on_this_cp_rank), which its rotary embedding follows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def held_positions(length: int, ranks: int, rank: int) -> torch.Tensor:
    """[length / ranks] int64: the positions of a sequence that `rank` of `ranks` holds, in its order. 2 * ranks divides `length`."""
    chunks = torch.arange(length).view(2 * ranks, -1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def all_positions(length: int, ranks: int) -> torch.Tensor:
    """[length] int64: the positions that all ranks hold, rank after rank."""
    return torch.cat([held_positions(length, ranks, rank) for rank in range(ranks)])


def cut(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part, [b, s / n], of x [b, s]."""
    if group.size() == 1:
        return x
    return x[:, held_positions(x.size(1), group.size(), group.rank()).to(x.device)]


def join(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Joins every rank's part x [b, s / n] to [b, s] on all ranks; differentiable.

    All ranks must compute the same function of the result: then its gradient is the same on all, and each takes its own part of it.
    """
    if group.size() == 1:
        return x
    parts = _Gather.apply(x.transpose(0, 1), group, False)
    order = all_positions(parts.size(0), group.size()).to(x.device)
    return torch.empty_like(parts).index_copy(0, order, parts).transpose(0, 1)


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers x [s / n, ...] to [s, ...], in the order of `all_positions`; differentiable. The ranks' gradients are summed."""
    return x if group.size() == 1 else _Gather.apply(x, group, True)


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
