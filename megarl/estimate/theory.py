"""Section 7 of the LlamaRL paper: the best step times of the synchronous and asynchronous
frameworks, in closed form.

As in the paper, batches and parallel degrees are real numbers. Memory and W0 are in bytes, times in
seconds. The paper requires only that eta decreases. With tau(b) = f + p b, and so eta(b) = p + f /
b, the asynchronous optimum has a closed form: (C + A b)(p + f / b), where C is the memory that does
not depend on the batch, has its minimum (sqrt(C p) + sqrt(A f))^2 at b = sqrt(C f / (A p)). With
measured values of eta, the minima are found numerically.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.estimate.hardware import GIB, Cluster, constants_of
from megarl.estimate.memory import LOGIT_BYTES, Workload, activation_elements, kv_bytes_per_token
from megarl.estimate.search import SearchResult
from megarl.estimate.times import GenerateModel, TrainModel
from megarl.models import ModelSpec
from megarl.observe.metrics import METRICS_FILE, read_metrics
from megarl.reshard.layout import ITEM_BYTES, parameter_count

PIPELINE = 64  # microbatches that share the pipeline's bubble
TRIED = 2000  # batches between the smallest and the largest of a measured eta
_PAIR = re.compile(r"([tg]):([\d.]+)=([\d.eE+-]+)")
_TIMES = (
    "time/step_s",
    "time/trainer_wait_s",
    "time/sync_s",
    "time/save_s",
    "time/generator_wait_s",
    "tokens_per_s",
    "samples_per_s",
)


@dataclass(frozen=True)
class AffineEta:
    """Seconds per sample (equation 1) for tau(b) = fixed_s + per_sample_s * b.

    It decreases with the batch b (assumption 7.1).
    """

    fixed_s: float
    per_sample_s: float

    def __call__(self, batch: float) -> float:
        return self.per_sample_s + self.fixed_s / batch

    def least(self, fixed: float, per_sample: float, plus: float = 0.0) -> tuple[float, float]:
        """Batch and value at the minimum of (fixed + per_sample * b) * (eta(b) + plus)."""
        slope_s = self.per_sample_s + plus
        batch = math.sqrt(fixed * self.fixed_s / (per_sample * slope_s))
        return batch, (math.sqrt(fixed * slope_s) + math.sqrt(per_sample * self.fixed_s)) ** 2


@dataclass(frozen=True)
class MeasuredEta:
    """Seconds per sample at some batches, in ascending order; between two batches a power of the
    batch, outside of all constant.
    """

    batches: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, batch: Any) -> Any:
        return np.exp(np.interp(np.log(batch), np.log(self.batches), np.log(self.seconds)))

    def least(self, fixed: float, per_sample: float, plus: float = 0.0) -> tuple[float, float]:
        """As for AffineEta; the batch is one between the smallest and the largest."""
        tried = np.geomspace(self.batches[0], self.batches[-1], TRIED)
        tried = np.append(tried, self.batches)
        values = (fixed + per_sample * tried) * (self(tried) + plus)
        best = int(values.argmin())
        return float(tried[best]), float(values[best])

    def increases(self) -> list[tuple[float, float]]:
        """Pairs of neighbouring batches between which eta does not decrease, against assumption
        7.1.
        """
        pairs = []
        for (batch, seconds), (larger, larger_s) in itertools.pairwise(
            zip(self.batches, self.seconds)
        ):
            if larger_s >= seconds:
                pairs.append((batch, larger))
        return pairs


Eta = AffineEta | MeasuredEta


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
    eta_t: Eta
    eta_g: Eta


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
    """The optima of problems 6 and 7, and what the search finds.

    `speedup_bound`: from theorem 7.5, the synchronous optimum / the asynchronous one. Effects that
    the theorem ignores (fp8, less communication) only increase it (remark 7.3). It is the product
    of two steps of equation 11 (remark 7.2): `memory_factor`, (a), since each side has the memory of
    its GPUs alone; `batch_factor`, (b), since each side then has the batch that is best for it.
    """

    closed_form: Asynchronous
    search: Asynchronous
    synchronous: Synchronous
    speedup_bound: float
    memory_factor: float
    batch_factor: float
    measured: Mapping[str, MeasuredEta]  # "t", "g": given in the place of the planner's eta


def compare(
    result: SearchResult,
    config: RunConfig,
    spec: ModelSpec,
    gpus: int,
    measured: Mapping[str, MeasuredEta] = {},
) -> Optima:
    """`config`: the config of the search's `result` on `gpus` GPUs. `measured`: as in `Optima`."""
    problem = problem_of(config, spec, gpus)
    etas = {f"eta_{side}": eta for side, eta in measured.items()}
    problem = replace(problem, **etas)
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
    memory_factor, batch_factor = speedup_steps(problem)
    return Optima(
        closed_form=asynchronous,
        search=searched,
        synchronous=synchronous,
        speedup_bound=synchronous.step_s / asynchronous.step_s,
        memory_factor=memory_factor,
        batch_factor=batch_factor,
        measured=measured,
    )


