"""Elements and bytes that each rank holds, from the same layouts as the reshard map."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from megarl.config.schema import GeneratorConfig, TrainerConfig
from megarl.models import ModelSpec
from megarl.models.adapters import Lora, trainer_adapters
from megarl.models.parameters import FIRST
from megarl.plan.topologies import generator_topology, trainer_topology
from megarl.reshard.kinds import ITEM_BYTES, Layout
from megarl.reshard.layout import generator_layout, stage_of_layer, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.schedule import landings
from megarl.topology import GeneratorTopology, TrainerTopology


@dataclass(frozen=True)
class Held:
    """Elements of weights on one rank; experts are counted apart, since they have their own mesh."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True)
class GeneratorWeights:
    """Bytes on one engine rank. `streamed`: non-expert weights read at every decoding step; the embedding is only looked up."""

    streamed: int
    expert: int
    embedding: int

    @property
    def total(self) -> int:
        return self.streamed + self.expert + self.embedding


def stages_held(layout: Layout) -> list[Held]:
    """Elements in the memory of the fullest rank of every pipeline stage."""
    stages = layout.kinds[0].ranks.shape[0]
    held = np.zeros((stages, 2), dtype=np.int64)
    for kind in layout.kinds:
        of_experts = int(kind.shards[0].experts is not None)
        held[:, of_experts] += np.bincount(kind.stages, minlength=stages) * max(math.prod(shard.shape) for shard in kind.shards)
    return [Held(int(dense), int(expert)) for dense, expert in held]


def trainer_held(spec: ModelSpec, trainer: TrainerConfig, dtype: str) -> list[Held]:
    """Elements on the fullest rank of each pipeline stage. Raises ConfigError if the sizes do not divide the model."""
    return _trainer_held(shape_of(spec), _one_replica(trainer_topology(trainer)), dtype)


def adapters_held(spec: ModelSpec, trainer: TrainerConfig, dtype: str, lora: Lora) -> list[tuple[Held, Held]]:
    """(elements of adapters, elements of the weights that have some) on the fullest rank of each pipeline stage."""
    return _adapters_held(shape_of(spec), _one_replica(trainer_topology(trainer)), dtype, lora)


def trained_held(spec: ModelSpec, trainer: TrainerConfig, dtype: str, lora: Lora | None) -> list[Held]:
    """Elements with a gradient and an optimizer on the fullest rank of each pipeline stage."""
    if lora:
        return [adapters for adapters, _ in adapters_held(spec, trainer, dtype, lora)]
    return trainer_held(spec, trainer, dtype)


def generator_weights(spec: ModelSpec, generator: GeneratorConfig, dtype: str) -> GeneratorWeights:
    """Bytes on the fullest rank, including scales. Raises ConfigError if the sizes do not divide the model."""
    return _generator_weights(shape_of(spec), replace(generator_topology(generator), engines=1), generator.quantization, dtype)


def landing_bytes(spec: ModelSpec, trainer: TrainerConfig, generator: GeneratorConfig, dtype: str) -> int:
    """Memory that an engine rank keeps beside its weights if trainer ranks of other nodes write to it, for boxes of short rows
    (schedule.lands); 0 if the trainer cuts no finer than the engine."""
    topology = _one_replica(replace(trainer_topology(trainer), pp=1, vpp=1, first_stage_layers=None, last_stage_layers=None))
    engine = replace(generator_topology(generator), engines=1)
    few = spec.first_dense_layers + 1 if spec.num_experts else 1  # the layers from here on are alike, and pp = 1 keeps them together
    shapes = (replace(shape_of(spec), num_layers=few + more) for more in (0, 1))
    some, one_more = (_landing_bytes(shape, topology, engine, generator.quantization, dtype) for shape in shapes)
    return some + (spec.num_layers - few) * (one_more - some)


def shadow_bytes(spec: ModelSpec, trainer: TrainerConfig, generator: GeneratorConfig, dtype: str) -> float:
    """What the fullest trainer rank keeps to find what has changed (weights.delta): all that it holds, in the engines' precision, or its
    part of what is sent, if there are so few engines that replicas of the trainer share that."""
    topology = trainer_topology(trainer)
    whole = generator.tp * generator_weights(spec, generator, dtype).total  # replicated tensors count for each rank
    held = trainer_held(spec, trainer, dtype)
    elements = topology.tp * sum(stage.total for stage in held)
    of_fullest = whole * max(stage.total for stage in held) / elements
    return min(of_fullest, whole * generator.engines / topology.world_size)


