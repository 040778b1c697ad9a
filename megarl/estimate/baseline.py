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

from megarl.config.schema import GeneratorConfig, RunConfig, TrainerConfig
from megarl.estimate.estimate import (
    estimate,
    generate_model,
    training_memory,
    training_time,
    unfinished,
)
from megarl.estimate.hardware import GIB
from megarl.estimate.memory import BesideCache, Workload, kv_room, shape_of
from megarl.estimate.search import Search
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
    sides = Search(synchronous, shape_of(spec), gpus)
    shared = _best_shared(sides)
    separate = _best_separate(sides, spec, shared.step_s if shared else math.inf)
    return separate or shared


def _best_separate(sides: Search, spec: ModelSpec, below_s: float) -> Baseline | None:
    """Equation 2 with GPUs of its own for each side, with the weight update; None if it needs
    `below_s` or more.
    """
    split = sides.best_split(below_s)
    best = sides.with_split(split) if split else None
    if best is None:
        return None
    step_s = estimate(best, spec).step_s
    if step_s >= below_s:
        return None
    return Baseline(best.trainer, best.generator, shared=False, step_s=step_s)


def _best_shared(sides: Search) -> Baseline | None:
    """Both sides on all GPUs. Weights reach the engines without a cost."""
    glue_s = sides.constants.glue_s
    trainers = sorted(_shared_trainers(sides), key=lambda trainer: trainer.seconds)
    best: Baseline | None = None
    for shape in sides.generator_shapes:
        if sides.gpus % shape.tp:
            continue
        generator = replace(shape, engines=sides.gpus // shape.tp)
        # a trainer that is slower and takes more memory than another never helps
        smallest_bytes = math.inf
        for trainer in trainers:
            if best and trainer.seconds + glue_s >= best.step_s:
                break
            if trainer.occupied_bytes >= smallest_bytes:
                continue
            smallest_bytes = trainer.occupied_bytes
            generation_s = _generation_s(sides, generator, trainer.occupied_bytes)
            step_s = trainer.seconds + generation_s + glue_s
            if step_s < (best.step_s if best else math.inf):
                best = Baseline(trainer.config, generator, shared=True, step_s=step_s)
    return best


def _shared_trainers(sides: Search) -> Iterator[_SharedTrainer]:
    gpu = sides.cluster.gpu
    for shape in sides.trainer_shapes:
        sizes = shape.tp * shape.cp * shape.pp
        dp = sides.gpus // sizes
        if sides.gpus % sizes or sides.workload.sequences // shape.minibatches < dp:
            continue
        if dp * shape.tp * shape.cp % shape.ep:
            continue
        trainer = replace(shape, dp=dp)
        memory = training_memory(sides.config, sides.spec, trainer, gpu)
        if memory.total > gpu.memory_gib * GIB:
            continue
        seconds = training_time(sides.config, sides.spec, trainer, sides.workload).total
        # the runtime's memory is counted once, with the engine's
        yield _SharedTrainer(trainer, seconds, memory.total - memory.runtime)


def _generation_s(sides: Search, generator: GeneratorConfig, occupied_bytes: float) -> float:
    """Infinite if not even the longest sequence has room beside the trainer."""
    config = sides.config
    gpu = sides.cluster.gpu
    whole_gpu = replace(generator, mem_fraction=1.0)
    beside_trainer = kv_room(
        sides.spec, whole_gpu, sides.dtype, gpu, BesideCache(occupied=occupied_bytes)
    )
    tokens = math.floor(min(beside_trainer, kv_room(sides.spec, generator, sides.dtype, gpu)))
    if tokens < sides.workload.longest:
        return math.inf
    model = generate_model(config, sides.spec, replace(generator, kv_cache_tokens=tokens))
    return model.seconds(Workload.generated(config), **unfinished(config)).total
