"""Nodes: hosts whose ranks reach each other without the network.

Two uses, both optional. `Nodes` given to ReshardMap.build makes a receiver prefer senders on its own node. And where a node holds
several engines, `forward_inside_nodes` lets one copy of every byte cross the network per node, and names what is passed on there:

    forwarding = forward_inside_nodes(generator_layout(…), ranks_per_node=8)
    map = ReshardMap.build(trainer, forwarding.leaders)     what crosses the network: proven and scheduled as any map
    forwarding.relays_from(rank)                            what a generator rank passes on, each once its tensor is complete
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Iterator

import numpy as np
from msgspec import Struct

from megarl.reshard.kinds import ITEM_BYTES, Kind, Layout


@dataclass(frozen=True)
class Nodes:
    """Node of every rank. Numbers are shared: trainer and generator ranks of equal number stand on one host."""

    trainer: tuple[int, ...]
    generator: tuple[int, ...]

    @classmethod
    def apart(cls, trainer_ranks: int, generator_ranks: int, ranks_per_node: int) -> Nodes:
        """Both sides fill nodes of their own, trainer first."""
        trainer = tuple(rank // ranks_per_node for rank in range(trainer_ranks))
        first = trainer[-1] + 1
        return cls(trainer, tuple(first + rank // ranks_per_node for rank in range(generator_ranks)))

    @classmethod
    def shared(cls, trainer_ranks: int, generator_ranks: int, trainer_per_node: int, generator_per_node: int) -> Nodes:
        """Every node has some of both, side by side."""
        trainer = tuple(rank // trainer_per_node for rank in range(trainer_ranks))
        return cls(trainer, tuple(rank // generator_per_node for rank in range(generator_ranks)))


class Relay(Struct, frozen=True):
    """A whole tensor, once complete on `source_rank`, goes to the tensor of the same name on `destination_rank` of the same node."""

    source_rank: int
    destination_rank: int
    tensor: str
    depth: int  # as of Copy
    bytes: int


@dataclass(frozen=True)
class Forwarding:
    """`leaders`: the layout of the ranks that receive from outside; the rest of `layout` is filled by relays."""

    layout: Layout
    leaders: Layout
    ranks_per_node: int

    def relays_from(self, rank: int) -> list[Relay]:
        """In forward order."""
        return [relay for relay in self._relays(rank // self.ranks_per_node) if relay.source_rank == rank]

    def relays_to(self, rank: int) -> list[Relay]:
        """In forward order."""
        return [relay for relay in self._relays(rank // self.ranks_per_node) if relay.destination_rank == rank]

    def _relays(self, node: int) -> list[Relay]:
        found: list[Relay] = []
        for kind, leading in zip(self.layout.kinds, self.leaders.kinds):
            for instance in range(kind.instances):
                depth = self.layout.depth(kind, instance)
                for shard in range(len(kind.shards)):
                    here = [r for r in kind.ranks[kind.stages[instance], shard].tolist() if r // self.ranks_per_node == node]
                    if not here:
                        continue
                    leaders = leading.ranks[leading.stages[instance], shard].tolist()
                    (leader,) = [r for r in leaders if r // self.ranks_per_node == node]
                    for tensor in kind.tensors(shard, instance) if len(here) > 1 else ():
                        size = int(np.prod(tensor.shape, dtype=np.int64)) * ITEM_BYTES[tensor.dtype]
                        found += [Relay(leader, r, tensor.name, depth, size) for r in here if r != leader]
        return sorted(found, key=lambda relay: relay.depth)


def forward_inside_nodes(layout: Layout, ranks_per_node: int) -> Forwarding:
    """Of each node's replicas of a shard one leads; they take turns by layer and kind, so that their links share the load."""
    kinds = tuple(_leading(kind, number, ranks_per_node) for number, kind in enumerate(layout.kinds))
    return Forwarding(layout, replace(layout, kinds=kinds), ranks_per_node)


def _leading(kind: Kind, number: int, ranks_per_node: int) -> Kind:
    groups = list(_groups(kind, ranks_per_node))  # per shard: the replicas' ranks, node by node
    turns = max(len(group) for of_shard in groups for group in of_shard)
    if kind.ranks.shape[0] != 1 or len({len(of_shard) for of_shard in groups}) != 1:
        raise ValueError(f"{kind.name}: replicas are not spread alike over nodes of {ranks_per_node} ranks")
    offset = number if kind.scales_of is None else kind.scales_of  # scales follow their weights
    ranks = [[[group[(turn + offset) % len(group)] for group in of_shard] for of_shard in groups] for turn in range(turns)]
    return replace(kind, stages=(kind.first_layer + np.arange(kind.instances)) % turns, ranks=np.array(ranks))


def _groups(kind: Kind, ranks_per_node: int) -> Iterator[list[list[int]]]:
    for shard in kind.ranks[0].tolist():
        by_node: dict[int, list[int]] = defaultdict(list)
        for rank in shard:
            by_node[rank // ranks_per_node].append(rank)
        yield list(by_node.values())
