"""Forwarding: the trainer writes a shard only to some of its replicas.

These *leaders* pass it on to the others.

    forwarding = inside_hosts(generator_layout(…), ranks_per_host=8)
    # the trainer's part; proven and scheduled like any map
    map = ReshardMap.build(trainer, forwarding.leaders)
    forwarding.prove()  # proves that relays cover the rest
    forwarding.relays  # the part of generator ranks, which pass on complete tensors

A table for each kind has the leaders of each *turn*. Instances (layers) take different turns, so
that all ranks share the load.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from megarl.models.parameters import EXPERT_FIELD, FIRST, LAST, LAYER
from megarl.reshard.deltas import MOST_OF_FULL, delta_share
from megarl.reshard.layout import Kind, Layout
from megarl.reshard.map import MapSummary, ReshardMap, count_tensors
from megarl.reshard.proof import ProofError
from megarl.reshard.schedule import WRITE_S
from megarl.reshard.template import ZEROS, TemplateRow

PLACES = (FIRST, LAYER, LAST)
MOST_CANDIDATES = 64  # how many numbers of engines are tried
# of a relayed byte, relative to one from the trainer. Relays wait for all bytes from the trainer.
# Chosen, not measured.
RELAY_COST = 1.25
AUTO = "auto"
ENGINES = "engines"  # weights.relay
INSIDE_HOSTS = "inside_hosts"
BETWEEN_ENGINES = "between_engines"
# (destination kind, first, end): range of experts if each has its own tensor; otherwise 0, 0
_Span = tuple[int, int, int]


class Relay(Struct, frozen=True):
    """Sends a whole tensor, once it is complete on `source_rank`, to the same tensor on
    `destination_rank`.
    """

    source_rank: int
    destination_rank: int
    tensor: str
    depth: int  # see Copy
    bytes: int


@dataclass(frozen=True, eq=False)
class Forwarding:
    """`leaders` is the layout of the ranks that receive from the trainer.

    Relays fill the rest of `layout`.

    Rank `leader_of[k][turn, shard, replica]` passes on to rank `layout.kinds[k].ranks[0, shard,
    replica]`, or is the same rank. Instance i of a kind has the turn `leaders.kinds[k].stages[i]`.
    """

    layout: Layout
    leaders: Layout
    leader_of: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, layout: Layout, leader_of: tuple[np.ndarray, ...]) -> Forwarding:
        """Derives `leaders` from `leader_of`.

        Raises ValueError if turns have different numbers of leaders.
        """
        kinds = tuple([_leading(kind, table) for kind, table in zip(layout.kinds, leader_of)])
        return cls(layout, replace(layout, kinds=kinds), leader_of)

    @cached_property
    def relays(self) -> list[Relay]:
        """All relays, in forward order."""
        relays: list[Relay] = []
        for kind, leading, leader_of in zip(self.layout.kinds, self.leaders.kinds, self.leader_of):
            for instance in range(kind.instances) if leading is not kind else ():
                depth = self.layout.depth(kind, instance)
                leaders = leader_of[leading.stages[instance]]
                for shard, replica in np.argwhere(leaders != kind.ranks[0]).tolist():
                    for tensor in kind.tensors(shard, instance):
                        relay = Relay(
                            source_rank=int(leaders[shard, replica]),
                            destination_rank=int(kind.ranks[0, shard, replica]),
                            tensor=tensor.name,
                            depth=depth,
                            bytes=tensor.bytes,
                        )
                        relays.append(relay)
        return sorted(relays, key=lambda relay: relay.depth)

    def rank_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes that each generator rank sends in relays, and the bytes that each receives in
        relays.
        """
        sent_bytes, received_bytes = np.zeros((2, self.layout.world_size), dtype=np.int64)
        for kind, leading, leader_of in zip(self.layout.kinds, self.leaders.kinds, self.leader_of):
            sizes = np.array([tensor.bytes for tensor in kind.shards])
            for turn, instances in enumerate(
                np.bincount(leading.stages).tolist() if leading is not kind else ()
            ):
                passed = leader_of[turn] != kind.ranks[0]
                relayed_bytes = (instances * sizes[:, None] * passed)[passed]
                np.add.at(sent_bytes, leader_of[turn][passed], relayed_bytes)
                np.add.at(received_bytes, kind.ranks[0][passed], relayed_bytes)
        return sent_bytes, received_bytes

    def prove(self) -> None:
        """Proves that each rank of a shard is served once.

        Either the trainer writes to it, or it gets the shard from a rank to which the trainer
        writes. Raises ProofError otherwise. (The map's own proof covers the trainer's writes.)
        """
        for kind, leading, leader_of in zip(self.layout.kinds, self.leaders.kinds, self.leader_of):
            if leading is kind:
                continue
            for turn in range(len(leader_of)):
                for ranks, leaders, written in zip(
                    kind.ranks[0], leader_of[turn], leading.ranks[turn]
                ):
                    direct = np.sort(ranks[leaders == ranks])
                    if len(set(ranks.tolist())) < len(ranks) or not np.array_equal(
                        direct, np.sort(written)
                    ):
                        raise ProofError(
                            f"{kind.name}: of ranks {ranks.tolist()} the trainer writes to "
                            f"{written.tolist()}"
                        )
                    if not np.isin(leaders, written).all():
                        raise ProofError(
                            f"{kind.name}: of {leaders.tolist()} some pass it on without having "
                            "it from the trainer"
                        )


