"""Update sessions with the engines that are alive. The way to their memory stays open until a different set of engines takes part."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import torch.distributed as dist

from megarl.base.rollout_types import Version
from megarl.config.errors import ConfigError
from megarl.config.schema import STRICT, WeightsConfig
from megarl.generator.client import EngineClient, EngineUnreachable
from megarl.generator.completions import EngineError
from megarl.generator.fleet import Fleet
from megarl.lora.plan import sends_adapters
from megarl.messaging.host import Host
from megarl.messaging.link import Hub
from megarl.messaging.messages import WeightsGrant
from megarl.messaging.rendezvous import GENERATOR
from megarl.plan.resolve import RunPlan
from megarl.reshard.forwarding import AUTO, BETWEEN_ENGINES, ENGINES, INSIDE_HOSTS, Relay, RelayRule, SentTensors, relayed
from megarl.reshard.layout import Layout
from megarl.reshard.map import ReshardMap
from megarl.weight_sync import commands
from megarl.weight_sync.audit import AuditError, check_unchanged, compare, differing, expected
from megarl.weight_sync.commands import Audit, End, MeetNeighbours, Open, PassOn, Recall, Receive, Spread
from megarl.weight_sync.common import weights_map
from megarl.weight_sync.transports.base import Endpoint, Endpoints, Form, Opening, Packed, digest_of
from megarl.weight_sync.transports.choice import (
    TABLE,
    Pairs,
    describe_pairs,
    this_host,
    transport_between,
    transport_class,
    transport_pairs,
)
from megarl.weight_sync.workers import Workers, arranged_forms, check_parallelism, connect, settle_layout, watch

# The engines' side of a weight update: pause, be written to, be audited, go on under the new version.
#
# update = WeightUpdate(workers, version)
# await update.open(serving)         # checks the version they hold → pause → SGLang's update session
# await update.recall()              # weights.audit=strict: nothing has changed since the last audit; raises AuditError
# … the trainer ranks write (one-sided; Mooncake: `await update.spread()` once all boxes have landed), or `await update.receive()`
# while they send …
# await update.audit(shares, map)    # raises AuditError
# await update.close()               # end of session → version → prefix cache emptied → resume
# await update.abandon(reason)       # instead, when any of it failed: half-written weights never generate


ENDED_S = 10.0  # for an engine to end that was told to; after that it is left to its launcher

_decode_found = msgspec.msgpack.Decoder(commands.Found).decode
_decode_changes = msgspec.msgpack.Decoder(commands.Changes).decode

Pause = tuple[float, float]  # when the first engine stopped and the last one went on, by time.perf_counter


class VersionError(RuntimeError):
    """An engine holds another version of the weights than it should."""


@dataclass
class WeightUpdate:
    """One update of all engines. Running requests are retracted, and their KV is recomputed under the new weights; with `in_place` they
    keep it."""

    workers: Workers
    version: Version  # that is being written
    in_place: bool = False
    adapters: bool = False  # nothing but the policy's adapter is written

    async def open(self, serving: Version | None = None) -> None:
        """Pauses the engines at a token boundary and opens SGLang's update session.

        `serving` is the version that they must hold by now (-1: none of the run's yet; None: not checked). Raises VersionError where an
        engine holds another: it is a new process, whose memory is not the one that is mapped.
        """
        if serving is not None:
            await self._check_versions(serving, "was it restarted since the last update?")
        mode = "in_place" if self.in_place else "retract"
        await self._each(lambda engine: engine.pause(self.workers.timeout_s, mode))
        stopped: list[float] = []

        async def begin(engine: EngineClient) -> None:
            await engine.begin_update(self.workers.timeout_s)  # it answers once its running step is over
            stopped.append(time.perf_counter())

        await self._each(begin)
        self._began = min(stopped, default=time.perf_counter())

    async def receive(self, changes: bool = False) -> None:
        """Two-sided transports only: the workers receive what the trainer ranks are sending, of everything or of what has changed."""
        await self.workers.run_all(Receive(self.version if changes else -1, self.adapters))

    async def spread(self, changes: bool = False) -> None:
        """Mooncake only, once all landing boxes are written, or all changes: the workers copy them to where they belong."""
        await self.workers.run_all(Spread(self.version if changes else -1, self.adapters))

    async def pass_on(self, relays: Collection[Relay]) -> None:
        """Has the leaders pass tensors on, if there are relays, once everything is in place at them (after `receive` and `spread`)."""
        leading = {relay.source_rank // self.workers.tp for relay in relays}
        places = range(len(self.workers.engines))
        payloads = await self.workers.run([PassOn(self.adapters) if place in leading else None for place in places])
        lost = {rank for rank, payload in enumerate(payloads) if not payload and rank // self.workers.tp in leading}
        by_lost = [relay for relay in relays if relay.source_rank in lost]
        left_out = {r.destination_rank: f"generator rank {r.source_rank} was lost before it passed weights on" for r in by_lost}
        for rank, payload in enumerate(payloads):
            for other in msgspec.msgpack.decode(payload, type=commands.Unwritten) if payload else ():
                left_out[other] = f"generator rank {rank} could not pass weights on"
        await self.give_up(left_out)

    async def give_up(self, left_out: Mapping[int, str]) -> None:
        """Goes on without the engines of these generator ranks, which lack a part of the weights; the values say why. Those that still
        answer are ended, so that they are started again. Raises EngineUnreachable where no engine may be lost."""
        places = {rank // self.workers.tp: why for rank, why in left_out.items()}
        missed = {place: why for place, why in places.items() if place not in self.workers.lost}
        engines = {place: self.workers.engines[place] for place in missed}
        losses = {place: EngineUnreachable(engine.url, f"{missed[place]} to engine {engine.url}") for place, engine in engines.items()}
        self.workers.go_on_without(losses)
        for loss in losses.values():
            print(f"an engine lacks a part of the weights, and is ended: {loss}", flush=True)
        await asyncio.gather(*(self._end(engine) for engine in engines.values()))

    async def _end(self, engine: EngineClient) -> None:
        with contextlib.suppress(EngineError, TimeoutError):  # it ends before it answers
            await engine.command(commands.encode(End()), self.workers.tp, ENDED_S)

    async def audit(self, shares: Sequence[bytes], tensors: SentTensors, relays: Collection[Relay] = ()) -> None:
        """Compares the hashes of the live parameters with the trainer ranks' shares (audit.packed_shares), and checks that tensors which no
        update writes are unchanged. Raises AuditError naming tensors and ranks."""
        payloads = await self.workers.run_all(Audit(self.version))
        found = [_decode_found(payload) if payload else commands.Found() for payload in payloads]
        check_unchanged([each.changes for each in found], [engine.url for engine in self.workers.engines])
        digests = [each.digest if payload else None for each, payload in zip(found, payloads)]
        if wrong := differing(digests, expected(shares, tensors), tensors):
            compare(await self._hashes(wrong), shares, tensors, relays)
            raise AuditError(f"weight audit failed: the memory of generator rank {', '.join(map(str, wrong))} changes while it is hashed")

    async def _hashes(self, ranks: Collection[int]) -> list[bytes | None]:
        """The hashes of these ranks; None for others."""
        per_engine = [[rank for rank in of_engine if rank in ranks] for of_engine in self.workers.ranks]
        payloads = await self.workers.run([commands.Hashes() if asked else None for asked in per_engine])
        return [msgspec.msgpack.decode(payload, type=bytes) if rank in ranks else None for rank, payload in enumerate(payloads)]

    async def recall(self, unwritten: bool = False) -> None:
        """Before the first write: raises AuditError, naming tensors and ranks, where parameters have changed since the last audit; or where
        other tensors have, if `unwritten`."""
        payloads = await self.workers.run_all(Recall(unwritten))
        changes = [_decode_changes(payload) if payload else commands.Changes([], -1) for payload in payloads]
        check_unchanged(changes, [engine.url for engine in self.workers.engines])

    async def close(self) -> Pause:
        """Ends the session, which runs SGLang's post-load work, drops keys and values of older weights, and resumes as `version`. Returns
        the pause.

        With `in_place` running requests still use their keys and values, which are kept; the version in a request's cache key keeps other
        requests from them (`EngineClient.complete`). Raises VersionError where an engine does not report `version`; none is resumed then.
        """
        await self._each(lambda engine: engine.end_update(self.workers.timeout_s))
        await self._each(lambda engine: engine.set_version(self.version, self.workers.timeout_s))
        if not self.in_place:
            await self._each(lambda engine: engine.flush(self.workers.timeout_s))
        await self._check_versions(self.version, "something else sets versions")
        await self._each(lambda engine: engine.resume(self.workers.timeout_s))
        return self._began, time.perf_counter()

    async def look_again(self) -> None:
        """Instead of writing: raises AuditError where anything has changed since the last audit. Otherwise the engines go on as before."""
        await self.recall(unwritten=True)
        await self._each(lambda engine: engine.end_update(self.workers.timeout_s))
        await self._each(lambda engine: engine.resume(self.workers.timeout_s))

    async def cancel(self) -> None:
        """Before anything was granted: ends the sessions that were begun, leaving the weights unchanged and the engines paused."""
        called = (engine.end_update(self.workers.timeout_s) for engine in self.workers.engines)
        for outcome in await asyncio.gather(*called, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):  # it had begun no session, or is the lost one
                raise outcome

    async def abandon(self, reason: str) -> None:
        """Leaves the engines as they are, most of them paused; their clients refuse all requests, running and new."""
        await self._each(lambda engine: engine.condemn(f"its weights may be old or half-written, for an update failed: {reason}"))

    async def _check_versions(self, version: Version, why: str) -> None:
        found: dict[EngineClient, Version] = {}

        async def ask(engine: EngineClient) -> None:
            found[engine] = await engine.version(self.workers.timeout_s)

        await self._each(ask)
        wrong = [f"engine {engine.url} holds weights version {v}" for engine, v in found.items() if v != version]
        if wrong:
            raise VersionError(f"{'; '.join(wrong)}, not {version}: {why}")

    async def _each(self, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        self.workers.go_on_without(await self.workers.each(call))


# Chooses which rank writes to which by what transport, and opens the engines' memory accordingly, before the first update.
#
# Engines may *pass on* a part of the weights (`weights.relay`, reshard.forwarding): trainer ranks write only to the leaders, whose workers
# pass tensors on once everything is written. By default a host relays if it holds several engines and the trainer runs elsewhere, so that
# every byte crosses the network once per host. Engines on different hosts relay only if the config asks for it.


OFFSET_BYTES = 8
_decode_opened = msgspec.msgpack.Decoder(commands.Opened).decode

Writers = Mapping[int, Collection[int]]  # generator rank → trainer ranks that write to it
Ways = dict[str, set[int]]  # kind of transport → generator ranks that receive relayed tensors by it


@dataclass(frozen=True)
class Opened:
    map: ReshardMap  # what the trainer ranks write: everything that is not passed on
    endpoints: Endpoints  # where trainer ranks write, and where engines pass tensors on to
    relay: RelayRule | None  # the rule that engines pass tensors on by
    relays: list[Relay]  # the tensors they pass on

    @property
    def kinds(self) -> set[str]:
        """The transports in use."""
        return {each.endpoint.kind for each in self.endpoints.packed}

    @property
    def one_sided(self) -> bool:
        """Whether all transports in use are one-sided."""
        return all(transport_class(kind).one_sided for kind in self.kinds)

    @cached_property
    def lands(self) -> bool:
        """Whether some boxes are written to landing memory first."""
        return any(transport_class(each.endpoint.kind).lands_at(each.endpoint) for each in self.endpoints.packed)

    @property
    def lands_changes(self) -> bool:
        """Whether changes are written to landing memory first."""
        return any(transport_class(kind).lands for kind in self.kinds)

    def endpoints_of(self, trainer: int) -> bytes:
        """What a trainer rank needs of the endpoints (base.decode_endpoints): of the ranks that it writes to, and only the tensors that it
        writes, and one of each group that it belongs to. (At 405B all endpoints together are 100 MB, for each of 512 ranks.)"""
        places = self.tensors.sent_by(trainer)
        ranks = np.searchsorted(self.tensors.places, places, side="right") - 1
        begins = np.flatnonzero(np.diff(ranks, prepend=-1)).tolist()  # of each rank's places
        wanted: list[tuple[int, np.ndarray | None]] = []
        for begin, end in zip(begins, [*begins[1:], len(places)]):
            rank = int(ranks[begin])
            first, after = self.tensors.places[rank : rank + 2].tolist()
            for at, held in self._of_rank[rank]:  # (a transport of somebody's own may list other tensors)
                wanted.append((at, places[begin:end] - first if held == after - first else None))
        reached = {self._group(at) for at, _ in wanted}
        for group, at in self._groups.items():
            members = self.endpoints.packed[at].endpoint.members
            if group not in reached and members is not None and trainer in members.trainers:
                wanted.append((at, np.array([], dtype=np.int64)))
        return self.endpoints.towards(wanted, trainer)

    @cached_property
    def tensors(self) -> SentTensors:
        return SentTensors(self.map, self.relays)

    @cached_property
    def _of_rank(self) -> dict[int, list[tuple[int, int]]]:
        """The endpoints of a generator rank: places in the list, and numbers of tensors."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for at, each in enumerate(self.endpoints.packed):
            found[each.endpoint.rank].append((at, len(each.offsets) // OFFSET_BYTES))
        return found

    @cached_property
    def _groups(self) -> dict[tuple[str, str], int]:
        """The first endpoint of each process group."""
        return {self._group(at): at for at in reversed(range(len(self.endpoints.packed))) if self.endpoints.packed[at].endpoint.members}

    def _group(self, at: int) -> tuple[str, str]:
        endpoint = self.endpoints.packed[at].endpoint
        return endpoint.kind, endpoint.address


async def open_engines(
    workers: Workers, weights: WeightsConfig, map: ReshardMap, trainers: Sequence[Host], engines: Sequence[Host]
) -> Opened:
    """Opens the memory of all engines. `trainers` and `engines` say where each rank runs. Needs an open update session.

    Raises ConfigError for a transport that cannot work between two of the hosts, before anything is opened.
    """
    pairs = transport_pairs(weights.transport, trainers, engines)
    whole = map
    rule, map, relays = passing_on(weights.relay, pairs, engines, whole, workers.tp)
    passed_on = sum(relay.bytes for relay in relays)
    print(f"weights go by {describe_pairs(pairs)}; {passed_on} bytes an update are passed on by engines", flush=True)
    ways, forms = relay_ways(relays, engines), arranged_forms(whole.destination, workers.count)
    endpoints = await _open_in_all_ways(workers, pairs, map, [*trainers, *engines], ways, weights.delta != "off", forms)
    if relays:
        await _meet(workers, relays, endpoints)
    return Opened(map, endpoints, rule, relays)


async def _open_in_all_ways(
    workers: Workers,
    pairs: Pairs,
    map: ReshardMap,
    hosts: Sequence[Host],
    relayed: Ways,
    deltas: bool,
    forms: Sequence[list[Form]],
) -> Endpoints:
    """Opens every generator rank to each transport that trainer ranks write by, or that other engines pass tensors on by."""
    asked = {*pairs.kinds} | relayed.keys()
    digests = {id(own): digest_of(own) for own in {id(own): own for own in forms}.values()}
    known = {rank: digests[id(own)] for rank, own in enumerate(forms)}
    packed: list[Packed] = []
    for kind in (kind for kind in (*TABLE, *sorted(asked - TABLE.keys())) if kind in asked):
        of_rank = enumerate(pairs.trainers(kind))
        writers = {rank: trainers for rank, trainers in of_rank if trainers or rank in relayed.get(kind, ())}
        packed += await _open_memory(workers, kind, Opening(map, writers, hosts, *_of(workers), deltas), known)
    return Endpoints(packed, {digests[id(own)]: own for own in forms})


def _of(workers: Workers) -> tuple[str, float, list[dist.Store]]:
    return workers.address, workers.timeout_s, workers.stores


async def open_memory(
    workers: Workers,
    kind: str,
    map: ReshardMap | None,
    writers: Writers | None = None,
    hosts: Sequence[Host] = (),
    deltas: bool = False,
) -> list[Endpoint]:
    """Makes the live parameters writable by one kind of transport. Returns the endpoint of every generator rank in `writers`.

    `writers` says which trainer ranks will write to which generator ranks by it (None: all to all), `hosts` where all ranks run (empty:
    on this host), `deltas` whether updates may come as changes. Needs an open update session.
    """
    if writers is None:
        writers = {rank: range(map.source.world_size) if map else () for rank in range(workers.count)}
    opening = Opening(map, writers, hosts or [this_host()], *_of(workers), deltas)
    return list(Endpoints(await _open_memory(workers, kind, opening, {}), {}))


async def _open_memory(workers: Workers, kind: str, opening: Opening, known: Mapping[int, bytes]) -> list[Packed]:
    """`known`: the digest of the forms that are expected of each generator rank, and need not be answered."""
    transport = transport_class(kind)
    offers, memory = transport.offers(opening), f"{transport.memory.__module__}:{transport.memory.__qualname__}"
    of_engines = [
        Open(kind, memory, {rank: offers[rank] for rank in ranks if rank in offers}, {rank: known[rank] for rank in ranks if rank in known})
        for ranks in workers.ranks
    ]
    opened = [_decode_opened(payload) for payload in await workers.run(of_engines)]
    return [packed for packed in opened if packed is not None]


def passing_on(
    relay: str, pairs: Pairs, engines: Sequence[Host], map: ReshardMap, tp: int
) -> tuple[RelayRule | None, ReshardMap, list[Relay]]:
    """Returns the relay rule (None: no relays), the part of `map` that trainer ranks write, and the relays.

    `relay` is weights.relay, `pairs` the transports from trainer ranks, `tp` the ranks of an engine. `auto` relays when every host holds
    several replicas of a shard, equally many on each, and every trainer rank reaches all of them over the network.
    """
    rule = None
    if relay == ENGINES:
        rule = RelayRule(BETWEEN_ENGINES, tp)
    elif relay == AUTO and (per_host := _ranks_per_host(pairs, engines)):
        rule = RelayRule(INSIDE_HOSTS, per_host)
    if rule is not None:
        with contextlib.suppress(ValueError):  # raised when replicas are spread unevenly over the hosts
            written, forwarding = relayed(map, rule)
            if forwarding.relays:
                return rule, written, forwarding.relays
    return None, map, []


def relay_ways(relays: Sequence[Relay], engines: Sequence[Host]) -> Ways:
    """The transports that relays take. Raises ConfigError where two engines on different hosts have no one-sided transport between them."""
    ways: Ways = defaultdict(set)
    for source, destination in sorted({(relay.source_rank, relay.destination_rank) for relay in relays}):
        kind = transport_between(AUTO, engines[source], engines[destination])
        if not transport_class(kind).one_sided:
            ranks = f"{source} on {engines[source].name} to generator rank {destination} on {engines[destination].name}"
            raise ConfigError(f"weights.relay={ENGINES}: passing on from generator rank {ranks} takes Mooncake on both hosts")
        ways[kind].add(destination)
    return ways


def _ranks_per_host(pairs: Pairs, engines: Sequence[Host]) -> int:
    """How many generator ranks share a host; 0 if hosts hold unequal numbers, or if a trainer rank shares a host with engines."""
    runs = [len(list(ranks)) for _, ranks in itertools.groupby(engines, key=lambda host: (host.memory, host.network))]
    hosts = len({(host.memory, host.network) for host in engines})
    even = len(runs) == hosts and all(run == runs[0] for run in runs[:-1]) and runs[-1] <= runs[0]
    near = any(transport_class(kind).same_host for kind in pairs.kinds)
    return runs[0] if even and not near else 0


async def _meet(workers: Workers, relays: Sequence[Relay], endpoints: Endpoints) -> None:
    """Connects the engines' workers to those they pass tensors on to. Each engine is told only its own part."""
    of_rank: dict[int, list[Relay]] = {rank: [] for rank in range(workers.count)}
    for relay in relays:
        of_rank[relay.source_rank].append(relay)
    at: dict[int, list[int]] = defaultdict(list)  # the endpoints of a generator rank
    for place, each in enumerate(endpoints.packed):
        at[each.endpoint.rank].append(place)
    commands = []
    for ranks in workers.ranks:
        own = {rank: of_rank[rank] for rank in ranks}
        passed_on: dict[int, set[str]] = defaultdict(set)  # by the rank that gets them
        for relay in itertools.chain.from_iterable(own.values()):
            passed_on[relay.destination_rank].add(relay.tensor)
        wanted = [(place, endpoints.numbers(place, names)) for rank, names in passed_on.items() for place in at[rank]]
        commands.append(MeetNeighbours(endpoints.towards(wanted), own, workers.timeout_s))
    await workers.run(commands)


@dataclass(frozen=True)
class Session:
    """Paused engines whose memory is open to be written."""

    members: list[int]  # indices of the engines in the fleet
    update: WeightUpdate
    opened: Opened
    grant: WeightsGrant  # the same for every trainer rank
    opens: bool  # whether the trainer ranks are to be told of their endpoints, with the grant; otherwise they have not changed


class EngineSessions:
    """`source` is the trainer's layout. The engines' workers answer over `link`, with the key in `key_file`."""

    def __init__(self, plan: RunPlan, source: Layout, link: Hub, key_file: str):
        self._plan, self._link, self._key_file = plan, link, key_file
        self.map = weights_map(plan, source)  # to all engines
        self._adapters = sends_adapters(plan.config, plan.spec)
        self._workers: Workers | None = None
        self._opened: Opened | None = None
        self._members: list[int] = []  # the engines whose memory is open

    async def open(
        self, fleet: Fleet, trainers: Sequence[Host], serving: Version, version: Version, joining: bool = False, delta: bool = False
    ) -> Session | None:
        """Opens a session to write `version` into all members of the fleet, or only into those that have come back (`joining`). Returns
        None when there are none.

        `serving` is the version that the engines hold by now (-1: none of the run's yet), `trainers` says where each trainer rank runs.
        `delta`: the trainer ranks may write only what has changed since `serving`, or adapters alone, as long as the engines' memory need
        not be opened anew: then all of them hold that version.

        An engine that turns out to be lost is left out. Any other error is raised, and the engines are not used any more.
        """
        while True:
            if serving >= 0:
                await notice_restarts(fleet, self._plan.config.timeouts.weights_s)
            await self._try_joining(fleet, sorted(fleet.joining & fleet.returned), trainers)
            members = sorted(fleet.returned) if joining else fleet.members
            if not members:
                return None
            known = members == self._members and not fleet.returned  # an engine that has come back is a new process
            if not known:
                self._workers = self._workers_of(members, fleet)
            workers = self._workers
            assert workers is not None
            workers.may_lose, fleet.updating = False, set(members)
            in_place, adapters = self._plan.config.async_.partial_rollout == "in_flight", delta and known and self._adapters
            session = WeightUpdate(workers, version, in_place, adapters)
            try:
                await session.open(serving=serving if known or self._opened is None else None)
                if not known:
                    self._opened = await self._connect(workers, trainers, len(members))
            except Exception as error:
                if not (fleet.elastic and isinstance(error, EngineUnreachable)):
                    await session.abandon(str(error))
                    raise
                await session.cancel()
                self._members = []
                fleet.lose(error)
            else:
                assert self._opened is not None
                self._members = members
                opened = self._opened
                workers.may_lose = fleet.elastic and opened.one_sided
                grant = WeightsGrant(version, engines=len(members), delta=delta)
                if not known:
                    grant = WeightsGrant(version, b"", len(members), opened.relay, opened.map.plan_hash)
                return Session(members, session, opened, grant, opens=not known)

    async def look_again(self, fleet: Fleet, version: Version) -> list[int]:
        """Compares the memory of all engines that serve `version` with what the last audit found in it. Returns these engines, less those
        that are lost meanwhile. Raises AuditError.

        All of them are connected anew: those that have come back were opened in a session of their own.
        """
        await notice_restarts(fleet, self._plan.config.timeouts.weights_s)
        fleet.updating = set(fleet.serving)
        if members := sorted(fleet.serving):
            workers = self._workers_for(members, fleet)
            workers.may_lose = fleet.elastic
            session = WeightUpdate(workers, version, in_place=True)
            await session.open(serving=version)
            await connect(workers, self._key_file)
            await session.look_again()
            for error in workers.lost.values():
                fleet.lose(error)
        return [index for index in members if index in fleet.serving]

    async def _try_joining(self, fleet: Fleet, joining: Sequence[int], trainers: Sequence[Host]) -> None:
        """Tries engines that join before the others are paused for them: that they reach the hub, are laid out as planned, and open their
        memory, in a way that lets others come and go. Those that fail must leave; the run goes on."""
        if not joining:
            return
        weights, workers = self._plan.config.weights, self._workers_for(joining, fleet)
        trial, fleet.updating = WeightUpdate(workers, -1), set(joining)
        try:
            await trial.open(serving=-1)
            map = weights_map(self._plan, self.map.source, len(joining))
            hosts = await self._check(workers, map)
            if refusal := self.fixed or _two_sided(transport_pairs(weights.transport, trainers, hosts).kinds):
                raise ConfigError(refusal)
            await open_engines(workers, weights, map, trainers, hosts)
        except (RuntimeError, TimeoutError, ConfigError) as error:
            fleet.updating = set()
            if len(joining) > 1:
                with contextlib.suppress(TimeoutError):  # each says so by itself
                    await trial.cancel()
                for index in joining:
                    await self._try_joining(fleet, [index], trainers)
            elif isinstance(error, EngineUnreachable):
                fleet.lose(error)
            else:
                await fleet.leave(joining[0], f"it cannot join: {error}", self._plan.config.timeouts.weights_s)
        else:
            await trial.cancel()
            fleet.updating = set()

    @property
    def fixed(self) -> str:
        """Why engines can neither join nor leave; empty if they can."""
        return "" if self._opened is None else _two_sided(self._opened.kinds)

    def _workers_of(self, members: list[int], fleet: Fleet) -> Workers:
        """The workers of `members`. Raises RuntimeError if the transports in use cannot be opened again for a different set of engines."""
        if self.fixed:
            lost = "; ".join(fleet.lost.values()) or "an engine has come back"
            raise RuntimeError(f"{self.fixed}, so the run cannot go on with engines {members} alone: {lost}")
        return self._workers_for(members, fleet)

    def _workers_for(self, members: Sequence[int], fleet: Fleet) -> Workers:
        clients = [fleet.engines[index] for index in members]
        return Workers(clients, self._plan.config.generator.tp, self._link, self._plan.config.timeouts.weights_s)

    async def _connect(self, workers: Workers, trainers: Sequence[Host], engines: int) -> Opened:
        """Compares the live engines with the map's destination layout, then opens their parameters to be written."""
        every = self._plan.generator_topology.engines
        map = self.map if engines == every else weights_map(self._plan, self.map.source, engines)
        hosts = await self._check(workers, map)
        if self._plan.config.weights.audited:
            config = self._plan.config
            of_generator = self._opened is None and self._link.name == GENERATOR
            file = Path(config.run_dir) / "engine_memory.jsonl" if of_generator else None
            await watch(workers, config.weights.audit == STRICT, file)
        return await open_engines(workers, self._plan.config.weights, map, trainers, hosts)

    async def _check(self, workers: Workers, map: ReshardMap) -> list[Host]:
        """Connects the workers, and compares the live engines with the map's destination. Returns where each generator rank runs."""
        await check_parallelism(workers, self._plan.generator_topology)
        hosts = await connect(workers, self._key_file)
        await settle_layout(workers, map.destination)
        return hosts


async def notice_restarts(fleet: Fleet, timeout_s: float) -> None:
    """Counts an engine as lost if it was restarted while it had no requests: it no longer has the run's weights."""
    asked = [fleet.engines[index] for index in sorted(fleet.serving)] if fleet.elastic else []
    answers = await asyncio.gather(*(engine.version(timeout_s) for engine in asked), return_exceptions=True)
    for engine, answer in zip(asked, answers):
        if isinstance(answer, EngineUnreachable):
            fleet.lose(answer)
        elif isinstance(answer, BaseException):
            raise answer
        elif answer == -1:
            fleet.lose(EngineUnreachable(engine.url, "it was started again"))


def _two_sided(kinds: Iterable[str]) -> str:
    """Says which of these transports tie a run to the engines it has; empty if none does."""
    ways = sorted({kind for kind in kinds if not transport_class(kind).one_sided})
    return f"weights go by {', '.join(ways)}, whose process groups cannot change" if ways else ""
