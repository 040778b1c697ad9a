"""The topologies that a config asks for."""

from __future__ import annotations

from megarl.config.schema import GeneratorConfig, TrainerConfig
from megarl.topology import GeneratorTopology, TrainerTopology


def trainer_topology(trainer: TrainerConfig) -> TrainerTopology:
    return TrainerTopology(**{name: getattr(trainer, name) for name in TrainerTopology.__dataclass_fields__})  # the section's own keys


def generator_topology(generator: GeneratorConfig) -> GeneratorTopology:
    return GeneratorTopology(generator.engines, generator.tp, generator.ep, generator.dp_attention)
