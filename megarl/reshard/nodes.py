"""Nodes: hosts whose ranks reach each other without the network."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Nodes:
    """Node of every rank. Numbers are shared: trainer and generator ranks of equal number stand on one host.

    Given to ReshardMap.build, it makes a receiver prefer senders on its own node.
    """

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
