"""Chooses the transport of each pair of ranks, and opens the engines' memory accordingly, before
the first update.

Engines may *pass on* a part of the weights (`weights.relay`, reshard.forwarding). Trainer ranks
then write only to the leaders, whose workers pass on tensors once everything is written. By default
there are relays on a host with several engines, if the trainer runs elsewhere. Then every byte
crosses the network once per host. Engines on different hosts relay only if the config asks for it.
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
import torch.distributed as dist

from megarl.config.errors import ConfigError
from megarl.config.schema import WeightsConfig
from megarl.messaging.host import Host
from megarl.reshard.forwarding import (
    AUTO,
    BETWEEN_ENGINES,
    ENGINES,
    INSIDE_HOSTS,
    Relay,
    RelayRule,
    SentTensors,
    relayed,
)
from megarl.reshard.map import ReshardMap
from megarl.weight_sync import commands
from megarl.weight_sync.commands import ConnectRelays, Open
from megarl.weight_sync.transports.base import (
    Endpoint,
    Endpoints,
    Form,
    Opening,
    PackedEndpoint,
    digest_of,
)
from megarl.weight_sync.transports.choice import (
    TABLE,
    Pairs,
    describe_pairs,
    this_host,
    transport_between,
    transport_class,
    transport_pairs,
)
from megarl.weight_sync.workers import Workers, arranged_forms

OFFSET_BYTES = 8
_decode_opened = msgspec.msgpack.Decoder(commands.OpenedMemory).decode
Writers = Mapping[int, Collection[int]]  # generator rank -> trainer ranks that write to it
# kind of transport -> generator ranks that receive relays by it
RelayTransports = dict[str, set[int]]


@dataclass(frozen=True)
class OpenedEngines:
    map: ReshardMap  # the copies that trainer ranks write: everything but relays
    endpoints: Endpoints  # endpoints for trainer ranks, and for engines that pass on tensors
    relay: RelayRule | None  # the rule by which engines pass on tensors
    relays: list[Relay]  # the relays themselves

    @property
    def kinds(self) -> set[str]:
        """The transports in use."""
        return {packed.endpoint.kind for packed in self.endpoints.packed}

    @property
    def one_sided(self) -> bool:
        """Whether all transports in use are one-sided."""
        return all(transport_class(kind).one_sided for kind in self.kinds)

    @cached_property
    def lands(self) -> bool:
        """Whether some boxes are written to landing memory first."""
        return any(
            transport_class(packed.endpoint.kind).lands_at(packed.endpoint)
            for packed in self.endpoints.packed
        )

    @property
    def lands_changes(self) -> bool:
        """Whether changes are written to landing memory first."""
        return any(transport_class(kind).lands for kind in self.kinds)

    def endpoints_of(self, trainer: int) -> bytes:
        """The endpoints that a trainer rank needs (decoded by base.decode_endpoints).

        These are the endpoints of the ranks that it writes to, with only the tensors that it
        writes, and one endpoint of each process group that it belongs to. (At 405B all endpoints
        are 100 MB, which would go to each of 512 ranks.)
        """
        places = self.tensors.sent_by(trainer)
        ranks = np.searchsorted(self.tensors.places, places, side="right") - 1
        begins = np.flatnonzero(np.diff(ranks, prepend=-1)).tolist()  # first place of each rank
        requests: list[tuple[int, np.ndarray | None]] = []
        for begin, end in zip(begins, [*begins[1:], len(places)]):
            rank = int(ranks[begin])
            first, end_place = self.tensors.places[rank : rank + 2].tolist()
            for index, tensor_count in self._of_rank[rank]:
                numbers = None  # (a user's transport may list other tensors)
                if tensor_count == end_place - first:
                    numbers = places[begin:end] - first
                requests.append((index, numbers))
        reached = {self._group(index) for index, _ in requests}
        for group, index in self._groups.items():
            members = self.endpoints.packed[index].endpoint.members
            if group not in reached and members is not None and trainer in members.trainers:
                requests.append((index, np.array([], dtype=np.int64)))
        return self.endpoints.towards(requests, trainer)

    @cached_property
    def tensors(self) -> SentTensors:
        return SentTensors(self.map, self.relays)

    @cached_property
    def _of_rank(self) -> dict[int, list[tuple[int, int]]]:
        """Generator rank -> its endpoints: (index in the list, number of tensors)."""
        endpoints_of_rank: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, packed in enumerate(self.endpoints.packed):
            endpoints_of_rank[packed.endpoint.rank].append(
                (index, len(packed.offsets) // OFFSET_BYTES)
            )
        return endpoints_of_rank

    @cached_property
    def _groups(self) -> dict[tuple[str, str], int]:
        """The first endpoint of each process group."""
        result: dict[tuple[str, str], int] = {}
        for index in reversed(range(len(self.endpoints.packed))):
            if self.endpoints.packed[index].endpoint.members:
                result[self._group(index)] = index
        return result

    def _group(self, index: int) -> tuple[str, str]:
        endpoint = self.endpoints.packed[index].endpoint
        return endpoint.kind, endpoint.address


async def open_engines(
    workers: Workers,
    weights: WeightsConfig,
    map: ReshardMap,
    trainers: Sequence[Host],
    engines: Sequence[Host],
) -> OpenedEngines:
    """Opens the memory of all engines.

    `trainers` and `engines`: the hosts of all ranks. Needs an open update session.

    Raises ConfigError for a transport that cannot work between two of the hosts, before anything is
    opened.
    """
    pairs = transport_pairs(weights.transport, trainers, engines)
    whole_map = map
    # engines relay only if all are alike
    rule, map, relays = passing_on(weights.relay, pairs, engines, whole_map, workers.tp[0])
    passed_on = sum(relay.bytes for relay in relays)
    print(
        f"weights go by {describe_pairs(pairs)}; {passed_on} bytes an update are passed on by "
        "engines",
        flush=True,
    )
    ways = relay_transports(relays, engines)
    forms = arranged_forms(whole_map.destination, workers.count)
    endpoints = await _open_in_all_ways(
        workers, pairs, map, [*trainers, *engines], ways, weights.delta != "off", forms
    )
    if relays:
        await _meet(workers, relays, endpoints)
    return OpenedEngines(map, endpoints, rule, relays)


async def _open_in_all_ways(
    workers: Workers,
    pairs: Pairs,
    map: ReshardMap,
    hosts: Sequence[Host],
    relayed: RelayTransports,
    deltas: bool,
    forms: Sequence[list[Form]],
) -> Endpoints:
    """Opens every generator rank to each transport by which trainer ranks write to it or other
    engines pass on tensors.
    """
    kinds = {*pairs.kinds} | relayed.keys()
    digests: dict[int, bytes] = {}  # by id, since replicas share their forms
    known_digests = {}
    forms_of_digest = {}
    for rank, rank_forms in enumerate(forms):
        if id(rank_forms) not in digests:
            digests[id(rank_forms)] = digest_of(rank_forms)
        known_digests[rank] = digests[id(rank_forms)]
        forms_of_digest[known_digests[rank]] = rank_forms
    packed: list[PackedEndpoint] = []
    for kind in [*TABLE, *sorted(kinds - TABLE.keys())]:
        if kind not in kinds:
            continue
        writers = {}
        for rank, trainers in enumerate(pairs.trainers(kind)):
            if trainers or rank in relayed.get(kind, ()):
                writers[rank] = trainers
        packed += await _open_memory(
            workers, kind, Opening(map, writers, hosts, *_of(workers), deltas), known_digests
        )
    return Endpoints(packed, forms_of_digest)


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
    """Makes the live parameters writable by one kind of transport.

    Returns the endpoint of every generator rank in `writers`.

    `writers`: generator rank -> trainer ranks that will write to it by this transport (None: all to
    all). `hosts`: of all ranks (empty: this host). `deltas`: whether updates may come as changes.
    Needs an open update session.
    """
    if writers is None:
        writers = {}
        for rank in range(workers.count):
            writers[rank] = range(map.source.world_size) if map else ()
    opening = Opening(map, writers, hosts or [this_host()], *_of(workers), deltas)
    return list(Endpoints(await _open_memory(workers, kind, opening, {}), {}))


async def _open_memory(
    workers: Workers, kind: str, opening: Opening, known_digests: Mapping[int, bytes]
) -> list[PackedEndpoint]:
    """`known_digests`: generator rank -> digest of the expected forms, which need not be sent
    back.
    """
    transport = transport_class(kind)
    offers = transport.offers(opening)
    memory = f"{transport.memory.__module__}:{transport.memory.__qualname__}"
    requests = []
    for ranks in workers.ranks:
        engine_offers = {rank: offers[rank] for rank in ranks if rank in offers}
        digests = {rank: known_digests[rank] for rank in ranks if rank in known_digests}
        requests.append(Open(kind, memory, engine_offers, digests))
    result: list[PackedEndpoint] = []
    for payload in await workers.run(requests):
        packed = _decode_opened(payload)
        if packed is not None:
            result.append(packed)
    return result


def passing_on(
    relay: str, pairs: Pairs, engines: Sequence[Host], map: ReshardMap, tp: int
) -> tuple[RelayRule | None, ReshardMap, list[Relay]]:
    """Returns the relay rule (None: no relays), the part of `map` that trainer ranks write, and the
    relays.

    `relay`: weights.relay; `pairs`: the transports from trainer ranks; `tp`: the ranks of an
    engine. With `auto` there are relays on two conditions: every host has several replicas of a
    shard, equally many on each, and every trainer rank reaches all replicas over the network.
    """
    rule = None
    if relay == ENGINES:
        rule = RelayRule(BETWEEN_ENGINES, tp)
    elif relay == AUTO and (per_host := _ranks_per_host(pairs, engines)):
        rule = RelayRule(INSIDE_HOSTS, per_host)
    if rule is not None:
        # raised if replicas are spread unevenly over the hosts
        with contextlib.suppress(ValueError):
            written, forwarding = relayed(map, rule)
            if forwarding.relays:
                return rule, written, forwarding.relays
    return None, map, []


def relay_transports(relays: Sequence[Relay], engines: Sequence[Host]) -> RelayTransports:
    """The transports of relays.

    Raises ConfigError if there is no one-sided transport between two engines on different hosts.
    """
    ways: RelayTransports = defaultdict(set)
    for source, destination in sorted(
        {(relay.source_rank, relay.destination_rank) for relay in relays}
    ):
        kind = transport_between(AUTO, engines[source], engines[destination])
        if not transport_class(kind).one_sided:
            ranks = (
                f"{source} on {engines[source].name} to generator rank {destination} on "
                f"{engines[destination].name}"
            )
            raise ConfigError(
                f"weights.relay={ENGINES}: passing on from generator rank {ranks} needs Mooncake "
                "on both hosts"
            )
        ways[kind].add(destination)
    return ways


def _ranks_per_host(pairs: Pairs, engines: Sequence[Host]) -> int:
    """The number of generator ranks on each host; 0 if it differs between hosts, or if a trainer
    rank shares a host with engines.
    """
    hosts = [(host.memory, host.network) for host in engines]
    runs = [len(list(ranks)) for _, ranks in itertools.groupby(hosts)]
    is_whole = len(runs) == len(set(hosts))
    even = is_whole and all(run == runs[0] for run in runs[:-1]) and runs[-1] <= runs[0]
    near = any(transport_class(kind).same_host for kind in pairs.kinds)
    if even and not near:
        return runs[0]
    return 0


async def _meet(workers: Workers, relays: Sequence[Relay], endpoints: Endpoints) -> None:
    """Connects each worker to the workers that it passes tensors on to.

    Each engine gets only its own part of the endpoints.
    """
    of_rank: dict[int, list[Relay]] = {rank: [] for rank in range(workers.count)}
    for relay in relays:
        of_rank[relay.source_rank].append(relay)
    indices_of_rank: dict[int, list[int]] = defaultdict(list)  # generator rank -> its endpoints
    for index, packed in enumerate(endpoints.packed):
        indices_of_rank[packed.endpoint.rank].append(index)
    commands = []
    for ranks in workers.ranks:
        engine_relays = {rank: of_rank[rank] for rank in ranks}
        passed_on: dict[int, set[str]] = defaultdict(set)  # receiving rank -> tensors
        for relay in itertools.chain.from_iterable(engine_relays.values()):
            passed_on[relay.destination_rank].add(relay.tensor)
        requests = []
        for rank, names in passed_on.items():
            for index in indices_of_rank[rank]:
                requests.append((index, endpoints.numbers(index, names)))
        commands.append(
            ConnectRelays(endpoints.towards(requests), engine_relays, workers.timeout_s)
        )
    await workers.run(commands)
