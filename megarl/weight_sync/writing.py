"""The content that a trainer rank writes in an update: all weights (`FullUpdates`) or their changes
(`DeltaUpdates`).

The sending end of the weights channel (`megarl.weight_sync.sender`) uses one of them, from
`content.STRATEGIES`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from megarl.base.rollout_types import Version
from megarl.config.schema import RunConfig, WeightsConfig
from megarl.kernels.audit import MASK, Hashes
from megarl.kernels.changes import bits_of
from megarl.messaging.members import members_only
from megarl.messaging.messages import WeightsGrant, WeightsOffer
from megarl.observe.status import TraceWriter
from megarl.reshard.deltas import MOST_OF_FULL, Changes, Delta, blob_bytes, find_deltas, spread
from megarl.reshard.execute import AmaxPart, AmaxTable, Entry, Payloads, amax_parts, peers
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.reshard.schedule import scheduled_writes
from megarl.weight_sync.transports.base import Endpoint

# generator rank -> tensor -> this sender's share of its audit hash
Shares = dict[int, dict[str, int]]


@dataclass(frozen=True)
class WrittenPart:
    bytes: int
    shares: Shares  # empty without audit


# (the written part, the shares of all parts, or None if more parts follow)
PartAndShares = tuple[WrittenPart, Shares | None]


class FullUpdates:
    """Every update has all weights, cast or quantised.

    For each version: `offer`, perhaps `connect`, `write`.
    """

    compares = False  # whether `offer` looks for changes since a base

    def __init__(self, transport: RankTransport, map: ReshardMap, rank: int, config: RunConfig):
        """Proves the map. Collective, like `AmaxExchange`."""
        self.transport = transport
        self.copies = list[Copy]()  # copies in sending order
        self._rank = rank
        self._timeout_s = config.timeouts.weights_s
        self._audited = config.weights.audited
        self._payloads = Payloads()
        self._landing_copies = list[Copy]()
        self._in_place_copies = list[Copy]()
        self._shapes: dict[int, dict[str, tuple[int, ...]]] = {}
        self._exchange: AmaxExchange | None = None
        self._use(map)

    def _use(self, map: ReshardMap) -> None:
        prove_exactly_once(map)
        self._map = map
        self._exchange = AmaxExchange(map, self._rank, self._timeout_s, self._exchange)

    def _measure(self, model: Mapping[str, torch.Tensor]) -> None:
        assert self._exchange is not None  # `_use` has made it
        self._amax = self._exchange.table(model)

    def offer(
        self, version: Version, base: Version, model: Mapping[str, torch.Tensor], trace: TraceWriter
    ) -> WeightsOffer:
        """Does all work that is possible before any engine is paused.

        `base`: the version that all engines have, or -1. Collective.
        """
        self._measure(model)
        return WeightsOffer(version)

    def connect(
        self, map: ReshardMap, endpoints: Sequence[Endpoint], model: Mapping[str, torch.Tensor]
    ) -> None:
        """Connects to the engines that take part from now on. `map`: the map to them."""
        if map.plan_hash != self._map.plan_hash:
            self._use(map)
            self._measure(model)
        self.transport.close()
        self.transport.connect(endpoints)
        self._shapes = shapes_of(endpoints)
        self.copies = scheduled_writes(map, self._rank)
        self._landing_copies, self._in_place_copies = landing_first(self.copies, endpoints)

    def write(
        self, grant: WeightsGrant, model: Mapping[str, torch.Tensor]
    ) -> Iterator[PartAndShares]:
        """Writes the granted update, part by part.

        Boxes that go through landing memory come first.
        """
        parts = []
        if self._landing_copies:
            parts.append(self._send(self._landing_copies, model))
            yield parts[0], None
        parts.append(self._send(self._in_place_copies, model))
        yield parts[-1], shares_of(parts)

    def _send(self, copies: Sequence[Copy], model: Mapping[str, torch.Tensor]) -> WrittenPart:
        return send(
            self.transport, copies, model, self._shapes, self._audited, self._amax, self._payloads
        )

    def bytes_by_receiver(self) -> list[list[int]]:
        """[[generator rank, bytes of a whole update], …]"""
        sizes: Counter[int] = Counter()
        for copy in self.copies:
            sizes[copy.destination_rank] += copy.bytes
        return list(map(list, sorted(sizes.items())))


class DeltaUpdates(FullUpdates):
    """An update has only the changes since the version that all engines have, if these are known
    and small enough (`weights.delta`).

    Trainer ranks find the changes before they offer an update, so no engine is paused for that.
    Each rank offers a delta since the last version that the generator confirmed, and gives its
    size. The generator grants the deltas if all of them begin at the version of all engines, and if
    they save enough. Otherwise every rank writes everything.
    """

    compares = True

    def __init__(self, transport: RankTransport, map: ReshardMap, rank: int, config: RunConfig):
        super().__init__(transport, map, rank, config)
        self._deltas = Deltas(config.weights)
        self._changes: RankChanges | None = None

    def offer(
        self, version: Version, base: Version, model: Mapping[str, torch.Tensor], trace: TraceWriter
    ) -> WeightsOffer:
        self._measure(model)
        self._changes = None
        ranks = {copy.destination_rank for copy in self.copies}
        room = {rank: self.transport.room(rank) for rank in ranks}
        if base >= 0 and all(room.values()):
            self._payloads.begin(model)
            with trace.span(f"compare weights {version} with {base}"):
                self._changes = self._deltas.find(
                    base, self.copies, self._shapes, self._audited, self._amax, self._payloads
                )
        changes = self._changes
        if changes is None:
            return WeightsOffer(version)
        fits_rooms = all(size <= room[rank] for rank, size in changes.sizes.items())
        return WeightsOffer(
            version,
            base if fits_rooms else -1,
            sum(changes.sizes.values()),
            changes.changed_bytes,
            changes.full_bytes,
        )

    def write(
        self, grant: WeightsGrant, model: Mapping[str, torch.Tensor]
    ) -> Iterator[PartAndShares]:
        self._deltas.begin_write()
        if grant.delta:
            assert self._changes is not None  # it has offered a base
            yield (
                send_changes(self.transport, self._changes, grant.version, model),
                self._changes.shares,
            )
            self._deltas.keep_changes(grant.version, self._changes)
        else:
            yield from super().write(grant, model)
            declined = self._changes is not None and not grant.plan_hash
            self._deltas.keep(grant.version, self.copies, self._amax, self._payloads, declined)


class Writer(Protocol):
    """A connected Transport, or several behind one interface."""

    def prepare(self, sources: Iterable[torch.Tensor]) -> None: ...

    def write(self, copy: Copy, values: torch.Tensor) -> None: ...

    def write_changes(self, rank: int, changes: Changes, version: int) -> None: ...

    def fence(self) -> None: ...


class RankTransport(Writer, Protocol):
    """All transports of a trainer rank behind one interface (PairwiseTransport)."""

    @property
    def unwritten(self) -> Collection[int]:
        """Generator ranks that have been lost since the last fence."""
        ...

    def connect(self, endpoints: Sequence[Endpoint]) -> None: ...

    def room(self, rank: int) -> float: ...

    def close(self) -> None: ...


def send(
    transport: Writer,
    copies: Sequence[Copy],
    sources: Mapping[str, torch.Tensor],
    shapes: Mapping[int, Mapping[str, tuple[int, ...]]],
    audit: bool,
    amax: AmaxTable | None = None,
    payloads: Payloads | None = None,
) -> WrittenPart:
    """Carries out `copies`, all of one source rank, and fences.

    `sources`: the rank's parameters by their names in the trainer layout. `shapes`: rank -> name ->
    shape of the destination tensor. `amax`: of the tiles that the copies cut. `payloads` is kept
    from one update to the next. The shares are hashes of the expected values, computed at the
    source, so that the audit covers the whole way.
    """
    payloads = payloads or Payloads()
    payloads.begin(sources)
    transport.prepare(sources.values())
    hashes = SentHashes()
    unwritten = Counter(map(content_of, copies))
    kept: dict[tuple, torch.Tensor] = {}  # until the last engine has been sent them
    for copy in copies:
        content = content_of(copy)
        values = kept[content] if content in kept else payloads.of(copy, amax)
        transport.write(copy, values)
        if audit:
            hashes.add(copy, values, shapes)
        unwritten[content] -= 1
        if unwritten[content]:
            kept[content] = values
        else:
            kept.pop(content, None)
    transport.fence()
    return WrittenPart(sum(copy.bytes for copy in copies), hashes.shares())


class SentHashes:
    """The sender's shares of the hashes of all tensors that it writes.

    What several engines get at the same place of the same tensor is hashed once.
    """

    def __init__(self) -> None:
        self._hashes = Hashes()
        # tensor, its shape, box, and the values' content -> the ranks that get them there
        self._ranks: dict[tuple, list[int]] = {}

    def add(
        self,
        copy: Copy,
        values: torch.Tensor,
        shapes: Mapping[int, Mapping[str, tuple[int, ...]]],
    ) -> None:
        """`values`: what `copy` writes. `shapes`: rank -> name -> shape."""
        rank = copy.destination_rank
        name = copy.destination_tensor
        shape = shapes[rank][name]
        place = (name, shape, copy.destination_box, content_of(copy))
        if place not in self._ranks:
            self._hashes.add(place, values, copy.destination_box, shape)
            self._ranks[place] = []
        self._ranks[place].append(rank)

    def shares(self) -> Shares:
        totals: Shares = defaultdict(dict)
        for place, share in self._hashes.totals().items():
            name = place[0]
            for rank in self._ranks[place]:
                totals[rank][name] = (totals[rank].get(name, 0) + share) & MASK
        return dict(totals)


def shares_of(parts: Sequence[WrittenPart]) -> Shares:
    """The shares of all parts of an update together.

    Boxes of one tensor may be in several parts.
    """
    totals: Shares = defaultdict(dict)
    for part in parts:
        for rank, rank_shares in part.shares.items():
            for name, share in rank_shares.items():
                totals[rank][name] = (totals[rank].get(name, 0) + share) & MASK
    return totals


def landing_first(
    copies: Iterable[Copy], endpoints: Iterable[Endpoint]
) -> tuple[list[Copy], list[Copy]]:
    """Splits `copies` into (those whose boxes land, all others)."""
    landings = set()
    for endpoint in endpoints:
        for landing in endpoint.landings:
            landings.add((endpoint.rank, landing.tensor, landing.start))
    parts: tuple[list[Copy], list[Copy]] = [], []
    for copy in copies:
        landing = (copy.destination_rank, copy.destination_tensor, copy.destination_box.start)
        parts[0 if landing in landings else 1].append(copy)
    return parts


def shapes_of(endpoints: Sequence[Endpoint]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Generator rank -> name -> shape of every destination tensor."""
    result: dict[int, dict[str, tuple[int, ...]]] = {}
    for endpoint in endpoints:
        result[endpoint.rank] = {tensor.name: tensor.shape for tensor in endpoint.tensors}
    return result


