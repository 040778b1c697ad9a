"""Section 7 of the LlamaRL paper: the best step times of the synchronous and asynchronous
frameworks, in closed form.

As in the paper, batches and parallel degrees are real numbers. Memory and W0 are in bytes, times in
seconds. The paper requires only that eta decreases. With tau(b) = f + p b, and so eta(b) = p + f /
b, the asynchronous optimum has a closed form: (C + A b)(p + f / b), where C is the memory that does
not depend on the batch, has its minimum (sqrt(C p) + sqrt(A f))^2 at b = sqrt(C f / (A p)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megarl.config.schema import RunConfig
from megarl.estimate.hardware import GIB, Cluster, constants_of
from megarl.estimate.memory import LOGIT_BYTES, Workload, activation_elements, kv_bytes_per_token
from megarl.estimate.search import SearchResult
from megarl.estimate.times import GenerateModel, TrainModel
from megarl.models import ModelSpec
from megarl.reshard.layout import ITEM_BYTES, parameter_count

PIPELINE = 64  # microbatches that share the pipeline's bubble


@dataclass(frozen=True)
class AffineEta:
    """Seconds per sample (equation 1) for tau(b) = fixed_s + per_sample_s * b.

    It decreases with the batch b (assumption 7.1).
    """

    fixed_s: float
    per_sample_s: float

    def __call__(self, batch: float) -> float:
        return self.per_sample_s + self.fixed_s / batch


@dataclass(frozen=True)
class Problem:
    """Definition 7.2 and table 2."""

    gpus: float  # G0
    batch: float  # B0, global
    memory: float  # M0, memory of a GPU
    # W0, one model; the trainer has 4 times as much: weights, gradients, Adam's two states
    weights: float
    activation: float  # A_t, per sample of a microbatch
    kv_cache: float  # K_g, per sample in decoding
    eta_t: AffineEta
    eta_g: AffineEta


@dataclass(frozen=True)
class Synchronous:
    b_t: float
    b_g: float
    m: float
    step_s: float


@dataclass(frozen=True)
class Asynchronous:
    b_t: float
    b_g: float
    m_t: float
    m_g: float
    theta: float  # share of the GPUs that train
    step_s: float


@dataclass(frozen=True)
class Optima:
    """The closed forms, and what the search finds.

    `speedup_bound`: from theorem 7.5, the synchronous optimum / the asynchronous one. Effects that
    the theorem ignores (fp8, less communication) only increase it (remark 7.3).
    """

    closed_form: Asynchronous
    search: Asynchronous
    synchronous: Synchronous
    speedup_bound: float


def compare(result: SearchResult, config: RunConfig, spec: ModelSpec, gpus: int) -> Optima:
    """`config`: the config of the search's `result` on `gpus` GPUs."""
    problem = problem_of(config, spec, gpus)
    t = config.trainer
    g = config.generator
    asynchronous = best_asynchronous(problem)
    synchronous = best_synchronous(problem)
    searched = Asynchronous(
        b_t=t.max_tokens_per_microbatch / Workload.of(config).tokens_per_sequence,
        b_g=g.max_concurrency,
        m_t=t.tp * t.cp * t.pp,
        m_g=g.tp,
        theta=result.theta,
        step_s=max(result.trainer.seconds, result.generator.seconds),
    )
    return Optima(asynchronous, searched, synchronous, synchronous.step_s / asynchronous.step_s)