def largest_stage(spec: ModelSpec, trainer: TrainerConfig) -> int:
    """The number of layers of the largest pipeline stage."""
    return max(map(sum, stage_layers(spec, trainer)))


def stage_layers(spec: ModelSpec, trainer: TrainerConfig) -> tuple[tuple[int, int], ...]:
    """(dense layers, expert layers) of each pipeline stage."""
    t = trainer
    return _stage_layers(shape_of(spec), t.pp, t.vpp, t.first_stage_layers, t.last_stage_layers)


def _one_replica(topology: TrainerTopology) -> TrainerTopology:
    """The topology with as few replicas as the experts' mesh allows; all replicas hold the same."""
    ranks = topology.tp * topology.cp
    return replace(topology, dp=math.lcm(topology.ep * topology.etp, ranks) // ranks)


# A search asks for the same sizes again and again, so these are cached.


@functools.lru_cache(maxsize=4096)
def _trainer_held(spec: ModelSpec, topology: TrainerTopology, dtype: str) -> list[Held]:
    return stages_held(trainer_layout(spec, topology, dtype))


@functools.lru_cache(maxsize=4096)
def _adapters_held(spec: ModelSpec, topology: TrainerTopology, dtype: str, lora: Lora) -> list[tuple[Held, Held]]:
    whole = trainer_layout(spec, topology, dtype)
    names = {adapter.of.name for adapter in trainer_adapters(spec, topology, "local", lora)}
    adapted = Layout(whole.name, whole.world_size, tuple(kind for kind in whole.kinds if kind.name in names))
    return list(zip(stages_held(trainer_layout(spec, topology, dtype, "local", lora)), stages_held(adapted), strict=True))


@functools.lru_cache(maxsize=4096)
def _stage_layers(spec: ModelSpec, pp: int, vpp: int, first: int | None, last: int | None) -> tuple[tuple[int, int], ...]:
    stages = stage_of_layer(spec.num_layers, TrainerTopology(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last))
    dense = spec.first_dense_layers if spec.num_experts else spec.num_layers
    return tuple((stages[:dense].count(stage), stages[dense:].count(stage)) for stage in range(pp))


@functools.lru_cache(maxsize=4096)
def _generator_weights(spec: ModelSpec, topology: GeneratorTopology, quantization: str | None, dtype: str) -> GeneratorWeights:
    layout = generator_layout(spec, topology, dtype, quantization=quantization)
    embedding = expert = streamed = 0
    for kind in layout.kinds:
        size = kind.instances * max(math.prod(shard.shape) * ITEM_BYTES[shard.dtype] for shard in kind.shards)
        if kind.shards[0].experts is not None:
            expert += size
        elif kind.place == FIRST and not spec.tie_word_embeddings:
            embedding += size
        else:
            streamed += size
    return GeneratorWeights(streamed=streamed, expert=expert, embedding=embedding)


@functools.lru_cache(maxsize=4096)
def _landing_bytes(spec: ModelSpec, trainer: TrainerTopology, engine: GeneratorTopology, quantization: str | None, dtype: str) -> int:
    map = ReshardMap.build(trainer_layout(spec, trainer, dtype), generator_layout(spec, engine, dtype, quantization=quantization))
    return sum(copy.bytes for copy in landings(map, 0))


def rank_bytes(layout: Layout) -> list[int]:
    """Bytes of weights on each rank, [world_size]."""
    sizes = np.zeros(layout.world_size, dtype=np.int64)
    for kind in layout.kinds:
        times = np.bincount(kind.stages, minlength=kind.ranks.shape[0])  # instances on each stage
        for shard, tensor in enumerate(kind.shards):
            np.add.at(sizes, kind.ranks[:, shard], times[:, None] * math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype])
    return sizes.tolist()


def shape_of(spec: ModelSpec) -> ModelSpec:
    """The spec without the scaling of positions, which cannot be hashed and on which sizes do not depend."""
    return spec if spec.rope_scaling is None else replace(spec, rope_scaling=None)