class AmaxExchange:
    """Exchanges the amax of tiles that several trainer ranks share, over gloo, before an update is
    quantised.

    Ranks that share a tile send each other one message with the amax of all tiles of their shared
    parts, in forward order. Both ends derive the order from the map, so the message has no names.

    Construct it on every trainer rank. If the map cuts a tile, that is collective over the default
    process group, unless the exchange `previous` already has a group. (A group that is no longer
    used still keeps its connections.)
    """

    def __init__(
        self, map: ReshardMap, rank: int, timeout_s: float, previous: AmaxExchange | None = None
    ):
        self._rank = rank
        self._timeout_s = timeout_s
        self._parts = amax_parts(map, rank)
        self._awaited = {peer: _shared(amax_parts(map, peer), rank) for peer in peers(self._parts)}
        cuts = any(row.cut for row in map.rows)
        needs_group = cuts and map.source.world_size > 1
        self._group: dist.ProcessGroup | None = previous._group if previous else None
        if needs_group and self._group is None:
            with members_only():
                group = dist.new_group(
                    backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="amax"
                )
            assert isinstance(group, dist.ProcessGroup)  # all ranks are members
            self._group = group

    def table(self, tensors: Mapping[str, torch.Tensor]) -> AmaxTable:
        """The amax of every cut tile that this rank's copies touch, computed from the current
        values of `tensors`.

        Raises RuntimeError on NaN or infinity, which names the tensor, and TimeoutError, which
        names both ranks, if one does not answer.
        """
        table = AmaxTable.measure(self._parts, tensors)
        outgoing = []
        received = {}
        works = []
        for peer, awaited in self._awaited.items():
            shared = []
            for part, (_, _, amax) in zip(self._parts, table.entries):
                if peer in part.peers:
                    shared.append(amax.reshape(-1))
            outgoing.append(torch.cat(shared).cpu())  # kept alive until it is sent
            received[peer] = torch.empty(sum(part.tiles.numel for part in awaited))
            sending = dist.isend(outgoing[-1], peer, group=self._group)
            receiving = dist.irecv(received[peer], peer, group=self._group)
            works += [
                (receiving, f"from trainer rank {peer}"),
                (sending, f"to trainer rank {peer}"),
            ]
        for work, direction in works:
            self._wait(work, direction)
        for peer, values in received.items():
            table.merge(_entries(self._awaited[peer], values, table.entries[0][2].device))
        return table

    def _wait(self, work: dist.Work | None, direction: str) -> None:
        assert work is not None
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            subject = f"trainer rank {self._rank}: amax of cut tiles {direction}"
            raise TimeoutError(
                f"{subject}: not through within {self._timeout_s:.0f} s: {error}"
            ) from error


