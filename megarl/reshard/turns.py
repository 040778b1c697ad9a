"""Decides which replica sends.

Replicas of a source shard take turns, in orders that every rank computes for itself.

Instances (layers) with the same senders and receivers form a *class*. Senders are found per class,
so the cost grows with pipeline stages and receivers, not with layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megarl.models.parameters import LAYER
from megarl.reshard.layout import ITEM_BYTES, Kind, Layout
from megarl.reshard.template import TemplateRow

MOST_AHEAD = 64  # most single turns of one replica before the round robin
# (destination kind (of the weights), source kind, source shard, TemplateRow.index)
_Key = tuple[int, int, int, int]


@dataclass(frozen=True)
class Assignment:
    """Senders and receivers of a row: instance i is served as class `class_of[i]`, whose first
    instance is `first[class_of[i]]`.
    """

    class_of: np.ndarray  # [instances]; -1 if not requested
    first: np.ndarray  # [classes]
    holders: np.ndarray  # [classes, replicas]: index into row.holders
    senders: np.ndarray  # [classes, replicas]: source rank
    receivers: np.ndarray  # [classes, replicas]: destination rank

    @property
    def sizes(self) -> np.ndarray:
        """The number of instances of each class, [classes]."""
        return np.bincount(self.class_of, minlength=len(self.first))


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns between two layouts."""

    source: Layout
    destination: Layout
    rows: tuple[TemplateRow, ...]
    _classes: dict[tuple, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)

    def assignment(
        self, row: TemplateRow, replica: int | None = None, stages: list[int] | None = None
    ) -> Assignment:
        """Senders and receivers of `row`, for all destination replicas or one, and all instances or
        those on `stages` of its first holder.
        """
        target = self.destination.kinds[row.kind]
        source_kind = row.holders[0].kind
        single = len(row.holders) == 1 and self.source.kinds[source_kind].replicas == 1
        orders = SINGLE if single else self._ordering.orders(row)
        class_of, first = self._classes_of(row, orders)
        if stages is not None:
            is_requested = np.array(
                [stage in stages for stage in self.source.kinds[source_kind].stages[first].tolist()]
            )
            class_of = np.where(is_requested, is_requested.cumsum() - 1, -1)[class_of]
            first = first[is_requested]
        replicas = np.arange(target.replicas) if replica is None else np.array([replica])
        receivers = target.ranks[target.stages[first], row.shard][:, replicas]
        if single:  # sharded parameters have thousands of such rows
            kind = self.source.kinds[source_kind]
            sender = kind.ranks[kind.stages[first], row.holders[0].shard]
            senders = np.broadcast_to(sender, receivers.shape)
            return Assignment(class_of, first, np.zeros_like(senders), senders, receivers)
        turn = (self._ordinals[source_kind][first] * target.replicas)[:, None] + replicas
        stage = self.source.kinds[source_kind].stages[first][:, None]
        columns = orders.table[stage, orders.place(stage, turn)]
        holder_of, ranks_of = candidates(self.source, row, first)
        return Assignment(
            class_of,
            first,
            holder_of[columns],
            ranks_of[np.arange(len(first))[:, None], columns],
            receivers,
        )

    def sharing_key(self, row: TemplateRow) -> tuple:
        """A key. Rows with equal keys have the same senders for every instance and replica."""
        target = self.destination.kinds[row.kind]
        places = []
        for holder in row.holders:
            kind = self.source.kinds[holder.kind]
            places.append((id(kind.stages), id(kind.ranks), holder.shard))
        return (
            self._ordering.group(row),
            id(target.stages),
            id(target.ranks),
            row.shard,
            tuple(places),
            row.fan,
            row.index,
        )

    def _classes_of(self, row: TemplateRow, orders: Orders) -> tuple[np.ndarray, np.ndarray]:
        """(class of each instance, first instance of each class).

        Instances of a class have the same stages and positions of turns.
        """
        target = self.destination.kinds[row.kind]
        holder_kinds = tuple([holder.kind for holder in row.holders])
        key = holder_kinds, id(target.stages), target.replicas, orders.ahead.tobytes()
        if key not in self._classes:
            kinds = [self.source.kinds[k] for k in holder_kinds]
            place = orders.place(kinds[0].stages, self._ordinals[holder_kinds[0]] * target.replicas)
            columns = []
            for array in (place, target.stages, *[kind.stages for kind in kinds]):
                columns.append(array.tolist())
            number: dict[tuple, int] = {}
            class_of = []
            for place_and_stages in zip(*columns):
                class_of.append(number.setdefault(place_and_stages, len(number)))
            first = {c: i for i, c in reversed(list(enumerate(class_of)))}
            self._classes[key] = (
                np.array(class_of),
                np.array([first[c] for c in range(len(number))]),
            )
        return self._classes[key]

    @cached_property
    def _ordinals(self) -> list[np.ndarray]:
        """[source kind][instance] its number among the kind's instances on its stage."""
        return [_rank_within(kind.stages) for kind in self.source.kinds]

    @cached_property
    def _ordering(self) -> Ordering:
        return Ordering(self.source, self.destination, self.rows)


