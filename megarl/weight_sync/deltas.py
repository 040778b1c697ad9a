"""Deltas, at the trainer rank: what it sent last, and what has changed since (`weights.delta`).

Trainer ranks work out what has changed before they offer an update, so no engine is paused for it. Each offers a delta from the version
that the generator has confirmed last, with its size. The generator grants it if all ranks offer one from the very version that all engines
hold, and if it saves enough; otherwise every rank writes everything.

What is kept are the bytes that were written, cast or quantised: once for all engines that get them. They count as those of a version only
when all of them were written, and that version was confirmed; so after an update that failed comes a full one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megarl.config.schema import WeightsConfig
from megarl.kernels.audit import Hashes
from megarl.kernels.changes import bits_of
from megarl.messaging.messages import WeightsOffer
from megarl.reshard.deltas import MOST_OF_FULL, Changes, Delta, blob_bytes, find_deltas, spread
from megarl.reshard.execute import AmaxTable, Payloads
from megarl.reshard.map import Copy
from megarl.types import Version
from megarl.weight_sync.writing import Sent, Writer


@dataclass(frozen=True)
class Found:
    """What has changed of all copies of a rank."""

    by_rank: Mapping[int, Changes]
    by_payload: Mapping[tuple, Delta]
    shares: dict[int, dict[str, int]]  # as of `Sent`, of the whole values
    sizes: Mapping[int, int]  # bytes of what goes to each rank
    changed_bytes: int
    full_bytes: int


class Deltas:
    """`find` before the offer; then either `send_changes` and `keep_changes`, or a full update and `keep`. Version by version."""

    def __init__(self, weights: WeightsConfig):
        self.on = weights.delta != "off" and weights.delta_refresh > 1
        self._refresh, self._on_host = weights.delta_refresh, weights.delta_shadow == "host"
        self._kept: dict[tuple, torch.Tensor] = {}
        self._version: Version = -1  # that they are the bytes of
        self._fulls = 1  # updates to come that are sent in full, without comparing
        self._since_full = 0

    def find(
        self,
        confirmed: Version,
        copies: Sequence[Copy],
        shapes: Mapping[int, Mapping[str, tuple[int, ...]]],
        audit: bool,
        amax: AmaxTable | None,
        payloads: Payloads,
    ) -> Found | None:
        """What has changed since version `confirmed`; None if that is not known, or not to be used. `payloads` are at their update."""
        usable = self.on and confirmed >= 0 and confirmed == self._version and not self._fulls
        if not usable or any(_key(copy) not in self._kept for copy in copies):
            return None
        hashes, every = Hashes(), _alike(copies)

        def compared() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for key, alike in every.items():
                values = payloads.of(alike[0], amax)
                for copy in alike if audit else ():
                    rank, name = copy.destination_rank, copy.destination_tensor
                    hashes.add((rank, name), values, copy.destination_box, shapes[rank][name])
                yield bits_of(values.contiguous()).view(-1), self._kept[key]

        deltas = dict(zip(every, find_deltas(compared()), strict=True))
        by_rank, shares = defaultdict(list), defaultdict(dict)
        for copy in copies:
            by_rank[copy.destination_rank].append((copy, deltas[_key(copy)]))
        for (rank, name), share in hashes.totals().items():
            shares[rank][name] = share
        sizes = {rank: blob_bytes([delta for _, delta in changes]) for rank, changes in by_rank.items()}
        changed = sum(delta.changed * copy.bytes // copy.destination_box.numel for changes in by_rank.values() for copy, delta in changes)
        return Found(by_rank, deltas, dict(shares), sizes, changed, sum(copy.bytes for copy in copies))

    def keep(self, version: Version, copies: Sequence[Copy], amax: AmaxTable | None, payloads: Payloads, declined: bool) -> None:
        """After a full update: keeps its bytes, if they will be compared with. `declined`: a delta would have been too large."""
        if not self.on:
            return
        self._fulls, self._since_full, self._version = self._refresh if declined else max(self._fulls - 1, 0), 0, -1
        if self._fulls:
            return
        alike = _alike(copies)
        self._kept = {key: values for key, values in self._kept.items() if key in alike}
        for key, (copy, *_) in alike.items():
            bits = bits_of(payloads.of(copy, amax).contiguous()).view(-1)
            if key not in self._kept:
                on_host = self._on_host and bits.is_cuda
                self._kept[key] = torch.empty(bits.shape, dtype=bits.dtype, device="cpu" if on_host else bits.device, pin_memory=on_host)
            self._kept[key].copy_(bits, non_blocking=True)
        self._version = version

    def keep_changes(self, version: Version, found: Found) -> None:
        """After a delta."""
        self._version = -1
        for key, delta in found.by_payload.items():
            kept = self._kept[key]
            spread(delta.moved_to(kept.device), kept)
        self._since_full += 1
        self._fulls = int(self._since_full + 1 >= self._refresh)
        self._version = version

    def begin_write(self) -> None:
        """From now on the engines may hold half of an update."""
        self._version = -1


def offer_of(version: Version, base: Version, found: Found | None) -> WeightsOffer:
    if found is None:
        return WeightsOffer(version)
    return WeightsOffer(version, base, sum(found.sizes.values()), found.changed_bytes, found.full_bytes)


def worth_it(offers: Sequence[WeightsOffer], serving: Version) -> bool:
    """Whether every rank can send what has changed since the version that all engines hold, and the busiest saves enough by it."""
    most, full = max(offer.delta_bytes for offer in offers), max(offer.full_bytes for offer in offers)
    return serving >= 0 and all(offer.base == serving for offer in offers) and most <= MOST_OF_FULL * full


def changed_fraction(offers: Sequence[WeightsOffer]) -> float | None:
    """The share of bytes that belong to changed elements; None if some rank has not compared."""
    if not all(offer.full_bytes for offer in offers):
        return None
    return sum(offer.changed_bytes for offer in offers) / sum(offer.full_bytes for offer in offers)


def send_changes(transport: Writer, found: Found, version: Version, sources: Mapping[str, torch.Tensor]) -> Sent:
    """Writes what has changed, and fences."""
    transport.prepare(sources.values())
    for rank, changes in found.by_rank.items():
        transport.write_changes(rank, changes, version)
    transport.fence()
    return Sent(sum(found.sizes.values()), found.shares)


def _key(copy: Copy) -> tuple:
    """Equal for copies of the same values."""
    return copy.source_tensor, copy.source_box, copy.transform, copy.dtype, copy.destination_box.shape


def _alike(copies: Sequence[Copy]) -> dict[tuple, list[Copy]]:
    alike: dict[tuple, list[Copy]] = defaultdict(list)
    for copy in copies:
        alike[_key(copy)].append(copy)
    return alike
