"""Who sends: replicas of a source shard take turns, by a closed form that every rank evaluates for itself.

Instances (layers) that are served alike form a *class*: senders are worked out per class, so that their cost grows with pipeline stages
and receivers, not with layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Optional

import numpy as np

from megarl.models.parameters import LAYER
from megarl.reshard.kinds import Layout
from megarl.reshard.nodes import Nodes
from megarl.reshard.template import Row


@dataclass(frozen=True)
class Service:
    """Senders and receivers of a row: instance i is served as class `class_of[i]`, whose first instance is `first[class_of[i]]`."""

    class_of: np.ndarray  # [instances]
    first: np.ndarray  # [classes]
    holders: np.ndarray  # [classes, replicas]: index into row.holders
    senders: np.ndarray  # [classes, replicas]: source rank
    receivers: np.ndarray  # [classes, replicas]: destination rank

    @property
    def sizes(self) -> np.ndarray:
        """Instances of each class, [classes]."""
        return np.bincount(self.class_of, minlength=len(self.first))


@dataclass(frozen=True, eq=False)
class Turns:
    """Of two layouts. With `nodes`, receivers take from a sender on their own node where there is one."""

    source: Layout
    destination: Layout
    nodes: Optional[Nodes]
    _classes: dict[tuple, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)

    def service(self, row: Row, replica: Optional[int] = None) -> Service:
        """Of all destination replicas, or of one.

        Replicas of the source take turns, so each sends an equal share of the bytes to within one instance of one parameter.
        """
        target = self.destination.kinds[row.kind]
        class_of, first = self._classes_of(row)
        chosen = np.arange(target.replicas) if replica is None else np.array([replica])
        receivers = target.ranks[target.stages[first], row.shard][:, chosen]
        turn = self._ordinals[row.holders[0].kind][first][:, None] * target.replicas + chosen
        holder_of, ranks_of = self._candidates(row, first)
        picked = row.candidate(turn, len(holder_of))
        if self.nodes is not None:
            picked = _on_same_node(self.nodes, ranks_of, receivers, turn, picked)
        return Service(class_of, first, holder_of[picked], np.take_along_axis(ranks_of, picked, axis=1), receivers)

    def _classes_of(self, row: Row) -> tuple[np.ndarray, np.ndarray]:
        """(class of each instance, first instance of each class): alike are equal stages on both sides and an equal turn."""
        target = self.destination.kinds[row.kind]
        held = tuple([holder.kind for holder in row.holders])
        key = held, id(target.stages), target.replicas
        if key not in self._classes:
            kinds = [self.source.kinds[k] for k in held]
            candidates = sum(kind.replicas for kind in kinds)
            turn = self._ordinals[held[0]] * target.replicas
            turn = turn % candidates if self.nodes is None else turn
            columns = [array.tolist() for array in (turn, target.stages, *[kind.stages for kind in kinds])]
            number: dict[tuple, int] = {}
            class_of = [number.setdefault(alike, len(number)) for alike in zip(*columns)]
            self._classes[key] = np.array(class_of), np.array([class_of.index(c) for c in range(len(number))])
        return self._classes[key]

    @cached_property
    def _ordinals(self) -> list[np.ndarray]:
        """Per source kind and instance, its number in its stage: layers first, then the others, largest first.

        The others go on counting where the layers ended, so the largest falls to a replica that has sent fewest layers.
        """
        kinds = self.source.kinds
        layers = max((kind.stages for kind in kinds if kind.place == LAYER), key=len, default=np.zeros(0, int))
        used = np.bincount(layers, minlength=kinds[0].ranks.shape[0])
        ordinals = [_rank_within(kind.stages) if kind.place == LAYER else np.zeros(1, int) for kind in kinds]
        others = [k for k, kind in enumerate(kinds) if kind.place != LAYER]
        for k in sorted(others, key=lambda k: -kinds[k].bytes):
            ordinals[k] = used[kinds[k].stages]
            used[kinds[k].stages] += 1
        return ordinals

    def _candidates(self, row: Row, instances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Everyone who may send a row: index into row.holders [C] and source rank [instances, C]."""
        holder_of, ranks_of = [], []
        for h, holder in enumerate(row.holders):
            kind = self.source.kinds[holder.kind]
            ranks = kind.ranks[kind.stages[instances], holder.shard]
            ranks_of.append(ranks)
            holder_of += [h] * ranks.shape[1]
        if len(row.holders) == 1:
            return np.array(holder_of), ranks_of[0]
        # Alternate between the holders, so that few turns already use all of them.
        order = np.argsort(np.concatenate([np.arange(r.shape[1]) for r in ranks_of]), kind="stable")
        return np.array(holder_of)[order], np.concatenate(ranks_of, axis=1)[:, order]


def _on_same_node(nodes: Nodes, candidates: np.ndarray, receivers: np.ndarray, turn: np.ndarray, picked: np.ndarray) -> np.ndarray:
    """`picked`, replaced by the candidates on the receiver's node, in turn, where there are any. candidates: [instances, C]."""
    near = np.array(nodes.trainer)[candidates][:, None, :] == np.array(nodes.generator)[receivers][:, :, None]
    count = near.sum(2)
    which = turn % np.maximum(count, 1)
    first = (near.cumsum(2) > which[:, :, None]).argmax(2)
    return np.where(count > 0, first, picked)


def _rank_within(stages: np.ndarray) -> np.ndarray:
    """Number of earlier entries with the same value."""
    order = np.argsort(stages, kind="stable")
    begins = np.searchsorted(stages[order], stages[order])
    result = np.empty(len(stages), dtype=np.int64)
    result[order] = np.arange(len(stages)) - begins
    return result