def inside_hosts(layout: Layout, ranks_per_host: int) -> Forwarding:
    """Makes one replica on each host the leader, so that every byte crosses the network once per
    host.

    Raises ValueError if replicas are spread unevenly over the hosts.
    """
    return Forwarding.of(
        layout,
        tuple([_by_host(kind, number, ranks_per_host) for number, kind in enumerate(layout.kinds)]),
    )


def _leading(kind: Kind, leader_of: np.ndarray) -> Kind:
    """The kind with only its leaders, or the kind itself if no rank passes it on."""
    turns = len(leader_of)
    if turns == 1 and np.array_equal(leader_of[0], kind.ranks[0]):
        return kind
    ranks = []
    for of_turn in leader_of.tolist():
        ranks.append([sorted(set(of_shard)) for of_shard in of_turn])
    first_turn = kind.layers[0] if kind.layers else 0
    stages = (first_turn + np.arange(kind.instances)) % turns
    return replace(kind, stages=stages, ranks=np.array(ranks))


def _by_host(kind: Kind, number: int, ranks_per_host: int) -> np.ndarray:
    groups: list[list[list[int]]] = []  # [shard][host] ranks of the replicas
    for shard_ranks in kind.ranks[0].tolist():
        by_host: dict[int, list[int]] = defaultdict(list)
        for rank in shard_ranks:
            by_host[rank // ranks_per_host].append(rank)
        groups.append(list(by_host.values()))
    turns = max(map(len, chain.from_iterable(groups)))
    if kind.ranks.shape[0] != 1 or len(set(map(len, groups))) != 1:
        raise ValueError(
            f"{kind.name}: hosts of {ranks_per_host} ranks do not hold equally many replicas"
        )
    offset = number if kind.scales_of is None else kind.scales_of  # scales follow their weights
    leader_of = np.empty((turns, *kind.ranks.shape[1:]), dtype=kind.ranks.dtype)
    for turn in range(turns):
        for shard, of_shard in enumerate(groups):
            leads = {}
            for group in of_shard:
                for rank in group:
                    leads[rank] = group[(turn + offset) % len(group)]
            leader_of[turn, shard] = [leads[rank] for rank in kind.ranks[0, shard].tolist()]
    return leader_of


def between_engines(map: ReshardMap, tp: int) -> Forwarding:
    """The relays for `map`, which covers all engines, of `tp` ranks each. There are none if they
    would save no time.

    Only trainer ranks have a shard at first, and would send it once to each engine. With many
    engines the links of the trainer ranks, or of its fullest stage, are the bottleneck. But engines
    that have received a tensor can send it too. As in van de Geijn's broadcast (scatter, then
    all-gather), the trainer writes every layer to some of the engines, which pass it on. Different
    layers have different leaders. Their number is chosen so that the two phases of the update,
    writing and passing on, take the least time together.

    Pure: equal on all ranks.
    """
    return passed_on(map.destination, tp, *written_directly(map, map.destination.world_size // tp))


def passed_on(layout: Layout, tp: int, of_ends: int, of_layers: int) -> Forwarding:
    """The forwarding in which the trainer writes each layer to `of_layers` engines, and other
    tensors to `of_ends` engines.
    """
    engines = layout.world_size // tp
    leader_of: list[np.ndarray] = []
    begins: list[int] = []
    passed = 0
    for kind in layout.kinds:
        followers = engines - (of_layers if kind.place == LAYER else of_ends)
        if kind.scales_of is None:
            begins.append(passed)
            passed += followers
        else:  # scales follow their weights
            begins.append(begins[kind.scales_of])
        if followers:
            leader_of.append(_by_engine(kind, tp, engines, followers, begins[-1]))
        else:
            leader_of.append(kind.ranks)
    return Forwarding.of(layout, tuple(leader_of))


def written_directly(map: ReshardMap, engines: int) -> tuple[int, int]:
    """Chooses `of_ends` and `of_layers` of `passed_on` so that the update takes the least time."""
    sent_bytes, held_bytes = _bytes_by_place(map)
    first, layer, last = range(len(PLACES))
    candidates = np.linspace(1, engines, min(engines, MOST_CANDIDATES))
    numbers = np.unique(candidates.round().astype(int))
    of_ends = numbers[:, None]
    of_layers = numbers[None, :]
    written = (
        of_ends[..., None] * (sent_bytes[first] + sent_bytes[last])
        + of_layers[..., None] * sent_bytes[layer]
    ).max(axis=2) / engines
    # each is a single tensor, so one rank sends all of it
    by_ends = -(-(engines - of_ends) // of_ends) * (held_bytes[first] + held_bytes[last])
    by_layers = _turns(map, engines, of_layers) * held_bytes[layer]
    cost = written + RELAY_COST * (by_ends + by_layers)
    # among equals, the one with the fewest relays
    best = np.argwhere(cost <= cost.min() * (1 + 1e-9))[-1]
    return int(numbers[best[0]]), int(numbers[best[1]])


def _turns(map: ReshardMap, engines: int, of_layers: np.ndarray) -> np.ndarray:
    """The layer bytes that the busiest engine passes on, relative to the layer bytes that it has.

    Engines take turns, layer by layer. If there are more engines than layers, some lead one layer
    and others none.
    """
    layers = max(
        (kind.instances for kind in map.destination.kinds if kind.place == LAYER), default=1
    )
    led_layers = -(-layers * of_layers // engines)  # layers that the busiest engine leads
    return led_layers * -(-(engines - of_layers) // of_layers) / layers


def _bytes_by_place(map: ReshardMap) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that trainer ranks send to all engines, [places, ranks that differ], and bytes of the
    fullest generator rank, [places].

    Assumes that all holders of a box send it equally often, which is nearly true of the schedule.
    Padding is left out, since any rank can send zeros.
    """
    sent_bytes = np.zeros((len(PLACES), map.source.world_size))
    held_bytes = np.zeros((len(PLACES), map.destination.world_size))
    for kind in map.destination.kinds:
        sizes = np.array([tensor.bytes for tensor in kind.shards])
        np.add.at(
            held_bytes[PLACES.index(kind.place)], kind.ranks[0], kind.instances * sizes[:, None]
        )
    for row in map.rows:
        target = map.destination.kinds[row.kind]
        for holder in row.holders if row.transform != ZEROS else ():
            kind = map.source.kinds[holder.kind]
            ranks = kind.ranks[:, holder.shard]  # [stages, replicas]
            share = map.row_bytes(row) * target.replicas / (len(row.holders) * ranks.shape[1])
            instances = np.bincount(kind.stages, minlength=len(ranks))
            np.add.at(sent_bytes[PLACES.index(target.place)], ranks, share * instances[:, None])
    return np.unique(sent_bytes, axis=1), held_bytes.max(axis=1)


def _by_engine(kind: Kind, tp: int, engines: int, followers: int, begin: int) -> np.ndarray:
    """The leader of every replica, [turns, shards, replicas].

    Each leading engine passes tensors on to the `followers` engines before it.
    """
    turns = min(engines, kind.instances)
    engine = kind.ranks[0] // tp
    start = (begin + followers * np.arange(turns))[:, None, None] % engines
    place = (engine - start) % engines
    leads = (start + followers + place % (engines - followers)) % engines
    return kind.ranks[0] + np.where(place < followers, leads - engine, 0) * tp


class RelayRule(NamedTuple):
    """The rule for which ranks pass tensors on.

    `ranks`: the generator ranks of a host (inside hosts) or of an engine (between engines).
    """

    scope: str  # INSIDE_HOSTS | BETWEEN_ENGINES
    ranks: int


def relayed(map: ReshardMap, rule: RelayRule) -> tuple[ReshardMap, Forwarding]:
    """The part of `map` that the trainer writes, and the relays, which are proven to be the rest.

    Pure: equal on all ranks.

    Between engines, there are relays only if they relieve the busiest rank. Raises ValueError if
    replicas are spread unevenly over the hosts.
    """
    begin = time.perf_counter()
    if rule.scope == INSIDE_HOSTS:
        forwarding = inside_hosts(map.destination, rule.ranks)
    else:
        forwarding = between_engines(map, rule.ranks)
        written_part = replace(map, destination=forwarding.leaders)
        if busiest_bytes(written_part, forwarding) >= busiest_bytes(map, None):
            engines = map.destination.world_size // rule.ranks
            # no relays: the trainer writes everything to all engines
            forwarding = passed_on(map.destination, rule.ranks, of_ends=engines, of_layers=engines)
    forwarding.prove()
    build_s = map.build_s + time.perf_counter() - begin
    return replace(map, destination=forwarding.leaders, build_s=build_s), forwarding


def planned_relays(map: ReshardMap, relay: str, tp: int) -> tuple[ReshardMap, Forwarding | None]:
    """The part of the result of `relayed` that is known before a run.

    `relay`: weights.relay; `tp`: the ranks of an engine. Relays inside hosts are not included,
    since they depend on where engines will run.
    """
    if relay != ENGINES:
        return map, None
    return relayed(map, RelayRule(BETWEEN_ENGINES, tp))


def summary(map: ReshardMap, forwarding: Forwarding | None) -> MapSummary:
    """The summary of both parts together. Copies and writes are the trainer's only."""
    if forwarding is None:
        return map.summary()
    _, written = map.rank_bytes()
    relayed_out, relayed_in = forwarding.rank_bytes()
    received = written + relayed_in
    return replace(
        map.summary(),
        tensors=count_tensors(forwarding.layout),
        bytes=int(received.sum()),
        bytes_minimum=sum(kind.bytes for kind in forwarding.layout.kinds),
        relayed_bytes=int(relayed_out.sum()),
        receiver_max_over_mean=float(received.max() / received.mean()),
    )


def busiest_bytes(map: ReshardMap, forwarding: Forwarding | None) -> int:
    """The most bytes that a rank sends or receives while the trainer writes, plus the most while
    engines pass on.
    """
    written = max(int(side.max()) for side in map.rank_bytes())
    if forwarding is None:
        return written
    return written + max(int(side.max()) for side in forwarding.rank_bytes())


def writes_s(map: ReshardMap) -> float:
    """Seconds in which the busiest sender prepares its writes."""
    return int(map.rank_writes().max()) * WRITE_S


def update_s(map: ReshardMap, forwarding: Forwarding | None, link_bytes_per_s: float) -> float:
    """Seconds of an update of all weights, by bytes or by writes, whichever takes longer. Without
    latency or quantisation.
    """
    return max(busiest_bytes(map, forwarding) / link_bytes_per_s, writes_s(map))


def delta_bytes(map: ReshardMap, forwarding: Forwarding | None, changed: float) -> float:
    """Like `busiest_bytes`, for an update that carries only the changes in a share `changed` of the
    elements. Engines pass on whole tensors. A delta that is too large becomes a full update.
    """
    share = delta_share(map, changed)
    full = busiest_bytes(map, forwarding)
    written = busiest_bytes(map, None)
    if share > MOST_OF_FULL:
        return full
    return full - written * (1 - share)


class SentTensors:
    """The tensors that destination ranks get by `map`, and those that they get from each other by
    `relays`, as arrays, since a large model has a million of them.

    Both ends of an update number the tensors of a rank by sorted name, so that hashes and offsets
    travel without names.

    A *place* is one tensor of one destination rank. Places are numbered rank by rank, and within a
    rank by name. A *sending* is a source rank that writes to a place. Sendings are numbered source
    by source, and within a source by place.
    """

    def __init__(self, map: ReshardMap, relays: Sequence[Relay] = ()):
        self.map = map
        ranks = map.destination.world_size
        numbers = _numbers(map)
        self.names = sorted(set().union(*[names.ravel().tolist() for names in numbers.values()]))
        number = {name: i for i, name in enumerate(self.names)}
        count = len(self.names)
        numbered = {}
        for span, names in numbers.items():
            numbered[span] = np.vectorize(number.__getitem__)(names)
        triples = _distinct(np.concatenate(_triples(map, numbered, count)))
        sources, pairs = np.divmod(triples, ranks * count)
        leader_pairs = np.zeros(len(relays), dtype=np.int64)
        follower_pairs = np.zeros(len(relays), dtype=np.int64)
        for i, relay in enumerate(relays):
            leader_pairs[i] = relay.source_rank * count + number[relay.tensor]
            follower_pairs[i] = relay.destination_rank * count + number[relay.tensor]
        # destination rank and name of each place, as one number
        self._pairs = _distinct(np.concatenate([pairs, follower_pairs]))
        # first sending of each source rank
        self.sendings = np.searchsorted(sources, np.arange(map.source.world_size + 1))
        # first place of each destination rank
        self.places = np.searchsorted(self._pairs, np.arange(ranks + 1) * count)
        self.place_of = np.searchsorted(self._pairs, pairs)  # place of each sending
        # places of leaders and of followers
        self.relayed = (
            np.searchsorted(self._pairs, leader_pairs),
            np.searchsorted(self._pairs, follower_pairs),
        )

    def name(self, place: int) -> tuple[int, str]:
        """The destination rank and the tensor name of a place."""
        rank, number = divmod(int(self._pairs[place]), len(self.names))
        return rank, self.names[number]

    def names_of(self, places: np.ndarray) -> np.ndarray:
        """The indices in `names` of the names of `places`."""
        return self._pairs[places] % len(self.names)

    def sent_by(self, source: int) -> np.ndarray:
        """The places that a source rank writes to, in order."""
        return self.place_of[self.sendings[source] : self.sendings[source + 1]]


def _distinct(numbers: np.ndarray) -> np.ndarray:
    """The sorted distinct numbers. (np.unique takes ten times as long.)"""
    numbers = np.sort(numbers)
    if len(numbers):
        return numbers[np.append(True, numbers[1:] != numbers[:-1])]
    return numbers


def _span(map: ReshardMap, row: TemplateRow) -> _Span:
    kind = map.destination.kinds[row.kind]
    experts = kind.shards[row.shard].experts
    if experts is None or EXPERT_FIELD not in kind.name:
        return row.kind, 0, 0
    first = experts[0] + row.box.start[0]
    return row.kind, first, first + row.box.shape[0]


def _numbers(map: ReshardMap) -> dict[_Span, np.ndarray]:
    """The names of a span's tensors, [instances, experts or 1]."""
    names_of_span = {}
    for span in {_span(map, row) for row in map.rows}:
        kind = map.destination.kinds[span[0]]
        experts = range(*span[1:])
        names = []
        for instance in range(kind.instances):
            name = kind.name_of(instance)
            names.append([name.replace(EXPERT_FIELD, str(e)) for e in experts] or [name])
        names_of_span[span] = np.array(names, dtype=object)
    return names_of_span


def _triples(map: ReshardMap, numbers: dict[_Span, np.ndarray], count: int) -> list[np.ndarray]:
    """source * destination ranks + destination, times `count`, plus the number of the name, for all
    rows. Rows with the same senders are computed once.
    """
    ends: dict[tuple, np.ndarray] = {}  # [instances, replicas]
    triples: dict[tuple, np.ndarray] = {}
    for row in map.rows:
        route = map.turns.sharing_key(row)
        span = _span(map, row)
        if (route, span) in triples:
            continue
        if route not in ends:
            assignment = map.turns.assignment(row)
            ends[route] = (
                assignment.senders.astype(np.int64) * map.destination.world_size
                + assignment.receivers
            )[assignment.class_of]
        triples[route, span] = (ends[route][:, None, :] * count + numbers[span][:, :, None]).ravel()
    return list(triples.values())
