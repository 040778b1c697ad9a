"""The reshard map: all copies that bring the weights of one layout into the tensors of another."""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from megarl.base.geometry import Box
from megarl.kernels.quantise_rules import Rule
from megarl.models.parameters import EXPERT_FIELD, LAYER_FIELD
from megarl.reshard.layout import (
    ITEM_BYTES,
    Coordinates,
    Kind,
    Layout,
    LocalTensor,
    of_whole_tensor,
)
from megarl.reshard.template import ZEROS, Holder, TemplateRow, coalesce, join
from megarl.reshard.turns import Turns

# (instance, index into row.holders, sender, receiver), sorted by instance
_Transfers = list[tuple[int, int, int, int]]


class Quantisation(Struct, frozen=True, gc=False):
    """How a copy's weights are quantised: the tensor that defines the tiles, and where the copy's
    source box begins in it.
    """

    rule: Rule
    tiles_of: str  # the logical tensor, or the parameter if one scale covers all of it
    origin: tuple[int, int]  # row and column of the first element in the logical tensor
    # whether a tile extends beyond this copy: its amax then comes from an AmaxTable
    # (reshard/execute.py)
    cut: bool


class Copy(Struct, frozen=True, gc=False):
    """Copies `source_box` of a tensor on `source_rank` to `destination_box`, of the same shape, on
    `destination_rank`.

    transform: "identity"; "cast" (the sender converts to `dtype` first); "zeros" (padding, which
    has a sender but no source tensor); "quantise" (bf16 to e4m3 by `quantisation`); "scale"
    (float32 scales of the tiles in the source box, so the shapes differ). A stacked tensor has a
    leading dim for experts, of size 1 in the box. The other side may lack this dim.
    """

    source_rank: int
    source_tensor: str | None
    source_box: Box | None
    destination_rank: int
    destination_tensor: str
    destination_box: Box
    transform: str
    dtype: str  # of the destination, and of the values sent
    # position of the destination tensor in the forward pass: 0, then 1 + layer, then num_layers + 1
    depth: int
    quantisation: Quantisation | None = None

    @property
    def bytes(self) -> int:
        return self.destination_box.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class MapSummary:
    trainer_ranks: int  # senders
    generator_ranks: int  # receivers
    tensors: int  # destination tensors, over all ranks
    copies: int
    writes: int  # copies after joining those that are contiguous on both sides
    bytes: int  # received, over all ranks
    bytes_minimum: int  # of all destination tensors, each byte counted once
    sender_max_over_mean: float
    receiver_max_over_mean: float
    relayed_bytes: int = 0  # the part of `bytes` that comes from other receivers


