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


class Writer(Protocol):
    """A connected Transport, or several behind one interface."""

    def prepare(self, sources: Iterable[torch.Tensor]) -> None: ...

    def write(self, copy: Copy, values: torch.Tensor) -> None: ...

    def write_changes(self, rank: int, changes: Changes, version: int) -> None: ...

    def fence(self) -> None: ...


class Connected(Writer, Protocol):
    """All transports of a trainer rank behind one interface (PairwiseTransport)."""

    @property
    def unwritten(self) -> Collection[int]:
        """Generator ranks that have been lost since the last fence."""
        ...

    def connect(self, endpoints: Sequence[Endpoint]) -> None: ...

    def room(self, rank: int) -> float: ...

    def close(self) -> None: ...


# generator rank -> tensor -> this sender's share of its audit hash
Shares = dict[int, dict[str, int]]


@dataclass(frozen=True)
class Sent:
    bytes: int
    shares: Shares  # empty without audit


def send(
    transport: Writer,
    copies: Sequence[Copy],
    sources: Mapping[str, torch.Tensor],
    shapes: Mapping[int, Mapping[str, tuple[int, ...]]],
    audit: bool,
    amax: AmaxTable | None = None,
    payloads: Payloads | None = None,
) -> Sent:
    """Carries out `copies`, all of one source rank, and fences.

    `sources`: the rank's parameters by their names in the trainer layout. `shapes`: rank -> name ->
    shape of the destination tensor. `amax`: of the tiles that the copies cut. `payloads` is kept
    from one update to the next. The shares are hashes of the expected values, computed at the
    source, so that the audit covers the whole way.
    """
    hashes = Hashes()
    payloads = payloads or Payloads()
    payloads.begin(sources)
    transport.prepare(sources.values())
    for copy in copies:
        values = payloads.of(copy, amax)
        transport.write(copy, values)
        if audit:
            rank = copy.destination_rank
            name = copy.destination_tensor
            hashes.add((rank, name), values, copy.destination_box, shapes[rank][name])
    transport.fence()
    shares: dict[int, dict[str, int]] = defaultdict(dict)
    for (rank, name), share in hashes.totals().items():
        shares[rank][name] = share
    return Sent(sum(copy.bytes for copy in copies), dict(shares))


def shares_of(parts: Sequence[Sent]) -> Shares:
    """The shares of all parts of an update together.

    Boxes of one tensor may be in several parts.
    """
    whole: Shares = defaultdict(dict)
    for rank, of_rank in (
        (rank, of_rank) for sent in parts for rank, of_rank in sent.shares.items()
    ):
        known = whole[rank]
        known |= {name: (known.get(name, 0) + share) & MASK for name, share in of_rank.items()}
    return whole


def landing_first(
    copies: Iterable[Copy], endpoints: Iterable[Endpoint]
) -> tuple[list[Copy], list[Copy]]:
    """Splits `copies` into (those whose boxes land, all others)."""
    landings = {
        (endpoint.rank, landing.tensor, landing.start)
        for endpoint in endpoints
        for landing in endpoint.landings
    }
    parts: tuple[list[Copy], list[Copy]] = [], []
    for copy in copies:
        lands = (
            copy.destination_rank,
            copy.destination_tensor,
            copy.destination_box.start,
        ) in landings
        parts[0 if lands else 1].append(copy)
    return parts


