"""Decides who sends: replicas of a source shard take turns, in orders that every rank works out for itself.

Instances (layers) that are served alike form a *class*. Senders are worked out per class, so the cost grows with pipeline stages and
receivers, not with layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megarl.reshard.kinds import Layout
from megarl.reshard.orders import Ordering, Orders, candidates
from megarl.reshard.template import Row


@dataclass(frozen=True)
class Assignment:
    """Senders and receivers of a row: instance i is served as class `class_of[i]`, whose first instance is `first[class_of[i]]`."""

    class_of: np.ndarray  # [instances]; -1 where not asked for
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
    rows: tuple[Row, ...]
    _classes: dict[tuple, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)

    def assignment(self, row: Row, replica: int | None = None, stages: list[int] | None = None) -> Assignment:
        """Senders and receivers of `row`: all destination replicas or one; all instances, or those on `stages` of its first holder."""
        target, held = self.destination.kinds[row.kind], row.holders[0].kind
        orders = self._ordering.of(row)
        class_of, first = self._classes_of(row, orders)
        if stages is not None:
            asked = np.array([stage in stages for stage in self.source.kinds[held].stages[first].tolist()])
            class_of, first = np.where(asked, asked.cumsum() - 1, -1)[class_of], first[asked]
        chosen = np.arange(target.replicas) if replica is None else np.array([replica])
        receivers = target.ranks[target.stages[first], row.shard][:, chosen]
        turn = (self._ordinals[held][first] * target.replicas)[:, None] + chosen
        stage = self.source.kinds[held].stages[first][:, None]
        picked = orders.table[stage, orders.place(stage, turn)]
        holder_of, ranks_of = candidates(self.source, row, first)
        return Assignment(class_of, first, holder_of[picked], ranks_of[np.arange(len(first))[:, None], picked], receivers)

    def alike(self, row: Row) -> tuple:
        """A key: rows with equal keys are served alike, every instance and replica by the same senders."""
        target, places = self.destination.kinds[row.kind], []
        for holder in row.holders:
            kind = self.source.kinds[holder.kind]
            places.append((id(kind.stages), id(kind.ranks), holder.shard))
        return self._ordering.group(row), id(target.stages), id(target.ranks), row.shard, tuple(places), row.fan, row.index

    def _classes_of(self, row: Row, orders: Orders) -> tuple[np.ndarray, np.ndarray]:
        """(class of each instance, first instance of each class). A class shares its stages on both sides and the places of its turns."""
        target = self.destination.kinds[row.kind]
        held = tuple([holder.kind for holder in row.holders])
        key = held, id(target.stages), target.replicas, orders.ahead.tobytes()
        if key not in self._classes:
            kinds = [self.source.kinds[k] for k in held]
            place = orders.place(kinds[0].stages, self._ordinals[held[0]] * target.replicas)
            columns = [array.tolist() for array in (place, target.stages, *[kind.stages for kind in kinds])]
            number: dict[tuple, int] = {}
            class_of = [number.setdefault(alike, len(number)) for alike in zip(*columns)]
            first = {c: i for i, c in reversed(list(enumerate(class_of)))}
            self._classes[key] = np.array(class_of), np.array([first[c] for c in range(len(number))])
        return self._classes[key]

    @cached_property
    def _ordinals(self) -> list[np.ndarray]:
        """For each source kind and instance, its number among the kind's instances on its stage."""
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