def _rank_within(stages: np.ndarray) -> np.ndarray:
    """For each entry, the number of earlier entries with the same value."""
    order = np.argsort(stages, kind="stable")
    begins = np.searchsorted(stages[order], stages[order])
    result = np.empty(len(stages), dtype=np.int64)
    result[order] = np.arange(len(stages)) - begins
    return result


@dataclass(frozen=True)
class Orders:
    """For each stage of the sending kind: turn t goes to candidate `table[t]` if t < ahead, then
    round robin to the rest of `table`.
    """

    table: np.ndarray  # [stages, most ahead + candidates]
    ahead: np.ndarray  # [stages]
    candidates: int

    def place(self, stage: np.ndarray, turn: np.ndarray) -> np.ndarray:
        """The column of the table for a turn.

        Turns with equal columns are followed by equal turns.
        """
        if self.candidates == 1:
            return np.zeros_like(turn)
        ahead = self.ahead[stage]
        return np.where(turn < ahead, turn, ahead + (turn - ahead) % self.candidates)


# of a shard that only one rank has: it takes every turn
SINGLE = Orders(np.zeros((1, 1), dtype=np.int64), np.zeros(1, dtype=np.int64), candidates=1)


class Ordering:
    """The orders of the rows of one map: the order in which replicas take the turns of a parameter,
    so that all replicas of a stage send equally many bytes.

    The n layers of a parameter on a stage, each for R receivers, make n * R *turns*, which the C
    replicas of the sending shard share. If C divides R, they go round robin. Otherwise parameters
    are placed in order of decreasing turn size, each turn with the replica that has the least load
    so far. Single turns come first, until loads are even to within one turn, then round robin. So
    an order is a short table for any number of layers and receivers, and every rank computes the
    same table.
    """

    def __init__(self, source: Layout, destination: Layout, rows: Iterable[TemplateRow]):
        self._source = source
        self._destination = destination
        self._sizes: dict[_Key, int] = {}  # bytes per turn
        self._fans: dict[_Key, int] = {}
        # [rank] bytes of tensors that several shards have: a tied embedding
        self._charged = np.zeros(source.world_size, dtype=np.int64)
        # (mesh, shard) -> the orders of what it sends
        self._found: dict[tuple[int, int], dict[_Key, Orders]] = {}
        for row in rows:
            size = row.box.numel * ITEM_BYTES[destination.kinds[row.kind].shards[row.shard].dtype]
            if len(row.holders) == 1:
                self._sizes[_key(row)] = self._sizes.get(_key(row), 0) + size
                self._fans[_key(row)] = row.fan
            elif source.kinds[row.holders[0].kind].place != LAYER:
                _, ranks = candidates(source, row, np.zeros(1, dtype=np.int64))
                turns = np.arange(destination.kinds[row.kind].replicas)
                np.add.at(
                    self._charged,
                    ranks[0, round_robin(row, ranks.shape[1])[turns % ranks.shape[1]]],
                    size,
                )

    @cached_property
    def _charges(self) -> bool:
        return bool(self._charged.any())

    def group(self, row: TemplateRow) -> _Key | None:
        """The key of the row's order; None for round robin."""
        kind = self._source.kinds[row.holders[0].kind]
        shard = row.holders[0].shard
        if len(row.holders) > 1 or self._is_even(kind, shard, row.kind):
            return None
        return _key(row)

    def orders(self, row: TemplateRow) -> Orders:
        kind = self._source.kinds[row.holders[0].kind]
        shard = row.holders[0].shard
        count = sum(self._source.kinds[holder.kind].replicas for holder in row.holders)
        if self.group(row) is None:
            table = np.broadcast_to(round_robin(row, count), (kind.ranks.shape[0], count))
            return Orders(table, np.zeros(len(table), dtype=np.int64), count)
        group = id(kind.ranks), shard
        if group not in self._found:
            self._found[group] = self._place(kind.ranks, shard)
        return self._found[group][_key(row)]

    def _is_even(self, kind: Kind, shard: int, target: int) -> bool:
        if self._destination.kinds[target].replicas % kind.replicas:
            return False
        return not (self._charges and self._charged[kind.ranks[:, shard]].any())

    def _place(self, mesh: np.ndarray, shard: int) -> dict[_Key, Orders]:
        """The orders of everything that the replicas of one source shard send together. mesh:
        [stages, shards, replicas].
        """
        keys = []
        for key in self._sizes:
            if key[2] == shard and self._source.kinds[key[1]].ranks is mesh:
                keys.append(key)
        keys.sort(key=lambda key: (-self._sizes[key], key))
        ranks = mesh[:, shard]  # [stages, C]
        counts = np.stack(
            [np.bincount(self._source.kinds[key[1]].stages, minlength=len(ranks)) for key in keys]
        )
        # [items, stages]
        turns = counts * np.array([[self._destination.kinds[key[0]].replicas] for key in keys])
        tables_of_loads: dict[tuple, list[np.ndarray]] = {}  # shared by stages that send the same
        stage_tables = []
        for stage_turns, stage_charges in zip(turns.T.tolist(), self._charged[ranks].tolist()):
            loads = tuple(stage_turns), tuple(stage_charges)
            if loads not in tables_of_loads:
                tables_of_loads[loads] = self._tables(keys, stage_turns, stage_charges)
            stage_tables.append(tables_of_loads[loads])
        orders = {}
        for key, tables in zip(keys, zip(*stage_tables)):
            orders[key] = _padded(tables, ranks.shape[1])
        return orders

    def _tables(
        self, keys: list[_Key], turns: Sequence[int], charged: Sequence[int]
    ) -> list[np.ndarray]:
        loads = np.array(charged)
        c = len(charged)
        tables = []
        for key, count in zip(keys, turns):
            first = key[3] * c // self._fans[key]
            tables.append(least_loaded_first(loads, self._sizes[key], count, first))
            cycle = tables[-1][len(tables[-1]) - c :]
            remaining_turns = count - (len(tables[-1]) - c)
            turns_of_replica = (
                np.bincount(tables[-1][: len(tables[-1]) - c], minlength=c) + remaining_turns // c
            )
            turns_of_replica[cycle[: remaining_turns % c]] += 1
            loads = loads + turns_of_replica * self._sizes[key]
        return tables


