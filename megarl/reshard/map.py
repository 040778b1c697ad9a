"""The reshard map: every copy that brings one layout's weights into another's tensors."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Iterator, Optional

import numpy as np

from megarl.models.parameters import EXPERT_FIELD, LAYER
from megarl.reshard.copies import Copy, Quantisation
from megarl.reshard.kinds import ITEM_BYTES, Kind, Layout, LocalTensor
from megarl.reshard.lists import received, sent
from megarl.reshard.nodes import Nodes
from megarl.reshard.rows import ZEROS, Row, coalesce, join

__all__ = ["Copy", "Quantisation", "ReshardMap", "Summary"]


@dataclass(frozen=True)
class Summary:
    trainer_ranks: int  # senders
    generator_ranks: int  # receivers
    tensors: int  # destination tensors, over all ranks
    copies: int
    writes: int  # copies after joining those that continue each other on both sides
    bytes: int  # sent, over all ranks
    bytes_minimum: int  # of all destination tensors: each destination byte once
    sender_max_over_mean: float
    receiver_max_over_mean: float


@dataclass(frozen=True, eq=False)
class ReshardMap:
    """Copies from `source` to `destination`, frozen. Kept as template rows; `copies_from`, `copies_to` write out a rank's own part.

    A *write* is one or several copies that continue each other on both sides: what is really sent.
    """

    source: Layout
    destination: Layout
    rows: tuple[Row, ...] = field(repr=False)
    build_s: float = 0.0
    nodes: Optional[Nodes] = None

    @classmethod
    def build(cls, source: Layout, destination: Layout, nodes: Optional[Nodes] = None) -> ReshardMap:
        """Pure arithmetic on the two layouts: equal inputs give equal maps on every rank. Raises ValueError when they do not fit.

        With `nodes`, receivers take from a sender on their own node where there is one.
        """
        begin = time.perf_counter()
        rows = join(source, destination)
        return cls(source, destination, rows, time.perf_counter() - begin, nodes)

    def __str__(self) -> str:
        sides = f"{self.source.name} {self.source.world_size} -> {self.destination.name} {self.destination.world_size}"
        return f"ReshardMap({sides} ranks, plan {self.plan_hash[:16]})"

    def copies_from(self, rank: int) -> list[Copy]:
        """What `rank` of the source sends, in forward order."""
        return _ordered(sent(self, rank, self.rows))

    def copies_to(self, rank: int) -> list[Copy]:
        """What `rank` of the destination receives, in forward order."""
        return _ordered(received(self, rank, self.rows))

    def writes_from(self, rank: int) -> list[Copy]:
        """`copies_from`, joined."""
        return _ordered(sent(self, rank, self.write_rows))

    def writes_to(self, rank: int) -> list[Copy]:
        """`copies_to`, joined."""
        return _ordered(received(self, rank, self.write_rows))

    @cached_property
    def write_rows(self) -> tuple[Row, ...]:
        return coalesce(self.rows)

    @cached_property
    def plan_hash(self) -> str:
        """Equal on every rank of a run, and only for equal maps: covers copies, senders, names, shapes and dtypes."""
        digest = hashlib.blake2b(b"megarl reshard map 2", digest_size=16)
        digest.update(repr(self.rows).encode())
        digest.update(repr(self.nodes).encode())
        for layout in (self.source, self.destination):
            digest.update(f"{layout.name} {layout.world_size}".encode())
            for kind in layout.kinds:
                shards = [(tensor.shape, tensor.dtype) for tensor in kind.shards]
                digest.update(repr((kind.name, kind.place, kind.first_layer, kind.rule, shards, kind.stages.tolist())).encode())
                digest.update(kind.ranks.astype(np.int64).tobytes())
        return digest.hexdigest()

    def senders(
        self, row: Row, instances: Optional[np.ndarray] = None, replica: Optional[int] = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(index into row.holders, source rank) for each instance and destination replica, both [instances, replicas].

        Of all instances and replicas, or of the given ones. Replicas take turns, so each sends an equal share of the bytes to
        within one instance of one parameter.
        """
        target = self.destination.kinds[row.kind]
        if instances is None:
            instances = np.arange(target.instances)
        replicas = target.ranks.shape[2]
        chosen = np.arange(replicas) if replica is None else np.array([replica])
        turn = self._ordinals[row.holders[0].kind][instances][:, None] * replicas + chosen
        holder_of, ranks_of = self._candidates(row)
        picked = row.candidate(turn, len(holder_of))
        if self.nodes is not None:
            receivers = self.receivers(row)[instances][:, chosen]
            picked = _on_same_node(self.nodes, ranks_of[instances], receivers, turn, picked)
        return holder_of[picked], ranks_of[instances[:, None], picked]

    def receivers(self, row: Row) -> np.ndarray:
        """Destination rank of each instance and replica, [instances, replicas]."""
        target = self.destination.kinds[row.kind]
        return target.ranks[target.stages, row.shard]

    def routes(self) -> list[tuple[Row, int]]:
        """Rows of equal route as one, and their bytes at one instance and replica."""
        per_route: dict[tuple, tuple[Row, int]] = {}
        for row in self.rows:
            route = row.route
            per_route[route] = (row, per_route.get(route, (row, 0))[1] + self.row_bytes(row))
        return list(per_route.values())

    def rank_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that each rank sends, and that each rank receives."""
        sent = np.zeros(self.source.world_size, dtype=np.int64)
        received = np.zeros(self.destination.world_size, dtype=np.int64)
        for row, size in self.routes():
            sent += size * np.bincount(self.senders(row)[1].ravel(), minlength=len(sent))
            received += size * np.bincount(self.receivers(row).ravel(), minlength=len(received))
        return sent, received

    def summary(self) -> Summary:
        sent, received = self.rank_bytes()
        kinds = self.destination.kinds
        return Summary(
            trainer_ranks=self.source.world_size,
            generator_ranks=self.destination.world_size,
            tensors=sum(kind.instances * kind.ranks.shape[2] * sum(map(_count, kind.shards)) for kind in kinds),
            copies=sum(self.times(row) for row in self.rows),
            writes=sum(self.times(row) for row in self.write_rows),
            bytes=int(sent.sum()),
            bytes_minimum=sum(_kind_bytes(kind) for kind in kinds),
            sender_max_over_mean=float(sent.max() / sent.mean()),
            receiver_max_over_mean=float(received.max() / received.mean()),
        )

    def row_bytes(self, row: Row) -> int:
        """Bytes of one instance of a row."""
        return row.box.numel * ITEM_BYTES[self.destination.kinds[row.kind].shards[row.shard].dtype]

    def times(self, row: Row) -> int:
        """Copies that a row stands for."""
        target = self.destination.kinds[row.kind]
        apart = row.transform != ZEROS and self.of_experts(row)
        return target.instances * target.ranks.shape[2] * (row.box.shape[0] if apart else 1)

    def of_experts(self, row: Row) -> bool:
        """Rows of experts are written out expert by expert."""
        return self.destination.kinds[row.kind].shards[row.shard].experts is not None

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
        for k in sorted(others, key=lambda k: -_kind_bytes(kinds[k])):
            ordinals[k] = used[kinds[k].stages]
            used[kinds[k].stages] += 1
        return ordinals

    def _candidates(self, row: Row) -> tuple[np.ndarray, np.ndarray]:
        """Everyone who may send a row: index into row.holders [C] and source rank [instances, C]."""
        holder_of, ranks_of = [], []
        for h, holder in enumerate(row.holders):
            kind = self.source.kinds[holder.kind]
            ranks = kind.ranks[kind.stages, holder.shard]
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


def _ordered(groups: Iterator[tuple[tuple[int, int], list[Copy]]]) -> list[Copy]:
    return [copy for _, copies in sorted(groups, key=itemgetter(0)) for copy in copies]


def _kind_bytes(kind: Kind) -> int:
    sizes = [np.prod(tensor.shape, dtype=np.int64) * ITEM_BYTES[tensor.dtype] for tensor in kind.shards]
    return int(sum(sizes)) * kind.instances * kind.ranks.shape[2]


def _count(tensor: LocalTensor) -> int:
    """Tensors that a template stands for at one layer."""
    return tensor.shape[0] if EXPERT_FIELD in tensor.name else 1


def _rank_within(stages: np.ndarray) -> np.ndarray:
    """Number of earlier entries with the same value."""
    order = np.argsort(stages, kind="stable")
    begins = np.searchsorted(stages[order], stages[order])
    result = np.empty(len(stages), dtype=np.int64)
    result[order] = np.arange(len(stages)) - begins
    return result