@dataclass(frozen=True, eq=False)
class ReshardMap:
    """The frozen copies from `source` to `destination`, kept as template rows.

    `copies_from` and `copies_to` write out a rank's part.

    A *write*, the unit of sending, is one copy, or several copies that are contiguous on both
    sides.
    """

    source: Layout
    destination: Layout
    rows: tuple[TemplateRow, ...] = field(repr=False)
    build_s: float = 0.0

    @classmethod
    def build(cls, source: Layout, destination: Layout) -> ReshardMap:
        """Builds the map by pure arithmetic, so it is equal on every rank.

        Raises ValueError if the layouts do not fit together.
        """
        begin = time.perf_counter()
        rows = join(source, destination)
        return cls(source, destination, rows, time.perf_counter() - begin)

    def __str__(self) -> str:
        sides = (
            f"{self.source.name} {self.source.world_size} -> {self.destination.name} "
            f"{self.destination.world_size}"
        )
        return f"ReshardMap({sides} ranks, plan {self.plan_hash[:16]})"

    def copies_from(self, rank: int) -> list[Copy]:
        """The copies that source rank `rank` sends, in forward order."""
        return copies_sent(self.turns, rank, self.rows)

    def copies_to(self, rank: int) -> list[Copy]:
        """The copies that destination rank `rank` receives, in forward order."""
        return copies_received(self.turns, rank, self.rows)

    def writes_from(self, rank: int) -> list[Copy]:
        """`copies_from`, joined into writes."""
        return copies_sent(self.turns, rank, self.write_rows)

    def writes_to(self, rank: int) -> list[Copy]:
        """`copies_to`, joined into writes."""
        return copies_received(self.turns, rank, self.write_rows)

    @cached_property
    def write_rows(self) -> tuple[TemplateRow, ...]:
        return coalesce(self.rows)

    @cached_property
    def plan_hash(self) -> str:
        """A hash of the map's copies, senders, names, shapes and dtypes.

        It is equal on every rank of a run, and only for equal maps.
        """
        digest = hashlib.blake2b(b"megarl reshard map 4", digest_size=16)
        digest.update(repr(self.rows).encode())
        for layout in (self.source, self.destination):
            digest.update(f"{layout.name} {layout.world_size}".encode())
            for kind in layout.kinds:
                shards = [(tensor.shape, tensor.dtype) for tensor in kind.shards]
                digest.update(
                    repr(
                        (
                            kind.name,
                            kind.place,
                            kind.layers,
                            kind.rule,
                            shards,
                            kind.stages.tolist(),
                        )
                    ).encode()
                )
                digest.update(kind.ranks.astype(np.int64).tobytes())
        return digest.hexdigest()

    def routes(self) -> list[tuple[TemplateRow, int]]:
        """One row for each set of rows with the same senders at all instances and replicas, with
        the bytes of the set in one instance.
        """
        per_route: dict[tuple, tuple[TemplateRow, int]] = {}
        for row in self.rows:
            route = self.turns.sharing_key(row)
            per_route[route] = (row, per_route.get(route, (row, 0))[1] + self.row_bytes(row))
        return list(per_route.values())

    def rank_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes that each rank sends, and the bytes that each rank receives."""
        sent = np.zeros(self.source.world_size, dtype=np.int64)
        received = np.zeros(self.destination.world_size, dtype=np.int64)
        for row, size in self.routes():
            assignment = self.turns.assignment(row)
            # bytes by class and replica
            copies = np.repeat(size * assignment.sizes, assignment.senders.shape[1])
            np.add.at(sent, assignment.senders.ravel(), copies)
            np.add.at(received, assignment.receivers.ravel(), copies)
        return sent, received

    def rank_writes(self) -> np.ndarray:
        """The number of writes that each rank sends."""
        writes = np.zeros(self.source.world_size, dtype=np.int64)
        rows_of = defaultdict(list)
        for row in self.write_rows:
            rows_of[self.turns.sharing_key(row)].append(row)
        for rows in rows_of.values():
            assignment = self.turns.assignment(rows[0])
            replicas = assignment.senders.shape[1]
            instances = assignment.sizes * sum(map(self._parts, rows))
            np.add.at(writes, assignment.senders.ravel(), np.repeat(instances, replicas))
        return writes

    def peers(self) -> np.ndarray:
        """Whether a source rank sends anything to a destination rank, [source ranks, destination
        ranks].
        """
        connected = np.zeros((self.source.world_size, self.destination.world_size), dtype=bool)
        for row, _ in self.routes():
            assignment = self.turns.assignment(row)
            connected[assignment.senders, assignment.receivers] = True
        return connected

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of copies and of writes."""
        copies = sum(map(self.times, self.rows))
        writes = sum(map(self.times, self.write_rows))
        return copies, writes

    def summary(self) -> MapSummary:
        sent, received = self.rank_bytes()
        copies, writes = self.counts
        return MapSummary(
            trainer_ranks=self.source.world_size,
            generator_ranks=self.destination.world_size,
            tensors=count_tensors(self.destination),
            copies=copies,
            writes=writes,
            bytes=int(sent.sum()),
            bytes_minimum=sum(kind.bytes for kind in self.destination.kinds),
            sender_max_over_mean=float(sent.max() / sent.mean()),
            receiver_max_over_mean=float(received.max() / received.mean()),
        )

    def row_bytes(self, row: TemplateRow) -> int:
        """The bytes of one instance of a row."""
        return row.box.numel * ITEM_BYTES[self.destination.kinds[row.kind].shards[row.shard].dtype]

    def times(self, row: TemplateRow) -> int:
        """The number of copies that a row stands for."""
        target = self.destination.kinds[row.kind]
        return target.instances * target.replicas * self._parts(row)

    def _parts(self, row: TemplateRow) -> int:
        """The copies of one instance of a row: each expert travels alone."""
        per_expert = row.transform != ZEROS and of_experts(self.destination, row)
        return row.box.shape[0] if per_expert else 1

    @cached_property
    def turns(self) -> Turns:
        """Decides which of the ranks with a box sends it to which replica."""
        return Turns(self.source, self.destination, self.rows)


def count_tensors(layout: Layout) -> int:
    """The number of tensors over all ranks."""
    return sum(
        kind.instances * kind.replicas * sum(map(_count, kind.shards)) for kind in layout.kinds
    )


# depth, sender, receiver -> the list for such copies
ListFor = Callable[[int, int, int], list[Copy]]


def copies_sent(turns: Turns, rank: int, rows: tuple[TemplateRow, ...]) -> list[Copy]:
    """The copies that source rank `rank` sends, in forward order: by depth, then in the order of
    rows.
    """
    depths = _depths(turns)
    put_sent(turns, rank, rows, lambda depth, sender, receiver: depths[depth])
    return list(chain.from_iterable(depths))


