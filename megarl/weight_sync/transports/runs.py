"""Splits boxes of tensors into runs of contiguous memory, for one-sided writes by address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megarl.weight_sync.transports.base import RemoteTensor


def destination_runs(values: torch.Tensor, start: tuple[int, ...], tensor: RemoteTensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (offset in the endpoint's memory, values) for each contiguous run of the box of `tensor` that begins at `start`."""
    dim = len(tensor.shape)  # from here on the box is contiguous in the destination
    extent = 1
    while dim and tensor.strides[dim - 1] == extent:
        dim -= 1
        extent *= tensor.shape[dim]
        if values.shape[dim] != tensor.shape[dim]:
            break
    item = values.element_size()
    first = tensor.offset_bytes + item * sum(s * stride for s, stride in zip(start, tensor.strides))
    for index in _indices(values.shape[:dim]):
        yield first + item * sum(i * stride for i, stride in zip(index, tensor.strides)), values[index]


def pieces(values: torch.Tensor, most_bytes: int) -> Iterator[torch.Tensor]:
    """Splits `values` into views of at most `most_bytes`, in the order of its elements."""
    if values.nbytes <= most_bytes:
        yield values
        return
    row_bytes = values.nbytes // len(values)
    if row_bytes > most_bytes:
        for row in values:
            yield from pieces(row, most_bytes)
    else:
        yield from values.split(most_bytes // row_bytes)


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return (tuple(i) for i in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist()) if shape else iter([()])
