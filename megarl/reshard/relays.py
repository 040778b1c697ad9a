"""Splits a reshard map into the part that the trainer writes and the part that engines pass on (`weights.relay`)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from megarl.reshard.deltas import MOST_OF_FULL, delta_share
from megarl.reshard.fleet import between_engines, passed_on
from megarl.reshard.forwarding import Forwarding, inside_hosts
from megarl.reshard.map import ReshardMap, Summary, count_tensors

AUTO, ENGINES = "auto", "engines"  # weights.relay
INSIDE_HOSTS, BETWEEN_ENGINES = "inside_hosts", "between_engines"


class RelayRule(NamedTuple):
    """Says which ranks pass tensors on to which. `ranks` is the number of generator ranks of a host, or of an engine."""

    how: str  # INSIDE_HOSTS | BETWEEN_ENGINES
    ranks: int


def relayed(map: ReshardMap, rule: RelayRule) -> tuple[ReshardMap, Forwarding]:
    """The part of `map` that the trainer writes, and what generator ranks pass on, proven to be the rest. Pure: equal on all ranks.

    Between engines nothing is passed on unless that relieves the busiest rank. Raises ValueError if replicas are spread unevenly over the
    hosts.
    """
    begin = time.perf_counter()
    by_host = rule.how == INSIDE_HOSTS
    forwarding = inside_hosts(map.destination, rule.ranks) if by_host else between_engines(map, rule.ranks)
    if not by_host and busiest_bytes(replace(map, destination=forwarding.leaders), forwarding) >= busiest_bytes(map, None):
        forwarding = passed_on(map.destination, rule.ranks, *[map.destination.world_size // rule.ranks] * 2)  # no relays
    forwarding.prove()
    return replace(map, destination=forwarding.leaders, build_s=map.build_s + time.perf_counter() - begin), forwarding


def foreseen(map: ReshardMap, relay: str, tp: int) -> tuple[ReshardMap, Forwarding | None]:
    """The result of `relayed`, as far as it is known before a run. `relay` is weights.relay, `tp` the ranks of an engine. Relays inside
    hosts depend on where engines will run, so they are not included."""
    return relayed(map, RelayRule(BETWEEN_ENGINES, tp)) if relay == ENGINES else (map, None)


def summary(map: ReshardMap, forwarding: Forwarding | None) -> Summary:
    """The summary of both parts together; copies and writes count only the trainer's."""
    if forwarding is None:
        return map.summary()
    (_, written), (given, taken) = map.rank_bytes(), forwarding.rank_bytes()
    received = written + taken
    return replace(
        map.summary(),
        tensors=count_tensors(forwarding.layout),
        bytes=int(received.sum()),
        bytes_minimum=sum(kind.bytes for kind in forwarding.layout.kinds),
        relayed_bytes=int(given.sum()),
        receiver_max_over_mean=float(received.max() / received.mean()),
    )


def busiest_bytes(map: ReshardMap, forwarding: Forwarding | None) -> int:
    """The bytes of the rank that sends or receives most while the trainer writes, plus those of the busiest while engines pass on."""
    written = max(int(side.max()) for side in map.rank_bytes())
    return written if forwarding is None else written + max(int(side.max()) for side in forwarding.rank_bytes())


def delta_bytes(map: ReshardMap, forwarding: Forwarding | None, changed: float) -> float:
    """As `busiest_bytes`, of an update that carries only what has changed, a share `changed` of the elements. Engines pass whole tensors
    on. A delta that is too large becomes a full update."""
    share, full = delta_share(map, changed), busiest_bytes(map, forwarding)
    written = busiest_bytes(map, None)
    return full if share > MOST_OF_FULL else full - written * (1 - share)