def copies_received(turns: Turns, rank: int, rows: tuple[TemplateRow, ...]) -> list[Copy]:
    """The copies that destination rank `rank` receives, in forward order."""
    depths = _depths(turns)
    put_received(turns, rank, rows, lambda depth, sender, receiver: depths[depth])
    return list(chain.from_iterable(depths))


def put_sent(turns: Turns, rank: int, rows: tuple[TemplateRow, ...], list_for: ListFor) -> None:
    """Appends the copies that source rank `rank` sends to the lists that `list_for` returns, each
    in the order of rows.
    """
    coordinates = turns.source.coordinates(rank)
    rank_rows = []
    for row in rows:
        if any((holder.kind, holder.shard) in coordinates for holder in row.holders):
            rank_rows.append(row)
    _write(turns, rank_rows, list_for, lambda row: _transfers_from(turns, rank, coordinates, row))


def put_received(turns: Turns, rank: int, rows: tuple[TemplateRow, ...], list_for: ListFor) -> None:
    """Like `put_sent`, for the copies that destination rank `rank` receives."""
    coordinates = turns.destination.coordinates(rank)
    rank_rows = [row for row in rows if (row.kind, row.shard) in coordinates]
    _write(turns, rank_rows, list_for, lambda row: _transfers_to(turns, rank, coordinates, row))


def of_experts(destination: Layout, row: TemplateRow) -> bool:
    """Whether the row is written out expert by expert."""
    return destination.kinds[row.kind].shards[row.shard].experts is not None


def _depths(turns: Turns) -> list[list[Copy]]:
    return [[] for _ in range(turns.destination.num_layers + 2)]


def _transfers_from(
    turns: Turns, rank: int, coordinates: Coordinates, row: TemplateRow
) -> _Transfers:
    holder = row.holders[0] if len(row.holders) == 1 else None
    stages = None
    if holder is not None:
        stages = [stage for stage, _ in coordinates[holder.kind, holder.shard]]
    assignment = turns.assignment(row, stages=stages)
    peers_of_class: dict[int, list[tuple[int, int]]] = {}
    positions = np.nonzero(assignment.senders == rank)  # class, replica
    for c, holder_index, receiver in zip(
        positions[0].tolist(),
        assignment.holders[positions].tolist(),
        assignment.receivers[positions].tolist(),
    ):
        peers_of_class.setdefault(c, []).append((holder_index, receiver))
    result = []
    for i, c in enumerate(assignment.class_of.tolist()):
        for h, receiver in peers_of_class.get(c, ()):
            result.append((i, h, rank, receiver))
    return result


def _transfers_to(
    turns: Turns, rank: int, coordinates: Coordinates, row: TemplateRow
) -> _Transfers:
    transfers: _Transfers = []
    for stage, replica in coordinates[row.kind, row.shard]:
        assignment = turns.assignment(row, replica)
        instances = turns.destination.kinds[row.kind].instances_on(stage)
        classes = assignment.class_of[instances]
        senders = assignment.senders[classes, 0].tolist()
        holders = assignment.holders[classes, 0].tolist()
        transfers += [(i, h, s, rank) for i, h, s in zip(instances, holders, senders)]
    return transfers


@dataclass
class _Share:
    """A rank's part in all rows that have the same senders and receivers."""

    layers: list[str]  # of each instance in which it has a part
    # (index into `layers`, index into row.holders, sender, receiver, depth, append method of its
    # list)
    copies: list[tuple]
    _names: dict[str, list[str]] = field(default_factory=dict)  # template -> names
    _quantisations: dict[tuple, list[Quantisation]] = field(default_factory=dict)

    def names(self, template: str) -> list[str]:
        """The names of all instances; a single one if the template has no layer."""
        if template not in self._names:
            prefix, layered, suffix = template.partition(LAYER_FIELD)
            if layered:
                self._names[template] = [f"{prefix}{layer}{suffix}" for layer in self.layers]
            else:
                self._names[template] = [prefix] * len(self.layers)
        return self._names[template]

    def quantisations(
        self, rule: Rule, template: str, origin: tuple[int, int], cut: bool
    ) -> list[Quantisation]:
        """The quantisation of each instance."""
        key = template, origin, cut
        if key not in self._quantisations:  # weights and their scales share it
            self._quantisations[key] = [
                Quantisation(rule, name, origin, cut) for name in self.names(template)
            ]
        return self._quantisations[key]


def _write(
    turns: Turns,
    rows: list[TemplateRow],
    list_for: ListFor,
    transfers_of: Callable[[TemplateRow], _Transfers],
) -> None:
    """Writes out `rows` as copies, layer by layer and expert by expert.

    `transfers_of` returns the rank's part in a row. Rows with the same senders and receivers share
    it. It must be fast, since a rank waits for it at start-up: names are made once per kind and
    layer, and copies are put into the right lists instead of being sorted.
    """
    shares: dict[tuple, _Share] = {}
    for row in rows:
        kind = turns.destination.kinds[row.kind]
        key = kind.place, kind.layers, turns.sharing_key(row)
        if key not in shares:
            shares[key] = _share(turns.destination, kind, list_for, transfers_of(row))
        if shares[key].copies:
            _add(turns, row, shares[key])