def problem_of(config: RunConfig, spec: ModelSpec, gpus: int) -> Problem:
    """The problem of a run on `gpus` GPUs.

    A sample is a sequence of mean length. Both tau are estimated with the config's parallel sizes.
    The paper assumes that they do not depend on these.
    """
    work = Workload.of(config)
    dtype = config.model.dtype
    cluster = Cluster.of(config)
    constants = constants_of(cluster.gpu.name)
    item = ITEM_BYTES[dtype]
    length = work.tokens_per_sequence

    def train_s(batch: int) -> float:
        trainer = replace(
            config.trainer, max_tokens_per_microbatch=math.ceil(batch * length), minibatches=1
        )
        microbatches = replace(work, sequences=PIPELINE * batch * trainer.dp)
        time = TrainModel(spec, trainer, dtype, cluster, constants).seconds(microbatches)
        return (
            time.compute + time.tensor_parallel + time.expert_parallel + time.pipeline
        ) / PIPELINE

    def generate_s(batch: int) -> float:
        engine = replace(config.generator, engines=1)
        decoding = GenerateModel(spec, engine, dtype, cluster, constants).decode_step(
            batch, work.prompt_tokens + work.response_tokens / 2
        )
        return work.response_tokens * decoding.total

    unsplit = replace(
        config.trainer,
        tp=1,
        pp=1,
        vpp=1,
        cp=1,
        ep=1,
        etp=1,
        first_stage_layers=None,
        last_stage_layers=None,
    )
    dense = spec.dense_layers
    activation_bytes = (
        item * activation_elements(spec, unsplit, 0, dense, spec.num_layers - dense)
        + LOGIT_BYTES[dtype] * spec.vocab_size
    )
    return Problem(
        gpus=gpus,
        batch=work.sequences,
        memory=(cluster.gpu.memory_gib - cluster.gpu.runtime_gib) * GIB,
        weights=item * parameter_count(spec),
        activation=length * activation_bytes,
        kv_cache=length
        * kv_bytes_per_token(spec, replace(config.generator, tp=1, dp_attention=1), item),
        eta_t=_line(train_s(1), train_s(8), 8),
        eta_g=_line(
            generate_s(1),
            generate_s(config.generator.max_concurrency),
            config.generator.max_concurrency,
        ),
    )


def best_asynchronous(p: Problem) -> Asynchronous:
    """The optimum of problem 7, by equations 9 and 10 and lemma B.3: memory is full on both sides,
    and both take equally long. A step takes B0 / G0 * (T_t + T_g).
    """
    b_t, time_t = _least(4 * p.weights, p.activation, p.eta_t)
    b_g, time_g = _least(p.weights, p.kv_cache, p.eta_g)
    return Asynchronous(
        b_t=b_t,
        b_g=b_g,
        m_t=(4 * p.weights + p.activation * b_t) / p.memory,
        m_g=(p.weights + p.kv_cache * b_g) / p.memory,
        theta=time_t / (time_t + time_g),
        step_s=p.batch / p.gpus * (time_t + time_g) / p.memory,
    )


def best_synchronous(p: Problem) -> Synchronous:
    """The optimum of problem 6.

    Memory is full (lemma B.1), so m follows from the batches, which are optimised alternately.
    """
    b_t = best_asynchronous(p).b_t
    b_g = best_asynchronous(p).b_g
    for _ in range(200):
        before = b_t, b_g
        b_t, _ = _least(
            5 * p.weights + p.kv_cache * b_g, p.activation, _plus(p.eta_t, p.eta_g(b_g))
        )
        b_g, _ = _least(
            5 * p.weights + p.activation * b_t, p.kv_cache, _plus(p.eta_g, p.eta_t(b_t))
        )
        if math.isclose(before[0], b_t, rel_tol=1e-13) and math.isclose(
            before[1], b_g, rel_tol=1e-13
        ):
            break
    m = (5 * p.weights + p.activation * b_t + p.kv_cache * b_g) / p.memory
    # equation 2
    return Synchronous(b_t, b_g, m, p.batch / p.gpus * m * (p.eta_t(b_t) + p.eta_g(b_g)))


def _line(one_s: float, many_s: float, many: int) -> AffineEta:
    """The line through tau(1) and tau(many)."""
    slope = (many_s - one_s) / max(1, many - 1)
    return AffineEta(one_s - slope, slope)


def _plus(eta: AffineEta, constant: float) -> AffineEta:
    return AffineEta(eta.fixed_s, eta.per_sample_s + constant)


def _least(fixed: float, per_sample: float, eta: AffineEta) -> tuple[float, float]:
    """Batch and value at the minimum of (fixed + per_sample * b) * eta(b)."""
    batch = math.sqrt(fixed * eta.fixed_s / (per_sample * eta.per_sample_s))
    return batch, (math.sqrt(fixed * eta.per_sample_s) + math.sqrt(per_sample * eta.fixed_s)) ** 2
