"""The part of a parameter that one shard holds: cut by tensor and expert parallelism; boxes of a run of its elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from megarl.box import Box, whole_box
from megarl.config.errors import ConfigError
from megarl.models.parameters import LogicalTensor, Parameter
from megarl.reshard.kinds import LocalTensor, Piece


def local_tensor(parameter: Parameter, logical: Mapping[str, LogicalTensor], shard: int, cut: tuple[int, int], dtype: str) -> LocalTensor:
    """Shard number `shard` of `cut` = (expert shards, shards of each tensor). Contiguous chunks; the second index runs faster."""
    expert_shard, tensor_shard = divmod(shard, cut[1])
    tensor = _whole(parameter, logical, dtype) if parameter.dim is None else _chunk(parameter, logical, tensor_shard, cut[1], dtype)
    if not parameter.of_expert:
        return tensor
    count = logical[parameter.parts[0].logical_name].experts // cut[0]
    pieces = tuple(Piece(_stack(p.local, 0, count), p.logical_name, _stack(p.logical, expert_shard * count, count)) for p in tensor.pieces)
    experts = expert_shard * count, (expert_shard + 1) * count
    return replace(tensor, shape=(count,) + tensor.shape, pieces=pieces, experts=experts)


def flat_boxes(shape: tuple[int, ...], first: int, end: int) -> Iterator[Box]:
    """Splits elements first .. end of the flattened tensor into boxes; in two dims at most three (two cut rows and those between)."""
    if first >= end:
        return
    if len(shape) <= 1:
        yield Box((first,) * len(shape), (end - first,) * len(shape))
        return
    size = math.prod(shape[1:])
    if first // size == (end - 1) // size:
        row, begin = first // size, first // size * size
        yield from (Box((row,) + box.start, (1,) + box.shape) for box in flat_boxes(shape[1:], first - begin, end - begin))
        return
    head, tail = -(-first // size), end // size
    yield from flat_boxes(shape, first, min(head * size, end))
    if head < tail:
        yield Box((head,) + (0,) * (len(shape) - 1), (tail - head,) + shape[1:])
    yield from flat_boxes(shape, tail * size, end)


def _whole(parameter: Parameter, logical: Mapping[str, LogicalTensor], dtype: str) -> LocalTensor:
    """The whole parameter, with its parts one below the other."""
    shapes = [logical[part.logical_name].shape for part in parameter.parts]
    pieces, row = [], 0
    for part, shape in zip(parameter.parts, shapes):
        local = Box((row,) + (0,) * (len(shape) - 1), shape)
        pieces.append(Piece(local, part.logical_name, whole_box(shape)))
        row += shape[0]
    return LocalTensor(parameter.name, (row,) + shapes[0][1:], dtype, tuple(pieces))


def _chunk(parameter: Parameter, logical: Mapping[str, LogicalTensor], shard: int, shards: int, dtype: str) -> LocalTensor:
    """Chunk `shard` of `shards` contiguous chunks of the parameter's groups (see models.parameters)."""
    dim, groups = parameter.dim, parameter.groups
    assert dim is not None
    tensors = [logical[part.logical_name] for part in parameter.parts]
    # per part: extent of one group's slice
    slices = [(part.padded or tensor.shape[dim]) * part.replicas // groups for part, tensor in zip(parameter.parts, tensors)]
    period = sum(slices)
    extent, rest = divmod(period * groups, shards)
    if rest:
        raise ConfigError(f"{parameter.name}: {period * groups} rows or columns cannot be cut into {shards} equal shards")
    begin, end = shard * extent, (shard + 1) * extent
    pieces = []
    for group in range(begin // period, -(-end // period)):
        offset = group * period
        for part, tensor, size in zip(parameter.parts, tensors, slices):
            skipped = max(0, begin - offset)  # a group may begin before the chunk and end after it
            start = group // part.replicas * size
            count = min(size, end - offset, tensor.shape[dim] - start) - skipped
            if count > 0:
                local = _cut(tensor.shape, dim, offset + skipped - begin, count)
                pieces.append(Piece(local, tensor.name, _cut(tensor.shape, dim, start + skipped, count)))
            offset += size
    shape = tensors[0].shape
    return LocalTensor(parameter.name, shape[:dim] + (extent,) + shape[dim + 1 :], dtype, tuple(pieces))


def _stack(box: Box, start: int, count: int) -> Box:
    return Box((start,) + box.start, (count,) + box.shape)


def _cut(shape: tuple[int, ...], dim: int, start: int, count: int) -> Box:
    zeros = (0,) * len(shape)
    return Box(zeros[:dim] + (start,) + zeros[dim + 1 :], shape[:dim] + (count,) + shape[dim + 1 :])
