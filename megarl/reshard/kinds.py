"""Layouts say which rank holds which elements of which logical tensor, and under which local name.

A layout is kept factorised. A `Kind` is one parameter: it states once what each of its shards holds, with a table of the ranks that hold
each shard on each pipeline stage. Layers, experts and replicas are expanded only when a rank's tensors are asked for. In a shard's
statement, experts are a leading dim of both boxes, whether the engine stacks them or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from megarl.box import Box
from megarl.kernels.quantise_rules import Rule
from megarl.models.parameters import EXPERT_FIELD, FIRST, LAYER, LAYER_FIELD, Layers

Coordinates = dict[tuple[int, int], list[tuple[int, int]]]  # (stage, replica) of everything that a rank holds, by kind and shard

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


class Piece(msgspec.Struct, frozen=True, gc=False):
    """`local`, a box of the local tensor, holds `logical`, a box of the logical tensor. Both have the same shape.

    If an engine stacks experts, `local` belongs to one expert, and `logical` has a leading dim of 1 for it.
    """

    local: Box
    logical_name: str
    logical: Box


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor in a rank's memory. Elements that no piece covers are padding, which holds zeros."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    engine_shape: tuple[int, ...] | None = None  # if the engine shows the same memory in another shape: transposed, or a scalar
    experts: tuple[int, int] | None = None  # first and end of a shard's experts, in the statement of an expert kind

    def expand(self, layer: int | None) -> tuple[LocalTensor, ...]:
        """The tensors that this statement stands for at one layer, with names resolved and experts one by one."""
        if layer is None:
            return (self,)
        number = str(layer)
        pieces = tuple([Piece(p.local, p.logical_name.replace(LAYER_FIELD, number), p.logical) for p in self.pieces])
        tensor = replace(self, name=self.name.replace(LAYER_FIELD, number), pieces=pieces, experts=None)
        if self.experts is None:
            return (tensor,)
        apart = [(e, expert, piece) for piece in pieces for e, expert, piece in _of_each_expert(piece)]
        if EXPERT_FIELD not in self.name:  # stacked
            return (replace(tensor, pieces=tuple(piece for _, _, piece in apart)),)
        own: dict[int, list[Piece]] = {expert: [] for expert in range(*self.experts)}
        for _, expert, piece in apart:
            own[expert].append(Piece(piece.local.drop(), piece.logical_name, piece.logical.drop()))
        return tuple(
            replace(tensor, name=tensor.name.replace(EXPERT_FIELD, str(expert)), shape=self.shape[1:], pieces=tuple(own[expert]))
            for expert in own
        )


def _of_each_expert(piece: Piece) -> Iterator[tuple[int, int, Piece]]:
    """Yields (local expert, global expert, its piece)."""
    for i in range(piece.local.shape[0]):
        e, expert = piece.local.start[0] + i, piece.logical.start[0] + i
        local = Box((e,) + piece.local.start[1:], (1,) + piece.local.shape[1:])
        logical = Box((0,) + piece.logical.start[1:], (1,) + piece.logical.shape[1:])
        yield e, expert, Piece(local, piece.logical_name.replace(EXPERT_FIELD, str(expert)), logical)


class LayoutError(RuntimeError):
    """A live trainer rank or engine does not keep its weights as the reshard map says."""


@dataclass(frozen=True, eq=False)
class Kind:
    """One parameter of a layout.

    Instance i is the tensor of layer `first_layer + i` for place LAYER; other places have one instance (i = 0). It lives on stage
    `stages[i]`, where replica e of its shard s lies on rank `ranks[stages[i], s, e]`.
    """

    name: str
    place: str  # FIRST | LAYER | LAST
    shards: tuple[LocalTensor, ...]  # [S]
    stages: np.ndarray  # [instances]
    ranks: np.ndarray  # [stages, S, replicas]
    first_layer: int = 0
    rule: Rule | None = None  # of quantisation; if set, the shards are e4m3, and kind number `scales` holds their scales
    scales: int | None = None
    scales_of: int | None = None  # if these are scales: number of the kind that they belong to

    @property
    def instances(self) -> int:
        return len(self.stages)

    @property
    def replicas(self) -> int:
        return self.ranks.shape[2]

    @property
    def bytes(self) -> int:
        """Bytes of all instances, shards and replicas."""
        sizes = [math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in self.shards]
        return sum(sizes) * self.instances * self.replicas

    @property
    def layers(self) -> Layers | None:
        return (self.first_layer, self.first_layer + self.instances) if self.place == LAYER else None

    def layer(self, instance: int) -> int | None:
        return self.first_layer + instance if self.place == LAYER else None

    def name_of(self, instance: int) -> str:
        """The name at one instance; it may still contain `{expert}`."""
        return self.name.replace(LAYER_FIELD, str(self.first_layer + instance))

    def tensors(self, shard: int, instance: int) -> tuple[LocalTensor, ...]:
        """One tensor, or one per expert if the engine keeps experts apart."""
        return self.shards[shard].expand(self.layer(instance))

    def tensor(self, shard: int, instance: int) -> LocalTensor:
        """The tensor of a kind that has one tensor per layer."""
        (only,) = self.tensors(shard, instance)
        return only

    def bare(self, shard: int, stage: int) -> list[LocalTensor]:
        """The tensors of a shard on a stage, without their pieces."""
        held, names = self.shards[shard], [self.name_of(i) for i in np.flatnonzero(self.stages == stage).tolist()]
        shape = held.shape
        if held.experts is not None and EXPERT_FIELD in self.name:
            names = [name.replace(EXPERT_FIELD, str(expert)) for name in names for expert in range(*held.experts)]
            shape = shape[1:]
        return [LocalTensor(name, shape, held.dtype, (), held.engine_shape) for name in names]

    def coordinates(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """(stage, shard, replica) of everything of this kind that `rank` holds."""
        found = np.flatnonzero(self.ranks.ravel() == rank)
        if len(found) == 0:
            return ()
        per_shard = self.ranks.shape[2]
        per_stage = self.ranks.shape[1] * per_shard
        return tuple((i // per_stage, i % per_stage // per_shard, i % per_shard) for i in found.tolist())


@dataclass(frozen=True, eq=False)
class Layout:
    """Says where every element lives among `world_size` ranks."""

    name: str  # "trainer" | "generator" | "hf": used in messages
    world_size: int
    kinds: tuple[Kind, ...]

    def tensors(self, rank: int) -> tuple[LocalTensor, ...]:
        """The local tensors of `rank` in forward order: the first stage's, layer by layer, the last stage's."""
        return tuple(tensor for _, _, tensor in self._in_order(rank))

    def _in_order(self, rank: int) -> list[tuple[int, int, LocalTensor]]:
        """(depth, number of the kind, tensor) for everything on `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{self.name} has ranks 0 to {self.world_size - 1}, not {rank}")
        found = []
        for order, kind in enumerate(self.kinds):
            for stage, shard, _ in kind.coordinates(rank):
                instances = np.flatnonzero(kind.stages == stage).tolist()
                found += [(self.depth(kind, i), order, tensor) for i in instances for tensor in kind.tensors(shard, i)]
        return sorted(found, key=lambda entry: entry[:2])

    def coordinates(self, rank: int) -> Coordinates:
        of_mesh: dict[int, tuple[tuple[int, int, int], ...]] = {}  # kinds of one mesh share its table of ranks
        found: Coordinates = {}
        for k, kind in enumerate(self.kinds):
            mesh = id(kind.ranks)
            if mesh not in of_mesh:
                of_mesh[mesh] = kind.coordinates(rank)
            for stage, shard, replica in of_mesh[mesh]:
                found.setdefault((k, shard), []).append((stage, replica))
        return found

    def shapes(self, rank: int) -> tuple[LocalTensor, ...]:
        """The local tensors of `rank` in the order of names, without their pieces. Ranks that hold alike ones share them."""
        held = tuple((k, self._alike[k][shard], tuple(stage for stage, _ in at)) for (k, shard), at in self.coordinates(rank).items())
        if held not in self._shapes:
            found = [bare for k, shard, stages in held for stage in stages for bare in self.kinds[k].bare(shard, stage)]
            self._shapes[held] = tuple(sorted(found, key=lambda tensor: tensor.name))
        return self._shapes[held]

    @cached_property
    def _shapes(self) -> dict[tuple, tuple[LocalTensor, ...]]:
        return {}

    @cached_property
    def _alike(self) -> list[list[int]]:
        """For each kind and shard, the first shard that differs in nothing but its pieces."""
        stated = [[replace(shard, pieces=()) for shard in kind.shards] for kind in self.kinds]
        return [[shards.index(shard) for shard in shards] for shards in stated]

    def owned_pieces(self, rank: int) -> Iterator[tuple[LocalTensor, Piece]]:
        """The pieces that `rank` owns. Over all ranks, every element of every logical tensor is owned exactly once.

        The owner is the first replica among holders of the same elements; for a tensor with two names (a tied embedding on the first and
        the last stage) it holds the first name; for one that several shards hold, it is the first shard.
        """
        return ((tensor, piece) for tensor, piece, replica, _ in self.shared_pieces(rank) if not replica)

    def shared_pieces(self, rank: int) -> Iterator[tuple[LocalTensor, Piece, int, int]]:
        """(tensor, piece, replica, replicas) of the pieces that `rank` owns together with its replicas: as `owned_pieces`, but on every
        replica."""
        owner: dict[tuple[str, Layers | None], str] = {}
        for kind in self.kinds:
            for shard in kind.shards:
                for piece in shard.pieces:
                    owner.setdefault((piece.logical_name, kind.layers), kind.name)
        for kind in self.kinds:
            for stage, shard, replica in kind.coordinates(rank):
                before = {(p.logical_name, p.logical) for s in range(shard) for p in kind.shards[s].pieces}
                wanted = [
                    p
                    for p in kind.shards[shard].pieces
                    if owner[p.logical_name, kind.layers] == kind.name and (p.logical_name, p.logical) not in before
                ]
                own = replace(kind.shards[shard], pieces=tuple(wanted))
                for instance in np.flatnonzero(kind.stages == stage).tolist():
                    for tensor in own.expand(kind.layer(instance)):
                        yield from ((tensor, piece, replica, kind.replicas) for piece in tensor.pieces)

    @cached_property
    def num_layers(self) -> int:
        return max((kind.first_layer + kind.instances for kind in self.kinds if kind.place == LAYER), default=0)

    def depth(self, kind: Kind, instance: int) -> int:
        """The position in the forward pass: 0 for the first stage's tensors, 1 + layer for layers, then the last stage's."""
        if kind.place == LAYER:
            return 1 + kind.first_layer + instance
        return 0 if kind.place == FIRST else 1 + self.num_layers
