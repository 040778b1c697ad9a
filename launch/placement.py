"""Decides which process runs on which node: pure arithmetic on the topologies and the shape of the allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.errors import ConfigError
from megarl.messaging.rendezvous import POLICY


@dataclass(frozen=True)
class EngineFleet:
    """Engines of one model."""

    engines: int
    tp: int
    name: str = POLICY
    key: str = "generator"  # of the section with their settings, for messages


@dataclass(frozen=True)
class EnginePart:
    """The TP ranks of one engine that run on one node. Engines larger than a node have several parts; part 0 answers requests."""

    engine: int
    part: int
    parts: int
    ranks: int  # TP ranks in this part
    first_slot: int  # of the node's slots
    fleet: str = POLICY  # the engines that it belongs to

    @property
    def name(self) -> str:
        """The name of its process, and of the port that it listens on."""
        return f"{self.whole}.{self.part}" if self.part else self.whole

    @property
    def whole(self) -> str:
        """The name of the engine."""
        return f"{self.fleet}.{self.engine}"


@dataclass(frozen=True)
class NodePlan:
    """The ranks and engines of one node. A slot is a GPU, or the place of one rank on a machine without GPUs."""

    node: int
    trainer_ranks: range  # on slots 0, 1, …
    engines: tuple[EnginePart, ...]

    @property
    def serves(self) -> tuple[int, ...]:
        """The policy's engines that answer requests on this node."""
        return tuple(part.engine for part in self.answering if part.fleet == POLICY)

    @property
    def answering(self) -> tuple[EnginePart, ...]:
        """Of each engine that answers requests on this node, the part that does."""
        return tuple(part for part in self.engines if part.part == 0)

    @property
    def idle(self) -> bool:
        return not self.trainer_ranks and not self.engines


def place(trainer_ranks: int, fleets: Sequence[EngineFleet], nodes: int, slots: int) -> list[NodePlan]:
    """Fills the nodes' slots in order: trainer ranks first, then one fleet's engines after the other's.

    An engine that fits into a node is never split; a larger one takes whole nodes. Neighbouring trainer ranks share a node, so that the
    innermost axes (tp, then cp) stay on its fast links. Raises ConfigError if there are too few nodes.
    """
    for fleet in fleets:
        if fleet.tp > slots and fleet.tp % slots:
            raise ConfigError(f"{fleet.key}.tp={fleet.tp}: an engine larger than a node must fill whole nodes of {slots} slots")
    first_of_engine: list[tuple[EngineFleet, int, int]] = []  # fleet, engine, slot
    slot = trainer_ranks
    for fleet, engine in [(each, engine) for each in fleets for engine in range(each.engines)]:
        free = slots - slot % slots  # in the node that `slot` is in
        if free < min(fleet.tp, slots):
            slot += free
        first_of_engine.append((fleet, engine, slot))
        slot += fleet.tp
    needed = -(-slot // slots)
    if needed > nodes:
        ranks = [f"{trainer_ranks} trainer ranks", *(f"{fleet.engines} engines of {fleet.key}.tp={fleet.tp}" for fleet in fleets)]
        listed = " and ".join((", ".join(ranks[:-1]), ranks[-1])) if fleets else ranks[0]
        raise ConfigError(f"{listed} need {needed} nodes of {slots} slots; the allocation has {nodes}")
    plans = []
    for node in range(nodes):
        begin, end = node * slots, (node + 1) * slots
        parts = tuple(
            EnginePart(
                engine,
                max(0, begin - first) // slots,
                max(1, fleet.tp // slots),
                min(fleet.tp, slots),
                max(first, begin) - begin,
                fleet.name,
            )
            for fleet, engine, first in first_of_engine
            if first < end and first + fleet.tp > begin
        )
        plans.append(NodePlan(node, range(min(begin, trainer_ranks), min(end, trainer_ranks)), parts))
    return plans


def slots_per_node(ranks: int, nodes: int, gpus: int, wanted: int | None) -> int:
    """The slots of a node: `wanted` (launch.ranks_per_node), or its GPUs, or without GPUs the fewest that hold `ranks` on all nodes.

    Raises ConfigError if a node has fewer GPUs than wanted.
    """
    if wanted is not None and gpus and wanted > gpus:
        raise ConfigError(f"launch.ranks_per_node={wanted}: must be at most the GPUs of a node, {gpus}")
    return wanted or gpus or -(-ranks // nodes)