def least_loaded_first(loads: np.ndarray, size: int, turns: int, first: int) -> np.ndarray:
    """The replicas that take single turns of `size` until loads [C] are even to within one turn,
    then all C once. Ties: from `first` on.
    """
    c = len(loads)
    behind = np.minimum((loads.max() - loads) // size, min(turns, MOST_AHEAD))
    replica = np.repeat(np.arange(c), behind)
    number = np.arange(len(replica)) - np.repeat(behind.cumsum() - behind, behind)
    ahead = replica[np.lexsort(((replica - first) % c, loads[replica] + number * size))][:turns]
    after = loads + np.bincount(ahead, minlength=c) * size
    return np.concatenate([ahead, np.lexsort(((np.arange(c) - first) % c, after))])


def round_robin(row: TemplateRow, count: int) -> np.ndarray:
    """[count].

    In one turn, the shards that a sender feeds are spaced evenly over the candidates, so that a few
    turns use all of them.
    """
    return (np.arange(count) + row.index * count // row.fan) % count


def candidates(
    source: Layout, row: TemplateRow, instances: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """All candidates to send a row: index into row.holders [C] and source rank [instances, C]."""
    holder_of = []
    ranks_of = []
    for h, holder in enumerate(row.holders):
        kind = source.kinds[holder.kind]
        ranks = kind.ranks[kind.stages[instances], holder.shard]
        ranks_of.append(ranks)
        holder_of += [h] * ranks.shape[1]
    if len(row.holders) == 1:
        return np.array(holder_of), ranks_of[0]
    # Alternates between the holders, so that a few turns use all of them.
    order = np.argsort(np.concatenate([np.arange(r.shape[1]) for r in ranks_of]), kind="stable")
    return np.array(holder_of)[order], np.concatenate(ranks_of, axis=1)[:, order]


def _key(row: TemplateRow) -> _Key:
    return row.weights, row.holders[0].kind, row.holders[0].shard, row.index


def _padded(tables: Sequence[np.ndarray], count: int) -> Orders:
    """tables: per stage."""
    width = max(map(len, tables))
    ahead = np.array([len(table) - count for table in tables])
    padded = np.zeros((len(tables), width), dtype=np.int64)
    for stage, table in enumerate(tables):
        padded[stage, : len(table)] = table
    return Orders(padded, ahead, count)
