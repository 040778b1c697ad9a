"""Layouts: which rank holds which elements of which logical tensor, under which local name.

A layout is kept factorised. A `Kind` is one parameter: what each of its shards holds, stated once, and a table of the
ranks that hold each shard on each pipeline stage. Layers and replicas are expanded only when a rank's tensors are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megarl.models.parameters import LAST, LAYER, LAYER_FIELD
from megarl.reshard.box import Box

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Piece:
    """`local`, a box of the local tensor, holds `logical`, a box of the logical tensor. Both have the same shape."""

    local: Box
    logical_name: str
    logical: Box


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor in a rank's memory. What no piece covers is padding and holds zeros."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    def at_layer(self, layer: int) -> LocalTensor:
        """The tensor with `{layer}` in its names replaced by the global layer number."""
        number = str(layer)
        pieces = tuple(Piece(p.local, p.logical_name.replace(LAYER_FIELD, number), p.logical) for p in self.pieces)
        return LocalTensor(self.name.replace(LAYER_FIELD, number), self.shape, self.dtype, pieces)


@dataclass(frozen=True, eq=False)
class Kind:
    """One parameter of a layout.

    Instance i is the tensor of layer `i` for place LAYER, and the only one (i = 0) otherwise. It lives on stage
    `stages[i]`; there, replica e of its shard s lies on rank `ranks[stages[i], s, e]`.
    """

    name: str
    place: str  # FIRST | LAYER | LAST
    shards: tuple[LocalTensor, ...]  # [S]
    stages: np.ndarray  # [instances]
    ranks: np.ndarray  # [stages, S, replicas]

    @property
    def instances(self) -> int:
        return len(self.stages)

    def name_of(self, instance: int) -> str:
        return self.name.replace(LAYER_FIELD, str(instance))

    def tensor(self, shard: int, instance: int) -> LocalTensor:
        return self.shards[shard].at_layer(instance) if self.place == LAYER else self.shards[shard]

    def seats(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """(stage, shard, replica) of everything of this kind that `rank` holds."""
        return tuple((int(p), int(s), int(e)) for p, s, e in np.argwhere(self.ranks == rank))


@dataclass(frozen=True, eq=False)
class Layout:
    """Where every element lives over `world_size` ranks."""

    name: str  # "trainer" | "generator" | "hf": used in messages
    world_size: int
    kinds: tuple[Kind, ...]

    def tensors(self, rank: int) -> tuple[LocalTensor, ...]:
        """The local tensors of `rank` in forward order: first stage's, layer by layer, last stage's."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{self.name} has ranks 0 to {self.world_size - 1}, not {rank}")
        found = []
        for order, kind in enumerate(self.kinds):
            for stage, shard, _ in kind.seats(rank):
                found += [(self.depth(kind, i), order, kind.tensor(shard, i)) for i in range(kind.instances) if kind.stages[i] == stage]
        return tuple(tensor for _, _, tensor in sorted(found, key=lambda entry: entry[:2]))

    @cached_property
    def num_layers(self) -> int:
        return max((kind.instances for kind in self.kinds if kind.place == LAYER), default=0)

    def depth(self, kind: Kind, instance: int) -> int:
        """Position in the forward pass: 0 for the first stage's tensors, 1 + layer, then the last stage's."""
        return 1 + instance if kind.place == LAYER else (1 + self.num_layers if kind.place == LAST else 0)
