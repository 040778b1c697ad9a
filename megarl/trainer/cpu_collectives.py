"""Two collectives that gloo refuses if ranks have different numbers of rows, as with an expert's tokens under etp > 1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather_uneven(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replaces megatron.core.tensor_parallel.mappings._gather_along_first_dim: pads all parts to the length of the longest."""

    @functools.wraps(original)
    def wrapper(x: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *args: Any) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return original(x, group, sizes, *args)
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, max(sizes) - x.size(0)))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return wrapper


def reduce_scatter_uneven(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replaces megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim: sums everything, and takes this rank's part."""

    @functools.wraps(original)
    def wrapper(x: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *args: Any) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return original(x, group, sizes, *args)
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].clone()

    return wrapper