def measured_etas(measurements: Iterable[str]) -> dict[str, MeasuredEta]:
    """The eta of each side, "t" or "g", from texts like `t:8=0.4` (a sample takes 0.4 s in
    microbatches of 8) and folders of runs, each of which has one value of each side.

    Raises ConfigError for other texts, folders without metrics, or a side with a single batch.
    """
    values: dict[str, dict[float, float]] = {}
    for measurement in measurements:
        match = _PAIR.fullmatch(measurement)
        if match:
            side, batch, seconds = match.groups()
            values.setdefault(side, {})[float(batch)] = float(seconds)
        else:
            for side, (batch_size, sample_s) in _eta_of_run(Path(measurement)).items():
                values.setdefault(side, {})[batch_size] = sample_s
    etas = {}
    for side, seconds_of in values.items():
        if len(seconds_of) < 2 or min(*seconds_of, *seconds_of.values()) <= 0:
            raise ConfigError(
                f"--eta: {side} must have at least two batches, all above 0, in all runs and pairs"
            )
        batches = tuple(sorted(seconds_of))
        etas[side] = MeasuredEta(batches, tuple(seconds_of[batch] for batch in batches))
    return etas


def _eta_of_run(run: Path) -> dict[str, tuple[float, float]]:
    """Side -> batch and eta, from the run's median step."""
    if not (run / METRICS_FILE).is_file():
        raise ConfigError(
            f"--eta {run}: must be a run's folder, or like t:8=0.4 or g:64=1.2 (side, batch, "
            "seconds a sample)"
        )
    config = load_config(run / "config.yaml")
    rows = []
    for row in read_metrics(run / METRICS_FILE):
        if all(isinstance(row.get(name), int | float) for name in _TIMES):
            rows.append(row)
    if not rows:
        raise ConfigError(f"--eta {run}: has no step with {', '.join(_TIMES)}")
    samples = config.rollout.prompts_per_step * config.rollout.n
    response_tokens = median(row["tokens_per_s"] / row["samples_per_s"] for row in rows)
    length = config.plan.mean_prompt_tokens + response_tokens
    waits = ("time/trainer_wait_s", "time/sync_s", "time/save_s")
    train_s = median(row["time/step_s"] - sum(row[name] for name in waits) for row in rows)
    generate_s = median(row["time/step_s"] - row["time/generator_wait_s"] for row in rows)
    return {
        "t": (
            config.trainer.max_tokens_per_microbatch / length,
            train_s * config.trainer.dp / samples,
        ),
        "g": (config.generator.max_concurrency, generate_s * config.generator.engines / samples),
    }


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
    b_t, time_t = p.eta_t.least(4 * p.weights, p.activation)
    b_g, time_g = p.eta_g.least(p.weights, p.kv_cache)
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

    Memory is full (lemma B.1), so m follows from the batches, which are optimised alternately, from
    each measured batch on.
    """
    starts = [best_asynchronous(p).b_t]
    if isinstance(p.eta_t, MeasuredEta):
        starts += p.eta_t.batches
    return min((_best_synchronous_from(p, start) for start in starts), key=lambda run: run.step_s)


def speedup_steps(p: Problem) -> tuple[float, float]:
    """The factors of steps (a) and (b) of equation 11; their product is the speed-up."""
    sync = best_synchronous(p)
    trainer = (4 * p.weights + p.activation * sync.b_t) * p.eta_t(sync.b_t)
    generator = (p.weights + p.kv_cache * sync.b_g) * p.eta_g(sync.b_g)
    apart_s = p.batch / p.gpus * (trainer + generator) / p.memory  # at the synchronous batches
    return sync.step_s / apart_s, apart_s / best_asynchronous(p).step_s


def _best_synchronous_from(p: Problem, b_t: float) -> Synchronous:
    b_g = math.nan
    for _ in range(200):
        before = b_t, b_g
        b_g, _ = p.eta_g.least(5 * p.weights + p.activation * b_t, p.kv_cache, float(p.eta_t(b_t)))
        b_t, _ = p.eta_t.least(5 * p.weights + p.kv_cache * b_g, p.activation, float(p.eta_g(b_g)))
        if math.isclose(before[0], b_t, rel_tol=1e-13) and math.isclose(
            before[1], b_g, rel_tol=1e-13
        ):
            break
    m = (5 * p.weights + p.activation * b_t + p.kv_cache * b_g) / p.memory
    # equation 2
    return Synchronous(b_t, b_g, m, p.batch / p.gpus * m * float(p.eta_t(b_t) + p.eta_g(b_g)))


def _line(one_s: float, many_s: float, many: int) -> AffineEta:
    """The line through tau(1) and tau(many)."""
    slope = (many_s - one_s) / max(1, many - 1)
    return AffineEta(one_s - slope, slope)
