"""Decides which process runs on which node: pure arithmetic on the topologies and the shape of the allocation."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.errors import ConfigError


@dataclass(frozen=True)
class EnginePart:
    """The TP ranks of one engine that run on one node. Engines larger than a node have several parts; part 0 answers requests."""

    engine: int
    part: int
    parts: int
    ranks: int  # TP ranks in this part
    first_slot: int  # of the node's slots

    @property
    def name(self) -> str:
        """The name of its process, and of the port that it listens on."""
        return f"engine.{self.engine}.{self.part}" if self.part else f"engine.{self.engine}"


@dataclass(frozen=True)
class NodePlan:
    """The ranks and engines of one node. A slot is a GPU, or the place of one rank on a machine without GPUs."""

    node: int
    trainer_ranks: range  # on slots 0, 1, …
    engines: tuple[EnginePart, ...]

    @property
    def serves(self) -> tuple[int, ...]:
        """The engines that answer requests on this node."""
        return tuple(part.engine for part in self.engines if part.part == 0)

    @property
    def idle(self) -> bool:
        return not self.trainer_ranks and not self.engines


def place(trainer_ranks: int, engines: int, tp: int, nodes: int, slots: int) -> list[NodePlan]:
    """Fills the nodes' slots in order: trainer ranks first, then engines of `tp` ranks each.

    An engine that fits into a node is never split; a larger one takes whole nodes. Neighbouring trainer ranks share a node, so that the
    innermost axes (tp, then cp) stay on its fast links. Raises ConfigError if there are too few nodes.
    """
    if tp > slots and tp % slots:
        raise ConfigError(f"generator.tp={tp}: an engine larger than a node must fill whole nodes of {slots} slots")
    first_of_engine, slot = [], trainer_ranks
    for _ in range(engines):
        free = slots - slot % slots  # in the node that `slot` is in
        if free < min(tp, slots):
            slot += free
        first_of_engine.append(slot)
        slot += tp
    needed = -(-slot // slots)
    if needed > nodes:
        ranks = f"{trainer_ranks} trainer ranks and {engines} engines of generator.tp={tp}"
        raise ConfigError(f"{ranks} need {needed} nodes of {slots} slots; the allocation has {nodes}")
    plans = []
    for node in range(nodes):
        begin, end = node * slots, (node + 1) * slots
        parts = tuple(
            EnginePart(engine, max(0, begin - first) // slots, max(1, tp // slots), min(tp, slots), max(first, begin) - begin)
            for engine, first in enumerate(first_of_engine)
            if first < end and first + tp > begin
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