def _shared(parts: list[AmaxPart], peer: int) -> list[AmaxPart]:
    result: list[AmaxPart] = []
    for part in parts:
        if peer in part.peers:
            result.append(part)
    return result


def _entries(parts: list[AmaxPart], values: torch.Tensor, device: torch.device) -> list[Entry]:
    pieces = values.to(device).split([part.tiles.numel for part in parts])
    result: list[Entry] = []
    for part, piece in zip(parts, pieces):
        result.append((part.tiles_of, part.tiles, piece.view(part.tiles.shape)))
    return result


@dataclass(frozen=True)
class RankChanges:
    """The changes in all copies of a rank."""

    by_rank: Mapping[int, Changes]
    by_payload: Mapping[tuple, Delta]
    shares: dict[int, dict[str, int]]  # as in `Sent`, of the whole values
    sizes: Mapping[int, int]  # rank -> bytes that go to it
    changed_bytes: int
    full_bytes: int


def compares(weights: WeightsConfig) -> bool:
    """Whether updates are compared with earlier ones to find changes."""
    return weights.delta != "off" and weights.delta_refresh > 1


class Deltas:
    """The values that were sent last.

    For each version: `find` before the offer, then `send_changes` and `keep_changes`, or a full
    update and `keep`.

    It keeps the bytes that were written, cast or quantised, once for all engines that get them.
    They belong to a version once all of them are written. A failed update is followed by a full
    one.
    """

    def __init__(self, weights: WeightsConfig):
        self.on = compares(weights)
        self._refresh = weights.delta_refresh
        self._on_host = weights.delta_shadow == "host"
        self._sent_values: dict[tuple, torch.Tensor] = {}
        self._version: Version = -1  # the version of these bytes
        self._fulls = 1  # number of next updates that are full and not compared
        self._since_full = 0

    def find(
        self,
        confirmed: Version,
        copies: Sequence[Copy],
        shapes: Mapping[int, Mapping[str, tuple[int, ...]]],
        audit: bool,
        amax: AmaxTable | None,
        payloads: Payloads,
    ) -> RankChanges | None:
        """The changes since version `confirmed`; None if they are unknown or must not be used.

        `payloads`: of this update.
        """
        usable = self.on and confirmed >= 0 and confirmed == self._version and not self._fulls
        if not usable or any(content_of(copy) not in self._sent_values for copy in copies):
            return None
        hashes = SentHashes()
        copies_of = _by_payload(copies)

        def compared() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for key, equal_copies in copies_of.items():
                values = payloads.of(equal_copies[0], amax)
                for copy in equal_copies if audit else ():
                    hashes.add(copy, values, shapes)
                yield bits_of(values.contiguous()).view(-1), self._sent_values[key]

        deltas = dict(zip(copies_of, find_deltas(compared()), strict=True))
        by_rank = defaultdict(list)
        for copy in copies:
            by_rank[copy.destination_rank].append((copy, deltas[content_of(copy)]))
        sizes = {}
        changed = 0
        for rank, changes in by_rank.items():
            sizes[rank] = blob_bytes([delta for _, delta in changes])
            for copy, delta in changes:
                changed += delta.changed * copy.bytes // copy.destination_box.numel
        return RankChanges(
            by_rank, deltas, hashes.shares(), sizes, changed, sum(copy.bytes for copy in copies)
        )

    def keep(
        self,
        version: Version,
        copies: Sequence[Copy],
        amax: AmaxTable | None,
        payloads: Payloads,
        declined: bool,
    ) -> None:
        """After a full update: keeps its bytes if a later update will be compared with them.

        `declined`: a delta would have been too large.
        """
        if not self.on:
            return
        self._fulls = self._refresh if declined else max(self._fulls - 1, 0)
        self._since_full = 0
        self._version = -1
        if self._fulls:
            return
        copies_of = _by_payload(copies)
        for key in self._sent_values.keys() - copies_of.keys():
            del self._sent_values[key]
        for key, (copy, *_) in copies_of.items():
            bits = bits_of(payloads.of(copy, amax).contiguous()).view(-1)
            if key not in self._sent_values:
                on_host = self._on_host and bits.is_cuda
                self._sent_values[key] = torch.empty(
                    bits.shape,
                    dtype=bits.dtype,
                    device="cpu" if on_host else bits.device,
                    pin_memory=on_host,
                )
            self._sent_values[key].copy_(bits, non_blocking=True)
        self._version = version

    def keep_changes(self, version: Version, changes: RankChanges) -> None:
        """After a delta."""
        self._version = -1
        for key, delta in changes.by_payload.items():
            values = self._sent_values[key]
            spread(delta.moved_to(values.device), values)
        self._since_full += 1
        self._fulls = int(self._since_full + 1 >= self._refresh)
        self._version = version

    def begin_write(self) -> None:
        """From now on, the engines may have half of an update."""
        self._version = -1


