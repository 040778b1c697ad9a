"""The synchronous run with which a plan is compared: the best one on the same GPUs (LlamaRL,
equations 2 and 6).

Generation and training take turns. The minimum is over all that a user could choose: microbatches
b_t, concurrency b_g, the parallel sizes of both sides, recomputation, the engines' precision, and
whether both sides share all GPUs or have GPUs of their own. So it depends on the model, the data and
the GPUs, but not on the sizes that the config gives to either side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megarl.config.errors import ConfigError
from megarl.config.schema import GeneratorConfig, RunConfig, TrainerConfig
from megarl.estimate.estimate import (
    estimate,
    generate_model,
    training_memory,
    training_time,
    unfinished,
)
from megarl.estimate.hardware import GIB, Cluster, constants_of
from megarl.estimate.memory import BesideCache, Workload, kv_room, shape_of
from megarl.estimate.search import Search, Side, generator_shapes, search, trainer_shapes
from megarl.models import ModelSpec


@dataclass(frozen=True)
class Baseline:
    """The fastest synchronous run."""

    trainer: TrainerConfig
    generator: GeneratorConfig
    shared: bool  # both sides are on all GPUs, where their memory stays
    step_s: float

    def describe(self) -> str:
        t = self.trainer
        g = self.generator
        trainer = f"tp {t.tp}, pp {t.pp}, dp {t.dp}" + (f", cp {t.cp}" if t.cp > 1 else "")
        engines = f"{g.engines} engines of tp {g.tp} in {g.quantization or 'the model dtype'}"
        where = "on the same GPUs" if self.shared else "on GPUs of their own"
        return f"{trainer}; {engines}, {g.max_concurrency} requests at once, {where}"


@dataclass(frozen=True)
class _SharedTrainer:
    """A trainer on all GPUs."""

    config: TrainerConfig
    seconds: float
    occupied_bytes: float  # of each GPU, without what the runtime of CUDA takes


def best_baseline(config: RunConfig, spec: ModelSpec, gpus: int) -> Baseline | None:
    """The fastest synchronous run on `gpus` GPUs, or None if none fits."""
    synchronous = replace(
        config,
        async_=replace(config.async_, capacity=0),
        cluster=replace(config.cluster, share_gpus=False),
        generator=replace(
            config.generator, groups={}, dp_attention=1, quantization=None, kv_cache_tokens=None
        ),
        trainer=replace(config.trainer, vpp=1, cp=1, ep=1, etp=1),
        eval=replace(config.eval, engines=0),
    )
    shared = _best_shared(synchronous, spec, gpus)
    shared_s = shared.step_s if shared else math.inf
    separate = None
    if _least_separate_s(synchronous, spec, gpus) < shared_s:
        separate = _best_separate(synchronous, spec, gpus)
    if separate and separate.step_s < shared_s:
        return separate
    return shared


def _least_separate_s(config: RunConfig, spec: ModelSpec, gpus: int) -> float:
    """A bound from below for GPUs of its own for each side: one side has at most half of them, and
    no side is slower with more GPUs.
    """
    sides = Search(config, shape_of(spec), gpus)

    def seconds(side: Side | None) -> float:
        return side.seconds if side else math.inf

    half = gpus // 2
    return min(
        seconds(sides.trainer(half)) + seconds(sides.generator(gpus)),
        seconds(sides.trainer(gpus)) + seconds(sides.generator(half)),
    )


def _best_separate(config: RunConfig, spec: ModelSpec, gpus: int) -> Baseline | None:
    """Equation 2 with GPUs of its own for each side, with the weight update."""
    try:
        _, best = search(config, spec, gpus)
    except ConfigError:  # nothing fits
        return None
    step_s = estimate(best, spec).step_s
    return Baseline(best.trainer, best.generator, shared=False, step_s=step_s)


def _best_shared(config: RunConfig, spec: ModelSpec, gpus: int) -> Baseline | None:
    """Both sides on all GPUs. Weights reach the engines without a cost."""
    glue_s = constants_of(Cluster.of(config).gpu.name).glue_s
    trainers = sorted(_shared_trainers(config, spec, gpus), key=lambda trainer: trainer.seconds)
    best: Baseline | None = None
    for shape in generator_shapes(config, spec):
        if gpus % shape.tp:
            continue
        generator = replace(shape, engines=gpus // shape.tp)
        # a trainer that is slower and takes more memory than another never helps
        smallest_bytes = math.inf
        for trainer in trainers:
            if best and trainer.seconds + glue_s >= best.step_s:
                break
            if trainer.occupied_bytes >= smallest_bytes:
                continue
            smallest_bytes = trainer.occupied_bytes
            generation_s = _generation_s(config, spec, generator, trainer.occupied_bytes)
            step_s = trainer.seconds + generation_s + glue_s
            if step_s < (best.step_s if best else math.inf):
                best = Baseline(trainer.config, generator, shared=True, step_s=step_s)
    return best


def _shared_trainers(config: RunConfig, spec: ModelSpec, gpus: int) -> Iterator[_SharedTrainer]:
    gpu = Cluster.of(config).gpu
    workload = Workload.of(config)
    for shape in trainer_shapes(config, spec, Cluster.of(config)):
        sizes = shape.tp * shape.cp * shape.pp
        dp = gpus // sizes
        if gpus % sizes or workload.sequences // shape.minibatches < dp:
            continue
        if dp * shape.tp * shape.cp % shape.ep:
            continue
        trainer = replace(shape, dp=dp)
        memory = training_memory(config, spec, trainer, gpu)
        if memory.total > gpu.memory_gib * GIB:
            continue
        seconds = training_time(config, spec, trainer, workload).total
        # the runtime's memory is counted once, with the engine's
        yield _SharedTrainer(trainer, seconds, memory.total - memory.runtime)


def _generation_s(
    config: RunConfig, spec: ModelSpec, generator: GeneratorConfig, occupied_bytes: float
) -> float:
    """Infinite if not even the longest sequence has room beside the trainer."""
    gpu = Cluster.of(config).gpu
    dtype = config.model.dtype
    whole_gpu = replace(generator, mem_fraction=1.0)
    beside_trainer = kv_room(spec, whole_gpu, dtype, gpu, BesideCache(occupied=occupied_bytes))
    tokens = math.floor(min(beside_trainer, kv_room(spec, generator, dtype, gpu)))
    if tokens < Workload.of(config).longest:
        return math.inf
    model = generate_model(config, spec, replace(generator, kv_cache_tokens=tokens))
    return model.seconds(Workload.generated(config), **unfinished(config)).total
