"""Boxes of tensor elements, and the coordinates of ranks on their parallel axes.

Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec


class Box(msgspec.Struct, frozen=True, gc=False):
    """The elements `start[d] <= index[d] < start[d] + shape[d]` of a tensor.

    (A struct is created ten times as fast as a dataclass.)
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple([s + n for s, n in zip(self.start, self.shape)])

    def slices(self) -> tuple[slice, ...]:
        """The index of the box: `tensor[box.slices()]` is a view."""
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.shape))

    def intersect(self, box: Box) -> Box | None:
        """The common elements, or None."""
        start = []
        shape = []
        for a, m, b, n in zip(self.start, self.shape, box.start, box.shape):
            low = a if a > b else b
            extent = (a + m if a + m < b + n else b + n) - low
            if extent <= 0:
                return None
            start.append(low)
            shape.append(extent)
        return Box(tuple(start), tuple(shape))

    def contains(self, box: Box) -> bool:
        return all(
            a <= b and b + n <= a + m
            for a, m, b, n in zip(self.start, self.shape, box.start, box.shape)
        )

    def move(self, origin: Box, target: Box) -> Box:
        """This box, which lies in `origin`, shifted by the distance from the first element of
        `origin` to that of `target`.
        """
        return Box(
            tuple([s - a + b for s, a, b in zip(self.start, origin.start, target.start)]),
            self.shape,
        )

    def drop(self) -> Box:
        """The same box without its first dim."""
        return Box(self.start[1:], self.shape[1:])

    def entry(self, index: int) -> Box:
        """The box of one entry of the first dim, which stays."""
        return Box((self.start[0] + index,) + self.start[1:], (1,) + self.shape[1:])

    def transpose(self) -> Box:
        """The same box with its last two dims exchanged."""
        *start, start_1, start_2 = self.start
        *shape, shape_1, shape_2 = self.shape
        return Box((*start, start_2, start_1), (*shape, shape_2, shape_1))

    def subtract(self, box: Box) -> Iterator[Box]:
        """Disjoint boxes that together are this box without `box`: at most two per dimension."""
        common = self.intersect(box)
        if common is None:
            yield self
            return
        start = list(self.start)
        shape = list(self.shape)
        for d in range(len(start)):
            before = common.start[d] - start[d]
            after = start[d] + shape[d] - common.start[d] - common.shape[d]
            if before:
                yield Box(tuple(start), tuple(shape[:d] + [before] + shape[d + 1 :]))
            if after:
                yield Box(
                    tuple(start[:d] + [common.end[d]] + start[d + 1 :]),
                    tuple(shape[:d] + [after] + shape[d + 1 :]),
                )
            start[d] = common.start[d]
            shape[d] = common.shape[d]

    def join(self, box: Box) -> tuple[int, Box] | None:
        """(dim, union) if `box` directly continues this box along exactly one dim, else None."""
        differing = [
            d
            for d in range(len(self.start))
            if (self.start[d], self.shape[d]) != (box.start[d], box.shape[d])
        ]
        if len(differing) != 1:
            return None
        d = differing[0]
        if self.start[d] + self.shape[d] != box.start[d]:
            return None
        return d, Box(
            self.start, self.shape[:d] + (self.shape[d] + box.shape[d],) + self.shape[d + 1 :]
        )


def whole_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


# State slots of gated delta nets that an engine has for each request it may run: three, which
# SGLang's prefix cache needs, and two more if its scheduler works ahead
# (sglang/srt/mem_cache/kv_cache_configurator.py, _calculate_mamba_ratio).
STATES_PER_REQUEST = 5

# families whose SGLang models can run attention data-parallel
DP_ATTENTION_FAMILIES = ("deepseek_v3", "qwen3_moe")


@dataclass(frozen=True)
class TrainerCoordinate:
    """The coordinate of one trainer rank on the mesh axes."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class TrainerTopology:
    """Sizes of the trainer's mesh axes.

    Ranks run in Megatron's default order: tp fastest, then cp, dp, pp.

    Experts live on a mesh of their own over the same ranks (megatron/core/parallel_state.py): etp
    fastest, then ep, then the replicas of an expert, then pp. Within a stage etp * ep * expert_dp =
    tp * cp * dp.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    zero: int = 1
    # None: stages without a number share the other layers evenly
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """The number of replicas of an expert.

        It is not whole if ep * etp does not divide the ranks of a stage.
        """
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def coordinate(self, rank: int) -> TrainerCoordinate:
        quotient, tp = divmod(rank, self.tp)
        quotient, cp = divmod(quotient, self.cp)
        pp, dp = divmod(quotient, self.dp)
        return TrainerCoordinate(tp=tp, cp=cp, dp=dp, pp=pp)

    @property
    def replicas(self) -> list[list[int]]:
        """[dp][…] the ranks at each data-parallel coordinate, which train on the same
        sequences.
        """
        ranks: list[list[int]] = [[] for _ in range(self.dp)]
        for rank in range(self.world_size):
            ranks[self.coordinate(rank).dp].append(rank)
        return ranks

    def rank(self, coordinate: TrainerCoordinate) -> int:
        c = coordinate
        return c.tp + self.tp * (c.cp + self.cp * (c.dp + self.dp * c.pp))


@dataclass(frozen=True)
class GeneratorTopology:
    """`engines` SGLang servers of `tp` ranks each.

    Generator rank g is TP rank g % tp of engine g // tp.

    In an engine, each block of tp / ep consecutive ranks holds the same experts, sharded over the
    block. With data-parallel attention (SGLang's attn_dp_size = dp_attention), each block of tp /
    dp_attention ranks holds attention and embedding, sharded over the block.
    """

    engines: int = 1
    tp: int = 1
    ep: int = 1
    dp_attention: int = 1

    @property
    def world_size(self) -> int:
        return self.engines * self.tp

    @property
    def attention_tp(self) -> int:
        """The number of ranks over which attention is sharded."""
        return self.tp // self.dp_attention
