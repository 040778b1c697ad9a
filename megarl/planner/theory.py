"""Section 7 of the LlamaRL paper: step times of the synchronous and the asynchronous framework, and their optima.

Sizes, batches and parallel degrees are real numbers here, as in the paper; memory and W0 in one unit (bytes), times in seconds.
The paper bounds the theorem on no form of eta but that it falls. For tau(b) = fixed + per_sample * b, so eta(b) = per_sample + fixed / b,
the optimum of the asynchronous framework has a closed form: minimise (C + A b)(p + f / b) over b, C the memory that does not grow
with the batch. It is smallest at b = sqrt(C f / (A p)), and there (sqrt(C p) + sqrt(A f))^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Eta(Protocol):
    """Seconds per sample at a batch size (equation 1); falls with it (assumption 7.1)."""

    def __call__(self, batch: float) -> float: ...


@dataclass(frozen=True)
class AffineEta:
    """eta of tau(b) = fixed_s + per_sample_s * b."""

    fixed_s: float
    per_sample_s: float

    def __call__(self, batch: float) -> float:
        return self.per_sample_s + self.fixed_s / batch


@dataclass(frozen=True)
class Problem:
    """Definition 7.2 and table 2."""

    gpus: float  # G0
    batch: float  # B0, global
    memory: float  # M0, of a GPU
    weights: float  # W0, of one model; the trainer holds 4 of them: weights, gradients, Adam's two states
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
    theta: float  # share of the GPUs that trains
    step_s: float


def trainer_memory(p: Problem, b_t: float, m_t: float) -> float:
    """Per GPU, equation 4."""
    return (4 * p.weights + p.activation * b_t) / m_t


def generator_memory(p: Problem, b_g: float, m_g: float) -> float:
    """Per GPU, equation 5."""
    return (p.weights + p.kv_cache * b_g) / m_g


def synchronous_s(p: Problem, b_t: float, b_g: float, m: float) -> float:
    """Equation 2."""
    return p.batch / p.gpus * m * (p.eta_t(b_t) + p.eta_g(b_g))


def asynchronous_s(p: Problem, b_t: float, b_g: float, m_t: float, m_g: float, theta: float) -> float:
    """Equation 3."""
    return p.batch / p.gpus * max(p.eta_t(b_t) * m_t / theta, p.eta_g(b_g) * m_g / (1 - theta))


def best_asynchronous(p: Problem) -> Asynchronous:
    """The optimum of problem 7 by equations 9 and 10 and lemma B.3: memory is full on both sides, and both take equally long.

    The step is B0 / G0 * (T_t + T_g). Exact for AffineEta, else found by a search over the batch that assumes one minimum.
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


def best_synchronous(p: Problem, rounds: int = 200) -> Synchronous:
    """The optimum of problem 6. Memory is full (lemma B.1), so m follows from the batches; each batch is found for the other in turn."""
    b_t, b_g = best_asynchronous(p).b_t, best_asynchronous(p).b_g
    for _ in range(rounds):
        before = b_t, b_g
        b_t, _ = _least(5 * p.weights + p.kv_cache * b_g, p.activation, _plus(p.eta_t, p.eta_g(b_g)))
        b_g, _ = _least(5 * p.weights + p.activation * b_t, p.kv_cache, _plus(p.eta_g, p.eta_t(b_t)))
        if math.isclose(before[0], b_t, rel_tol=1e-13) and math.isclose(before[1], b_g, rel_tol=1e-13):
            break
    m = (5 * p.weights + p.activation * b_t + p.kv_cache * b_g) / p.memory
    return Synchronous(b_t, b_g, m, synchronous_s(p, b_t, b_g, m))


def _plus(eta: Eta, constant: float) -> Eta:
    if isinstance(eta, AffineEta):
        return AffineEta(eta.fixed_s, eta.per_sample_s + constant)
    return lambda batch: eta(batch) + constant


def _least(fixed: float, per_sample: float, eta: Eta) -> tuple[float, float]:
    """Batch and value of the least (fixed + per_sample * b) * eta(b)."""

    def cost(batch: float) -> float:
        return (fixed + per_sample * batch) * eta(batch)

    if isinstance(eta, AffineEta):
        batch = math.sqrt(fixed * eta.fixed_s / (per_sample * eta.per_sample_s))
        return batch, (math.sqrt(fixed * eta.per_sample_s) + math.sqrt(per_sample * eta.fixed_s)) ** 2
    batch = math.exp(_golden(lambda x: cost(math.exp(x)), math.log(1e-9), math.log(1e12)))
    return batch, cost(batch)


def _golden(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f, of one minimum, is least: golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = f(a), f(b)
    while high - low > 1e-10 * max(1.0, abs(low)):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = f(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = f(b)
    return (low + high) / 2