def _share(destination: Layout, kind: Kind, list_for: ListFor, transfers: _Transfers) -> _Share:
    layers: list[str] = []
    copies = []
    instance = None
    depth = 0
    for i, h, s, r in transfers:
        if i != instance:
            layers.append(str(kind.layer(i)))
            instance = i
            depth = destination.depth(kind, i)
        copies.append((len(layers) - 1, h, s, r, depth, list_for(depth, s, r).append))
    return _Share(layers, copies)


def _add(turns: Turns, row: TemplateRow, share: _Share) -> None:
    target = turns.destination.kinds[row.kind]
    dtype = target.shards[row.shard].dtype
    names = share.names(target.name)
    if row.transform == ZEROS:
        for n, _, s, r, depth, append in share.copies:
            append(Copy(s, None, None, r, names[n], row.box, row.transform, dtype, depth))
        return
    quantisations = _quantisations(turns, row, share)
    boxes: dict[tuple[int, int], list] = {}  # shared by all replicas
    for n, h, s, r, depth, append in share.copies:
        if (n, h) not in boxes:
            holder = row.holders[h]
            source_name = share.names(turns.source.kinds[holder.kind].name)[n]
            if of_experts(turns.destination, row):
                boxes[n, h] = list(
                    _expert_boxes(turns, row, holder, source_name, names[n], quantisations[n])
                )
            else:
                boxes[n, h] = [(source_name, holder.box, names[n], row.box, quantisations[n])]
        for source_name, source_box, name, box, quantisation in boxes[n, h]:
            append(
                Copy(
                    source_rank=s,
                    source_tensor=source_name,
                    source_box=source_box,
                    destination_rank=r,
                    destination_tensor=name,
                    destination_box=box,
                    transform=row.transform,
                    dtype=dtype,
                    depth=depth,
                    quantisation=quantisation,
                )
            )


def _quantisations(turns: Turns, row: TemplateRow, share: _Share) -> Sequence[Quantisation | None]:
    if row.logical is None:
        return [None] * len(share.layers)
    weights = turns.destination.kinds[row.weights]
    assert weights.rule is not None
    origin = row.logical.start[-2], row.logical.start[-1]
    return share.quantisations(weights.rule, tile_space(weights, row.logical_name), origin, row.cut)


def _expert_boxes(
    turns: Turns,
    row: TemplateRow,
    holder: Holder,
    source_name: str,
    name: str,
    quantisation: Quantisation | None,
) -> Iterator[tuple[str, Box, str, Box, Quantisation | None]]:
    """Yields (source tensor, its box, destination tensor, its box, how) for the row's experts at
    one layer.
    """
    source_tensor = turns.source.kinds[holder.kind].shards[holder.shard]
    destination_tensor = turns.destination.kinds[row.kind].shards[row.shard]
    for e in range(row.box.shape[0]):
        source_expert, source_box = one_expert(source_tensor, holder.held_box, e)
        expert, box = one_expert(destination_tensor, row.box, e)
        assert source_expert == expert
        number = str(expert)
        expert_quantisation = None
        if quantisation is not None:
            tiles_of = quantisation.tiles_of.replace(EXPERT_FIELD, number)
            expert_quantisation = replace(quantisation, tiles_of=tiles_of)
        yield (
            source_name.replace(EXPERT_FIELD, number),
            source_box,
            name.replace(EXPERT_FIELD, number),
            box,
            expert_quantisation,
        )


def tile_space(weights: Kind, logical_name: str) -> str:
    """The template of Quantisation.tiles_of. Tiles with the same name and number share a scale."""
    assert weights.rule is not None
    if not of_whole_tensor(weights.rule):
        return logical_name
    if weights.shards[0].experts is None:
        return weights.name
    return f"{weights.name} {EXPERT_FIELD}"


def one_expert(tensor: LocalTensor, box: Box, e: int) -> tuple[int, Box]:
    """(global expert, box in the rank's real tensor) for the e-th expert of a template box."""
    assert tensor.experts is not None
    expert = tensor.experts[0] + box.start[0] + e
    if EXPERT_FIELD in tensor.name:
        return expert, box.drop()
    return expert, box.entry(e)


def _count(tensor: LocalTensor) -> int:
    """The number of tensors that a template stands for at one layer."""
    if EXPERT_FIELD in tensor.name:
        return tensor.shape[0]
    return 1
