"""Proves a list of copies, and executes it on tensors of one address space, copy by copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch
from msgspec import structs

from megarl.base.geometry import Box
from megarl.reshard.execute import AmaxTable, payload
from megarl.reshard.layout import Layout, LocalTensor, Piece
from megarl.reshard.map import Copy
from megarl.reshard.proof import ProofError, _check_content, _check_cover, _extents, _Write
from megarl.reshard.template import ZEROS


def apply_copy(
    copy: Copy,
    source_tensor: torch.Tensor | None,
    destination_tensor: torch.Tensor,
    amax: AmaxTable | None = None,
) -> None:
    """Writes the copy's box of `destination_tensor`. Both tensors are whole, as in the layouts.

    A cast rounds to nearest even, like `Tensor.to`. Zeros need no `source_tensor`.
    """
    target = destination_tensor[copy.destination_box.slices()]
    if copy.transform == ZEROS:
        target.zero_()
    else:
        target.copy_(payload(copy, source_tensor, amax))


def prove_copies(copies: Iterable[Copy], source: Layout, destination: Layout) -> None:
    """The proof of `prove_exactly_once` on a plain list of all copies, tensor by tensor.

    Raises ProofError with tensor and rank.
    """
    by_rank: dict[int, dict[str, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for copy in copies:
        by_rank[copy.destination_rank][copy.destination_tensor].append(copy)
    sources = [
        {tensor.name: tensor for tensor in source.tensors(rank)}
        for rank in range(source.world_size)
    ]
    extents = _extents(tensor for tensors in sources for tensor in tensors.values())
    for rank in range(destination.world_size):
        pending = by_rank.pop(rank, {})
        for tensor in destination.tensors(rank):
            place = f"{tensor.name} on {destination.name} rank {rank}"
            writes = pending.pop(tensor.name, [])
            _check_cover(place, tensor.shape, [copy.destination_box for copy in writes])
            for copy in writes:
                quantisation = copy.quantisation
                source_tensor = None
                if copy.transform != ZEROS:
                    source_tensor = sources[copy.source_rank].get(copy.source_tensor or "")
                    if source_tensor is None:
                        raise ProofError(
                            f"{place}: {source.name} rank {copy.source_rank} has no "
                            f"{copy.source_tensor}"
                        )
                rule = quantisation.rule if quantisation else None
                cut = quantisation.cut if quantisation else False
                checked = _Write(
                    place,
                    copy.transform,
                    tensor,
                    copy.destination_box,
                    source_tensor,
                    copy.source_box,
                    rule,
                    cut,
                    extents,
                )
                logical = _check_content(_lifted(checked))
                if quantisation is not None and (
                    logical is None or quantisation.origin != logical.logical.start[-2:]
                ):
                    raise ProofError(
                        f"{place}: tiles are counted from {quantisation.origin}, but the weights are "
                        f"{logical}"
                    )
        for name in pending:
            raise ProofError(
                f"{name} on {destination.name} rank {rank}: written, but not in the layout"
            )
    for rank in by_rank:
        raise ProofError(f"{destination.name} rank {rank} is written, but not in the layout")


def _lifted(write: _Write) -> _Write:
    """Adds leading dims of 1 to the side that has fewer."""
    dims = max(len(write.tensor.shape), len(write.source.shape) if write.source else 0)
    if len(write.tensor.shape) == dims and (
        write.source is None or len(write.source.shape) == dims
    ):
        return write
    source = None if write.source is None else _lift(write.source, dims)
    origin = None if write.origin is None else _lifted_box(write.origin, dims)
    extents = {name: (1,) * (dims - len(shape)) + shape for name, shape in write.extents.items()}
    return replace(
        write,
        tensor=_lift(write.tensor, dims),
        box=_lifted_box(write.box, dims),
        source=source,
        origin=origin,
        extents=extents,
    )


def _lift(tensor: LocalTensor, dims: int) -> LocalTensor:
    pieces = tuple(
        Piece(_lifted_box(p.local, dims), p.logical_name, _lifted_box(p.logical, dims))
        for p in tensor.pieces
    )
    return structs.replace(
        tensor, shape=(1,) * (dims - len(tensor.shape)) + tensor.shape, pieces=pieces
    )


def _lifted_box(box: Box, dims: int) -> Box:
    missing = dims - len(box.start)
    return Box((0,) * missing + box.start, (1,) * missing + box.shape)