def shapes_of(endpoints: Sequence[Endpoint]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Generator rank -> name -> shape of every destination tensor."""
    return {
        endpoint.rank: {tensor.name: tensor.shape for tensor in endpoint.tensors}
        for endpoint in endpoints
    }


class AmaxExchange:
    """Exchanges the amax of tiles that several trainer ranks share, over gloo, before an update is
    quantised.

    Ranks that share a tile send each other one message with the amax of all tiles of their shared
    parts, in forward order. Both ends derive the order from the map, so the message has no names.

    Construct it on every trainer rank. If the map cuts a tile, that is collective over the default
    process group, unless the exchange `before` already has a group. (A group that is no longer used
    still keeps its connections.)
    """

    def __init__(
        self, map: ReshardMap, rank: int, timeout_s: float, before: AmaxExchange | None = None
    ):
        self._rank = rank
        self._timeout_s = timeout_s
        self._parts = amax_parts(map, rank)
        self._awaited = {peer: _shared(amax_parts(map, peer), rank) for peer in peers(self._parts)}
        cuts = any(row.cut for row in map.rows)
        together = cuts and map.source.world_size > 1
        self._group: dist.ProcessGroup | None = before._group if before else None
        if together and self._group is None:
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
        measured = [(part.peers, amax) for part, (_, _, amax) in zip(self._parts, table.entries)]
        incoming = []
        outgoing = []
        received = {}
        for peer, awaited in self._awaited.items():
            message = torch.cat(
                [amax.reshape(-1) for having, amax in measured if peer in having]
            ).cpu()
            received[peer] = torch.empty(sum(part.tiles.numel for part in awaited))
            outgoing.append(
                (dist.isend(message, peer, group=self._group), f"to trainer rank {peer}", message)
            )
            incoming.append(
                (
                    dist.irecv(received[peer], peer, group=self._group),
                    f"from trainer rank {peer}",
                    received[peer],
                )
            )
        # these lists keep the tensors alive until then
        for work, whither, _ in incoming + outgoing:
            self._wait(work, whither)
        for peer, values in received.items():
            table.merge(_entries(self._awaited[peer], values, measured[0][1].device))
        return table

    def _wait(self, work: dist.Work | None, whither: str) -> None:
        assert work is not None
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            what = f"trainer rank {self._rank}: amax of cut tiles {whither}"
            raise TimeoutError(
                f"{what}: not through within {self._timeout_s:.0f} s: {error}"
            ) from error


def _shared(parts: list[AmaxPart], peer: int) -> list[AmaxPart]:
    return [part for part in parts if peer in part.peers]


def _entries(parts: list[AmaxPart], values: torch.Tensor, device: torch.device) -> list[Entry]:
    pieces = values.to(device).split([part.tiles.numel for part in parts])
    return [
        (part.tiles_of, part.tiles, piece.view(part.tiles.shape))
        for part, piece in zip(parts, pieces)
    ]


# Deltas (`weights.delta`). Trainer ranks find the changes before they offer an update, so no engine
# is paused for that. Each rank offers a delta since the last version that the generator confirmed,
# and gives its size. The generator grants the deltas if all of them begin at the version of all
# engines, and if they save enough. Otherwise every rank writes everything.


@dataclass(frozen=True)
class Found:
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
        self._kept: dict[tuple, torch.Tensor] = {}
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
    ) -> Found | None:
        """The changes since version `confirmed`; None if they are unknown or must not be used.

        `payloads`: of this update.
        """
        usable = self.on and confirmed >= 0 and confirmed == self._version and not self._fulls
        if not usable or any(_key(copy) not in self._kept for copy in copies):
            return None
        hashes, every = Hashes(), _alike(copies)

        def compared() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for key, alike in every.items():
                values = payloads.of(alike[0], amax)
                for copy in alike if audit else ():
                    rank = copy.destination_rank
                    name = copy.destination_tensor
                    hashes.add((rank, name), values, copy.destination_box, shapes[rank][name])
                yield bits_of(values.contiguous()).view(-1), self._kept[key]

        deltas = dict(zip(every, find_deltas(compared()), strict=True))
        by_rank = defaultdict(list)
        shares = defaultdict(dict)
        for copy in copies:
            by_rank[copy.destination_rank].append((copy, deltas[_key(copy)]))
        for (rank, name), share in hashes.totals().items():
            shares[rank][name] = share
        sizes = {
            rank: blob_bytes([delta for _, delta in changes]) for rank, changes in by_rank.items()
        }
        changed = sum(
            delta.changed * copy.bytes // copy.destination_box.numel
            for changes in by_rank.values()
            for copy, delta in changes
        )
        return Found(
            by_rank, deltas, dict(shares), sizes, changed, sum(copy.bytes for copy in copies)
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
        alike = _alike(copies)
        self._kept = {key: values for key, values in self._kept.items() if key in alike}
        for key, (copy, *_) in alike.items():
            bits = bits_of(payloads.of(copy, amax).contiguous()).view(-1)
            if key not in self._kept:
                on_host = self._on_host and bits.is_cuda
                self._kept[key] = torch.empty(
                    bits.shape,
                    dtype=bits.dtype,
                    device="cpu" if on_host else bits.device,
                    pin_memory=on_host,
                )
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
        """From now on, the engines may have half of an update."""
        self._version = -1


def worth_it(offers: Sequence[WeightsOffer], serving: Version) -> bool:
    """Whether every rank can send the changes since the version that all engines have, and the
    busiest rank saves enough.
    """
    most = max(offer.delta_bytes for offer in offers)
    full = max(offer.full_bytes for offer in offers)
    return (
        serving >= 0
        and all(offer.base == serving for offer in offers)
        and most <= MOST_OF_FULL * full
    )


def changed_fraction(offers: Sequence[WeightsOffer]) -> float | None:
    """The share of bytes in changed elements; None if a rank has not compared."""
    if not all(offer.full_bytes for offer in offers):
        return None
    return sum(offer.changed_bytes for offer in offers) / sum(offer.full_bytes for offer in offers)


def send_changes(
    transport: Writer, found: Found, version: Version, sources: Mapping[str, torch.Tensor]
) -> Sent:
    """Writes the changes, and fences."""
    transport.prepare(sources.values())
    for rank, changes in found.by_rank.items():
        transport.write_changes(rank, changes, version)
    transport.fence()
    return Sent(sum(found.sizes.values()), found.shares)


def _key(copy: Copy) -> tuple:
    """A key that is equal for copies of the same values."""
    return (
        copy.source_tensor,
        copy.source_box,
        copy.transform,
        copy.dtype,
        copy.destination_box.shape,
    )


def _alike(copies: Sequence[Copy]) -> dict[tuple, list[Copy]]:
    alike: dict[tuple, list[Copy]] = defaultdict(list)
    for copy in copies:
        alike[_key(copy)].append(copy)
    return alike


# The updates of a run.


# (the written part, the shares of all parts, or None if more parts follow)
Part = tuple[Sent, Shares | None]


class FullUpdates:
    """Every update has all weights, cast or quantised.

    For each version: `offer`, perhaps `connect`, `write`.
    """

    compares = False  # whether `offer` looks for changes since a base

    def __init__(self, transport: Connected, map: ReshardMap, rank: int, config: RunConfig):
        """Proves the map. Collective, like `AmaxExchange`."""
        self.transport = transport
        self.copies = list[Copy]()  # copies in sending order
        self._rank = rank
        self._timeout_s = config.timeouts.weights_s
        self._audited = config.weights.audited
        self._payloads = Payloads()
        self._landing = list[Copy]()
        self._others = list[Copy]()
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
        self._landing, self._others = landing_first(self.copies, endpoints)

    def write(self, grant: WeightsGrant, model: Mapping[str, torch.Tensor]) -> Iterator[Part]:
        """Writes the granted update, part by part.

        Boxes that go through landing memory come first.
        """
        sent = []
        if self._landing:
            sent.append(self._send(self._landing, model))
            yield sent[0], None
        sent.append(self._send(self._others, model))
        yield sent[-1], shares_of(sent)

    def _send(self, copies: Sequence[Copy], model: Mapping[str, torch.Tensor]) -> Sent:
        return send(
            self.transport, copies, model, self._shapes, self._audited, self._amax, self._payloads
        )

    def bytes_by_receiver(self) -> list[list[int]]:
        """[[generator rank, bytes of a whole update], …]"""
        found: Counter[int] = Counter()
        for copy in self.copies:
            found[copy.destination_rank] += copy.bytes
        return [list(pair) for pair in sorted(found.items())]


class DeltaUpdates(FullUpdates):
    """An update has only the changes since the version that all engines have, if these are known
    and small enough.
    """

    compares = True

    def __init__(self, transport: Connected, map: ReshardMap, rank: int, config: RunConfig):
        super().__init__(transport, map, rank, config)
        self._deltas = Deltas(config.weights)
        self._found: Found | None = None

    def offer(
        self, version: Version, base: Version, model: Mapping[str, torch.Tensor], trace: TraceWriter
    ) -> WeightsOffer:
        self._measure(model)
        self._found, room = (
            None,
            {
                copy.destination_rank: self.transport.room(copy.destination_rank)
                for copy in self.copies
            },
        )
        if base >= 0 and all(room.values()):
            self._payloads.begin(model)
            with trace.span(f"compare weights {version} with {base}"):
                self._found = self._deltas.find(
                    base, self.copies, self._shapes, self._audited, self._amax, self._payloads
                )
        if (found := self._found) is None:
            return WeightsOffer(version)
        fits = all(size <= room[rank] for rank, size in found.sizes.items())
        return WeightsOffer(
            version,
            base if fits else -1,
            sum(found.sizes.values()),
            found.changed_bytes,
            found.full_bytes,
        )

    def write(self, grant: WeightsGrant, model: Mapping[str, torch.Tensor]) -> Iterator[Part]:
        self._deltas.begin_write()
        if grant.delta:
            assert self._found is not None  # it has offered a base
            yield (
                send_changes(self.transport, self._found, grant.version, model),
                self._found.shares,
            )
            self._deltas.keep_changes(grant.version, self._found)
        else:
            yield from super().write(grant, model)
            declined = self._found is not None and not grant.plan_hash
            self._deltas.keep(grant.version, self.copies, self._amax, self._payloads, declined)
