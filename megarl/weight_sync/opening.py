"""Chooses which rank writes to which by what transport, and opens the engines' memory accordingly, before the first update.

Engines may *pass on* a part of the weights (`weights.relay`, reshard.forwarding): trainer ranks write only to the leaders, whose workers
pass tensors on once everything is written. By default a host relays if it holds several engines and the trainer runs elsewhere, so that
every byte crosses the network once per host. Engines on different hosts relay only if the config asks for it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from megarl.config.errors import ConfigError
from megarl.config.schema import WeightsConfig
from megarl.messaging.host import Host
from megarl.reshard.forwarding import Relay
from megarl.reshard.map import ReshardMap
from megarl.reshard.relays import AUTO, BETWEEN_ENGINES, ENGINES, INSIDE_HOSTS, RelayRule, relayed
from megarl.weight_sync import commands
from megarl.weight_sync.commands import MeetNeighbours, Open
from megarl.weight_sync.transports.base import Endpoint, Opening
from megarl.weight_sync.transports.choice import (
    TABLE,
    Pairs,
    describe_pairs,
    this_host,
    transport_between,
    transport_class,
    transport_pairs,
)
from megarl.weight_sync.workers import Workers

Writers = Mapping[int, Collection[int]]  # generator rank → trainer ranks that write to it
Ways = dict[str, set[int]]  # kind of transport → generator ranks that receive relayed tensors by it


@dataclass(frozen=True)
class Opened:
    map: ReshardMap  # what the trainer ranks write: everything that is not passed on
    endpoints: list[Endpoint]  # where trainer ranks write, and where engines pass tensors on to
    relay: RelayRule | None  # the rule that engines pass tensors on by
    relays: list[Relay]  # the tensors they pass on

    @property
    def kinds(self) -> set[str]:
        """The transports in use."""
        return {endpoint.kind for endpoint in self.endpoints}

    @property
    def one_sided(self) -> bool:
        """Whether all transports in use are one-sided."""
        return all(transport_class(kind).one_sided for kind in self.kinds)

    @property
    def lands(self) -> bool:
        """Whether any transport in use writes some boxes to landing memory first."""
        return any(transport_class(kind).lands for kind in self.kinds)

    def endpoints_of(self, trainer: int) -> list[str]:
        """The endpoints that a trainer rank needs, encoded: those it writes to, and those of the groups it belongs to. (At 405B all
        endpoints together are 100 MB, for each of 512 ranks.)"""
        needed = [self._peers[trainer, endpoint.rank] or _joins(trainer, endpoint) for endpoint in self.endpoints]
        return list(itertools.compress(self._texts, needed))

    @cached_property
    def _texts(self) -> list[str]:
        return [endpoint.encode() for endpoint in self.endpoints]

    @cached_property
    def _peers(self) -> np.ndarray:
        return self.map.peers()


async def open_engines(
    workers: Workers, weights: WeightsConfig, map: ReshardMap, trainers: Sequence[Host], engines: Sequence[Host]
) -> Opened:
    """Opens the memory of all engines. `trainers` and `engines` say where each rank runs. Needs an open update session.

    Raises ConfigError for a transport that cannot work between two of the hosts, before anything is opened.
    """
    pairs = transport_pairs(weights.transport, trainers, engines)
    rule, map, relays = passing_on(weights.relay, pairs, engines, map, workers.tp)
    passed_on = sum(relay.bytes for relay in relays)
    print(f"weights go by {describe_pairs(pairs)}; {passed_on} bytes an update are passed on by engines", flush=True)
    endpoints = await _open_in_all_ways(workers, pairs, map, [*trainers, *engines], relay_ways(relays, engines), weights.delta != "off")
    if relays:
        await _meet(workers, relays, endpoints)
    return Opened(map, endpoints, rule, relays)


async def _open_in_all_ways(
    workers: Workers, pairs: Pairs, map: ReshardMap, hosts: Sequence[Host], relayed: Ways, deltas: bool
) -> list[Endpoint]:
    """Opens every generator rank to each transport that trainer ranks write by, or that other engines pass tensors on by."""
    asked = {kind for kinds in pairs for kind in kinds} | relayed.keys()
    endpoints: list[Endpoint] = []
    for kind in (*TABLE, *sorted(asked - TABLE.keys())):
        of_rank = {rank: [t for t, each in enumerate(kinds) if each == kind] for rank, kinds in enumerate(pairs)}
        writers = {rank: trainers for rank, trainers in of_rank.items() if trainers or rank in relayed.get(kind, ())}
        if writers:
            endpoints += await open_memory(workers, kind, map, writers, hosts, deltas)
    return endpoints


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
    opening = Opening(map, writers, hosts or [this_host()], workers.address, workers.timeout_s, workers.stores, deltas)
    transport = transport_class(kind)
    offers, memory = transport.offers(opening), f"{transport.memory.__module__}:{transport.memory.__qualname__}"
    of_engines = [Open(kind, memory, {rank: offers[rank] for rank in ranks if rank in offers}) for ranks in workers.ranks]
    opened = [msgspec.msgpack.decode(payload, type=commands.Opened) for payload in await workers.run(of_engines)]
    return [endpoint for endpoint in opened if endpoint is not None]


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
    near = any(transport_class(kind).same_host for kind in set(itertools.chain(*pairs)))
    return runs[0] if even and not near else 0


def _joins(trainer: int, endpoint: Endpoint) -> bool:
    return endpoint.members is not None and trainer in endpoint.members.trainers


async def _meet(workers: Workers, relays: Sequence[Relay], endpoints: Sequence[Endpoint]) -> None:
    """Connects the engines' workers to those they pass tensors on to. Each engine is told only its own part."""
    of_rank: dict[int, list[Relay]] = {rank: [] for rank in range(workers.count)}
    for relay in relays:
        of_rank[relay.source_rank].append(relay)
    commands = []
    for ranks in workers.ranks:
        own = {rank: of_rank[rank] for rank in ranks}
        reached = {relay.destination_rank for of_rank in own.values() for relay in of_rank}
        commands.append(MeetNeighbours([e for e in endpoints if e.rank in reached], own, workers.timeout_s))
    await workers.run(commands)
