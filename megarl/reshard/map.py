"""The reshard map: all copies that bring one layout's weights into another's tensors."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megarl.models.parameters import EXPERT_FIELD
from megarl.reshard.copies import Copy, Quantisation
from megarl.reshard.kinds import ITEM_BYTES, Layout, LocalTensor
from megarl.reshard.lists import of_experts, received, sent
from megarl.reshard.rows import ZEROS, Row, coalesce, join
from megarl.reshard.turns import Turns

__all__ = ["Copy", "Quantisation", "ReshardMap", "Summary"]


@dataclass(frozen=True)
class Summary:
    trainer_ranks: int  # senders
    generator_ranks: int  # receivers
    tensors: int  # destination tensors, over all ranks
    copies: int
    writes: int  # copies, after joining those that are contiguous on both sides
    bytes: int  # received, over all ranks
    bytes_minimum: int  # of all destination tensors, each byte counted once
    sender_max_over_mean: float
    receiver_max_over_mean: float
    relayed_bytes: int = 0  # the part of `bytes` that comes from other receivers


@dataclass(frozen=True, eq=False)
class ReshardMap:
    """The frozen copies from `source` to `destination`, kept as template rows; `copies_from` and `copies_to` write out a rank's part.

    A *write*, the unit that is sent, is one copy or several that are contiguous on both sides.
    """

    source: Layout
    destination: Layout
    rows: tuple[Row, ...] = field(repr=False)
    build_s: float = 0.0

    @classmethod
    def build(cls, source: Layout, destination: Layout) -> ReshardMap:
        """Builds the map by pure arithmetic: equal layouts give equal maps on every rank. Raises ValueError if they do not fit together."""
        begin = time.perf_counter()
        rows = join(source, destination)
        return cls(source, destination, rows, time.perf_counter() - begin)

    def __str__(self) -> str:
        sides = f"{self.source.name} {self.source.world_size} -> {self.destination.name} {self.destination.world_size}"
        return f"ReshardMap({sides} ranks, plan {self.plan_hash[:16]})"

    def copies_from(self, rank: int) -> list[Copy]:
        """The copies that source rank `rank` sends, in forward order."""
        return sent(self.turns, rank, self.rows)

    def copies_to(self, rank: int) -> list[Copy]:
        """The copies that destination rank `rank` receives, in forward order."""
        return received(self.turns, rank, self.rows)

    def writes_from(self, rank: int) -> list[Copy]:
        """`copies_from`, joined into writes."""
        return sent(self.turns, rank, self.write_rows)

    def writes_to(self, rank: int) -> list[Copy]:
        """`copies_to`, joined into writes."""
        return received(self.turns, rank, self.write_rows)

    @cached_property
    def write_rows(self) -> tuple[Row, ...]:
        return coalesce(self.rows)

    @cached_property
    def plan_hash(self) -> str:
        """A hash that is equal on every rank of a run, and only for equal maps: it covers copies, senders, names, shapes and dtypes."""
        digest = hashlib.blake2b(b"megarl reshard map 3", digest_size=16)
        digest.update(repr(self.rows).encode())
        for layout in (self.source, self.destination):
            digest.update(f"{layout.name} {layout.world_size}".encode())
            for kind in layout.kinds:
                shards = [(tensor.shape, tensor.dtype) for tensor in kind.shards]
                digest.update(repr((kind.name, kind.place, kind.first_layer, kind.rule, shards, kind.stages.tolist())).encode())
                digest.update(kind.ranks.astype(np.int64).tobytes())
        return digest.hexdigest()

    def routes(self) -> list[tuple[Row, int]]:
        """One row for all rows with the same senders at every instance and replica, with the bytes of all of them at one instance."""
        per_route: dict[tuple, tuple[Row, int]] = {}
        for row in self.rows:
            route = self.turns.alike(row)
            per_route[route] = (row, per_route.get(route, (row, 0))[1] + self.row_bytes(row))
        return list(per_route.values())

    def rank_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes that each rank sends, and those that each rank receives."""
        sent = np.zeros(self.source.world_size, dtype=np.int64)
        received = np.zeros(self.destination.world_size, dtype=np.int64)
        for row, size in self.routes():
            assignment = self.turns.assignment(row)
            copies = np.repeat(size * assignment.sizes, assignment.senders.shape[1])  # bytes by class and replica
            np.add.at(sent, assignment.senders.ravel(), copies)
            np.add.at(received, assignment.receivers.ravel(), copies)
        return sent, received

    def peers(self) -> np.ndarray:
        """Whether a source rank sends anything to a destination rank, [source ranks, destination ranks]."""
        found = np.zeros((self.source.world_size, self.destination.world_size), dtype=bool)
        for row, _ in self.routes():
            assignment = self.turns.assignment(row)
            found[assignment.senders, assignment.receivers] = True
        return found

    @property
    def counts(self) -> tuple[int, int]:
        """The number of copies, and that of writes."""
        return sum(self.times(row) for row in self.rows), sum(self.times(row) for row in self.write_rows)

    def summary(self) -> Summary:
        (sent, received), (copies, writes) = self.rank_bytes(), self.counts
        return Summary(
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

    def row_bytes(self, row: Row) -> int:
        """The bytes of one instance of a row."""
        return row.box.numel * ITEM_BYTES[self.destination.kinds[row.kind].shards[row.shard].dtype]

    def times(self, row: Row) -> int:
        """The number of copies that a row stands for."""
        target = self.destination.kinds[row.kind]
        apart = row.transform != ZEROS and of_experts(self.destination, row)
        return target.instances * target.replicas * (row.box.shape[0] if apart else 1)

    @cached_property
    def turns(self) -> Turns:
        """Decides which of the ranks that hold a box sends it to which replica."""
        return Turns(self.source, self.destination, self.rows)


def count_tensors(layout: Layout) -> int:
    """The number of tensors over all ranks."""
    return sum(kind.instances * kind.replicas * sum(map(_count, kind.shards)) for kind in layout.kinds)


def _count(tensor: LocalTensor) -> int:
    """The number of tensors that a template stands for at one layer."""
    return tensor.shape[0] if EXPERT_FIELD in tensor.name else 1
