"""The topologies that a config asks for."""

from __future__ import annotations

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.config.schema import AsyncConfig, GeneratorConfig, TrainerConfig


def trainer_topology(trainer: TrainerConfig) -> TrainerTopology:
    return TrainerTopology(**{name: getattr(trainer, name) for name in TrainerTopology.__dataclass_fields__})  # the section's own keys


def generator_topology(generator: GeneratorConfig) -> GeneratorTopology:
    return GeneratorTopology(generator.engines, generator.tp, generator.ep, generator.dp_attention)


# How far the two sides of a run may be apart.


def run_ahead(config: AsyncConfig) -> int | None:
    """How many steps the generator may be ahead of the trainer; None: no limit.

    It is the capacity, or `max_staleness` if that is less: a prompt begun further ahead would be too old when its turn comes.
    """
    return min([bound for bound in (config.capacity, config.max_staleness) if bound is not None], default=None)
