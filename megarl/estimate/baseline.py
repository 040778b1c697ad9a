"""The synchronous framework that a plan is compared with (LlamaRL, equations 2 and 6): all GPUs generate, then all GPUs train.

Both phases have the same model parallel size m and stay in memory together; the engines hold bf16, like the trainer. The fastest m whose
memory fits counts, so the speed-up is over the best that such a system could do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megarl.config.errors import ConfigError
from megarl.config.schema import GeneratorConfig, RunConfig, TrainerConfig
from megarl.estimate.constants import constants_of
from megarl.estimate.generate_time import GenerateModel
from megarl.estimate.generator_memory import generator_memory, kv_bytes_per_token
from megarl.estimate.hardware import GIB, Cluster
from megarl.estimate.training import training_memory, training_time
from megarl.estimate.workload import Workload
from megarl.models import ModelSpec
from megarl.plan.model_checks import check_sizes
from megarl.reshard.kinds import ITEM_BYTES

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Baseline:
    m: int
    step_s: float


def best_baseline(config: RunConfig, spec: ModelSpec, gpus: int) -> Baseline | None:
    """The fastest baseline on `gpus` GPUs; None if no m fits."""
    found = [Baseline(m, step_s) for m in SIZES if gpus % m == 0 if (step_s := _step_s(config, spec, gpus, m)) is not None]
    return min(found, key=lambda baseline: baseline.step_s, default=None)


def _step_s(config: RunConfig, spec: ModelSpec, gpus: int, m: int) -> float | None:
    cluster, workload, dtype = Cluster.of(config), Workload.of(config), config.model.dtype
    constants = constants_of(cluster.gpu.name)
    times = []
    for trainer, generator in _layouts(config, spec, gpus, m):
        colocated = replace(config, trainer=trainer, generator=generator)
        if any(True for _ in check_sizes(colocated, spec)):
            continue
        try:
            of_trainer = training_memory(config, spec, trainer, cluster.gpu)
            of_generator = generator_memory(spec, generator, dtype, workload, cluster.gpu)
            runtime = of_generator.runtime  # counted once: the phases share the GPU
            spare = cluster.gpu.memory_gib * GIB - (of_trainer.total + of_generator.total - runtime)
            cache = generator.kv_cache_tokens
            if spare < 0 and cache is not None:  # a cache of a given size gives way, as far as the longest sequence
                cache -= math.ceil(-spare / kv_bytes_per_token(spec, generator, ITEM_BYTES[dtype]))
                generator = replace(generator, kv_cache_tokens=cache)
                spare = cache - workload.longest
            if spare < 0:
                continue
            train = training_time(config, spec, trainer, cluster, constants, workload)
            generate = GenerateModel(spec, generator, dtype, cluster, constants).seconds(Workload.generated(config))
        except ConfigError:  # trainer or engine cannot have these sizes: the checks find most such cases, the layouts all
            continue
        times.append(train.total + generate.total + constants.glue_s)
    return min(times, default=None)


def _layouts(config: RunConfig, spec: ModelSpec, gpus: int, m: int) -> Iterator[tuple[TrainerConfig, GeneratorConfig]]:
    """Trainers with tp * pp = m, and ep as configured if it divides (else 1); each with engines of tp = m."""
    for tp in (1, 2, 4, 8):
        if m % tp:
            continue
        pp, dp = m // tp, gpus // m
        ep = config.trainer.ep if spec.num_experts and tp * dp % config.trainer.ep == 0 else 1
        first, last = even_stages(spec.num_layers, pp)
        trainer = replace(
            config.trainer, tp=tp, pp=pp, vpp=1, cp=1, dp=dp, ep=ep, etp=1, zero=1, recompute=True,
            sequence_parallel=tp > 1, first_stage_layers=first, last_stage_layers=last,
        )  # fmt: skip
        ep = min(m, config.generator.ep) if spec.num_experts else 1
        yield trainer, replace(config.generator, tp=m, ep=ep, dp_attention=1, engines=gpus // m, quantization=None)


def even_stages(layers: int, pp: int) -> tuple[int | None, int | None]:
    """Layers of the first and the last stage if pp does not divide `layers`: fewer than the other stages have, which are equal."""
    if pp == 1 or layers % pp == 0:
        return None, None
    if pp == 2:
        return layers // 2, layers - layers // 2
    others = -(-layers // pp)
    rest = layers - others * (pp - 2)
    return (rest // 2, rest - rest // 2) if rest >= 2 else (None, None)