def worth_it(offers: Sequence[WeightsOffer], serving: Version) -> bool:
    """Whether every rank can send the changes since the version that all engines have, and the
    busiest rank saves enough.
    """
    largest_delta = max(offer.delta_bytes for offer in offers)
    full_bytes = max(offer.full_bytes for offer in offers)
    return (
        serving >= 0
        and all(offer.base == serving for offer in offers)
        and largest_delta <= MOST_OF_FULL * full_bytes
    )


def changed_fraction(offers: Sequence[WeightsOffer]) -> float | None:
    """The share of bytes in changed elements; None if a rank has not compared."""
    if not all(offer.full_bytes for offer in offers):
        return None
    return sum(offer.changed_bytes for offer in offers) / sum(offer.full_bytes for offer in offers)


def send_changes(
    transport: Writer, changes: RankChanges, version: Version, sources: Mapping[str, torch.Tensor]
) -> WrittenPart:
    """Writes the changes, and fences."""
    transport.prepare(sources.values())
    for rank, changes_of_rank in changes.by_rank.items():
        transport.write_changes(rank, changes_of_rank, version)
    transport.fence()
    return WrittenPart(sum(changes.sizes.values()), changes.shares)


def content_of(copy: Copy) -> tuple:
    """A key that is equal only for copies of the same values."""
    rule = copy.quantisation.rule.name if copy.quantisation else None
    return (
        copy.source_tensor,
        copy.source_box,
        copy.transform,
        copy.dtype,
        rule,
        copy.destination_box.shape,
    )


def _by_payload(copies: Sequence[Copy]) -> dict[tuple, list[Copy]]:
    copies_of: dict[tuple, list[Copy]] = defaultdict(list)
    for copy in copies:
        copies_of[content_of(copy)].append(copy)
    return copies_of
