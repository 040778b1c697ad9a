"""The topologies of a config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megarl.base.geometry import TrainerTopology
from megarl.config.schema import AsyncConfig, GeneratorConfig, RunConfig, TrainerConfig
from megarl.generator.groups import EngineGroup
from megarl.messaging.rendezvous import EVALUATION
from megarl.models import ModelSpec
from megarl.reshard.layout import Layout, generator_layout, side_by_side


def trainer_topology(trainer: TrainerConfig) -> TrainerTopology:
    # fields are keys
    return TrainerTopology(
        **{name: getattr(trainer, name) for name in TrainerTopology.__dataclass_fields__}
    )


GPUS_PER_NODE = 8


def gpus_per_node(config: RunConfig) -> int:
    """GPUs of a node that is not there to be asked: launch.ranks_per_node, or else as many as most
    servers have.
    """
    return config.launch.ranks_per_node or GPUS_PER_NODE


def engine_groups(generator: GeneratorConfig) -> tuple[EngineGroup, ...]:
    groups: list[EngineGroup] = []
    first = 0
    for name, settings in generator.shapes.items():
        groups.append(EngineGroup(name, settings, first))
        first += settings.engines
    return tuple(groups)


def evaluation_group(config: RunConfig) -> EngineGroup:
    """The engines that only evaluate, with the generator's settings; there may be none."""
    settings = replace(config.generator, engines=config.eval.engines, groups={})
    return EngineGroup("", settings, first=0, purpose=EVALUATION)


def groups_of_run(config: RunConfig) -> tuple[EngineGroup, ...]:
    """The groups of all purposes."""
    groups = engine_groups(config.generator)
    evaluation = evaluation_group(config)
    return (*groups, evaluation) if evaluation.settings.engines else groups


def engines_layout(config: RunConfig, spec: ModelSpec, device: str) -> Layout:
    """The layout of the engines, whose ranks are numbered group by group. `device`: see
    `generator_layout`.
    """
    layouts = []
    for group in engine_groups(config.generator):
        if group.settings.engines:
            dtype = group.dtype(config.model.dtype)
            quantization = group.settings.quantization
            layouts.append(generator_layout(spec, group.topology, dtype, device, quantization))
    return side_by_side(layouts)


def generator_ranks(groups: Sequence[EngineGroup]) -> int:
    return sum(group.topology.world_size for group in groups)


def with_one_gpu_shared(config: RunConfig, gpus_here: Callable[[], int]) -> RunConfig:
    """The config with cluster.share_gpus=true if it is null and a run of one trainer rank and one
    engine rank has one GPU.
    """
    if config.cluster.share_gpus is not None or config.cluster.gpu == "cpu":
        return config
    if _ranks_of_sides(config) != (1, 1) or gpus_here() != 1:
        return config
    return replace(config, cluster=replace(config.cluster, share_gpus=True))


def _ranks_of_sides(config: RunConfig) -> tuple[int, int]:
    """The numbers of trainer ranks and of the policy's engine ranks."""
    generator = generator_ranks(engine_groups(config.generator))
    return trainer_topology(config.trainer).world_size, generator


def gpus_of_run(config: RunConfig) -> int:
    """The GPUs of the trainer and the policy's engines together."""
    ranks = _ranks_of_sides(config)
    return max(ranks) if config.cluster.share_gpus else sum(ranks)


def run_ahead(config: AsyncConfig) -> int | None:
    """The number of steps that the generator may be ahead of the trainer; None: no limit.

    It is the capacity, or `max_staleness` if that is less: a prompt begun further ahead would be
    too old when it is used.
    """
    bounds = [bound for bound in (config.capacity, config.max_staleness) if bound is not None]
    return min(bounds, default=None)
