"""Forwarding: the trainer writes a shard only to some of its replicas, the *leaders*, which pass it on to the others.

    forwarding = inside_hosts(generator_layout(…), ranks_per_host=8)
    map = ReshardMap.build(trainer, forwarding.leaders)     what the trainer writes; proven and scheduled like any map
    forwarding.prove()                                      proves that relays cover all the rest
    forwarding.relays                                       what generator ranks pass on, once each tensor is complete

A table per kind gives the leaders of each *turn*: instances (layers) take turns, so that all ranks share the load.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from msgspec import Struct

from megarl.reshard.kinds import ITEM_BYTES, Kind, Layout
from megarl.reshard.proof import ProofError


class Relay(Struct, frozen=True):
    """Sends a whole tensor, once it is complete on `source_rank`, to the tensor of the same name on `destination_rank`."""

    source_rank: int
    destination_rank: int
    tensor: str
    depth: int  # see Copy
    bytes: int


@dataclass(frozen=True, eq=False)
class Forwarding:
    """`leaders` is the layout of the ranks that receive from the trainer; relays fill the rest of `layout`.

    Rank `leader_of[k][turn, shard, replica]` passes on to rank `layout.kinds[k].ranks[0, shard, replica]`, or is that rank itself. Instance
    i of a kind takes the turn `leaders.kinds[k].stages[i]`.
    """

    layout: Layout
    leaders: Layout
    leader_of: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, layout: Layout, leader_of: tuple[np.ndarray, ...]) -> Forwarding:
        """Derives `leaders` from `leader_of`. Raises ValueError if turns have different numbers of leaders."""
        kinds = tuple([_leading(kind, table) for kind, table in zip(layout.kinds, leader_of)])
        return cls(layout, replace(layout, kinds=kinds), leader_of)

    @cached_property
    def relays(self) -> list[Relay]:
        """All relays, in forward order."""
        found: list[Relay] = []
        for kind, leading, leader_of in zip(self.layout.kinds, self.leaders.kinds, self.leader_of):
            for instance in range(kind.instances) if leading is not kind else ():
                depth, leaders = self.layout.depth(kind, instance), leader_of[leading.stages[instance]]
                for shard, replica in np.argwhere(leaders != kind.ranks[0]).tolist():
                    ends = int(leaders[shard, replica]), int(kind.ranks[0, shard, replica])
                    for tensor in kind.tensors(shard, instance):
                        found.append(Relay(*ends, tensor.name, depth, math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]))
        return sorted(found, key=lambda relay: relay.depth)

    def rank_bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes that each generator rank sends by relays, and those that each receives by them."""
        given, taken = np.zeros((2, self.layout.world_size), dtype=np.int64)
        for kind, leading, leader_of in zip(self.layout.kinds, self.leaders.kinds, self.leader_of):
            sizes = np.array([math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in kind.shards])
            for turn, instances in enumerate(np.bincount(leading.stages).tolist() if leading is not kind else ()):
                passed = leader_of[turn] != kind.ranks[0]
                moved = (instances * sizes[:, None] * passed)[passed]
                np.add.at(given, leader_of[turn][passed], moved)
                np.add.at(taken, kind.ranks[0][passed], moved)
        return given, taken

    def prove(self) -> None:
        """Proves that the trainer writes to every rank of a shard once, or a rank that the trainer writes the same shard to passes it on
        once. Raises ProofError otherwise. (The map's own proof covers what the trainer writes.)"""
        for kind, leading, leader_of in zip(self.layout.kinds, self.leaders.kinds, self.leader_of):
            if leading is kind:
                continue
            for turn in range(len(leader_of)):
                for ranks, leaders, written in zip(kind.ranks[0], leader_of[turn], leading.ranks[turn]):
                    direct = np.sort(ranks[leaders == ranks])
                    if len(set(ranks.tolist())) < len(ranks) or not np.array_equal(direct, np.sort(written)):
                        raise ProofError(f"{kind.name}: of ranks {ranks.tolist()} the trainer writes to {written.tolist()}")
                    if not np.isin(leaders, written).all():
                        raise ProofError(f"{kind.name}: of {leaders.tolist()} pass it on who do not have it from the trainer")


def inside_hosts(layout: Layout, ranks_per_host: int) -> Forwarding:
    """Lets one replica of each host lead, so that every byte crosses the network once per host.

    Raises ValueError if replicas are spread unevenly over the hosts.
    """
    return Forwarding.of(layout, tuple([_by_host(kind, number, ranks_per_host) for number, kind in enumerate(layout.kinds)]))


def _leading(kind: Kind, leader_of: np.ndarray) -> Kind:
    """The kind with only its leaders; the kind itself if nobody passes it on."""
    turns = len(leader_of)
    if turns == 1 and np.array_equal(leader_of[0], kind.ranks[0]):
        return kind
    ranks = [[sorted(set(of_shard)) for of_shard in of_turn] for of_turn in leader_of.tolist()]
    return replace(kind, stages=(kind.first_layer + np.arange(kind.instances)) % turns, ranks=np.array(ranks))


def _by_host(kind: Kind, number: int, ranks_per_host: int) -> np.ndarray:
    groups = list(_groups(kind, ranks_per_host))  # per shard: the replicas' ranks, host by host
    turns = max(len(group) for of_shard in groups for group in of_shard)
    if kind.ranks.shape[0] != 1 or len({len(of_shard) for of_shard in groups}) != 1:
        raise ValueError(f"{kind.name}: replicas are not spread alike over hosts of {ranks_per_host} ranks")
    offset = number if kind.scales_of is None else kind.scales_of  # scales follow their weights
    leader_of = np.empty((turns, *kind.ranks.shape[1:]), dtype=kind.ranks.dtype)
    for turn in range(turns):
        for shard, of_shard in enumerate(groups):
            leads = {rank: group[(turn + offset) % len(group)] for group in of_shard for rank in group}
            leader_of[turn, shard] = [leads[rank] for rank in kind.ranks[0, shard].tolist()]
    return leader_of


def _groups(kind: Kind, ranks_per_host: int) -> Iterator[list[list[int]]]:
    for shard in kind.ranks[0].tolist():
        by_host: dict[int, list[int]] = defaultdict(list)
        for rank in shard:
            by_host[rank // ranks_per_host].append(rank)
        yield list(by_host.values())
