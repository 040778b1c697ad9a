"""Section 7 of the LlamaRL paper: the closed form against brute force and against sympy, and the
theorem on random problems.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.estimate.hardware import GIB, Cluster
from megarl.estimate.memory import Workload
from megarl.estimate.theory import (
    AffineEta,
    MeasuredEta,
    Problem,
    best_asynchronous,
    best_synchronous,
    measured_etas,
    problem_of,
    speedup_steps,
)
from megarl.estimate.times import GenerateModel
from megarl.models import load_spec

ROOT = Path(__file__).parents[2]
SIZE = st.floats(1e-3, 1e3)
AFFINE = st.builds(AffineEta, fixed_s=SIZE, per_sample_s=SIZE)


PROBLEMS = st.builds(
    Problem,
    gpus=st.floats(1, 1e5),
    batch=st.floats(1, 1e5),
    memory=SIZE,
    weights=SIZE,
    activation=SIZE,
    kv_cache=SIZE,
    eta_t=AFFINE,
    eta_g=AFFINE,
)


def trainer_memory(p: Problem, b_t: float, m_t: float) -> float:
    """Memory per GPU, equation 4."""
    return (4 * p.weights + p.activation * b_t) / m_t


def generator_memory(p: Problem, b_g: float, m_g: float) -> float:
    """Memory per GPU, equation 5."""
    return (p.weights + p.kv_cache * b_g) / m_g


def synchronous_s(p: Problem, b_t: float, b_g: float, m: float) -> float:
    """Equation 2."""
    return p.batch / p.gpus * m * (p.eta_t(b_t) + p.eta_g(b_g))


def asynchronous_s(
    p: Problem, b_t: float, b_g: float, m_t: float, m_g: float, theta: float
) -> float:
    """Equation 3."""
    return p.batch / p.gpus * max(p.eta_t(b_t) * m_t / theta, p.eta_g(b_g) * m_g / (1 - theta))


# 8B on H100s, in GiB and seconds, about as large as the paper's runs.
EXAMPLE = Problem(
    gpus=256,
    batch=2048,
    memory=80,
    weights=15,
    activation=2,
    kv_cache=0.3,
    eta_t=AffineEta(0.5, 0.2),
    eta_g=AffineEta(20, 0.1),
)


def test_the_closed_form_is_the_minimum_that_sympy_derives() -> None:
    fixed, per_sample, f, p, b = sympy.symbols("C A f p b", positive=True)
    cost = (fixed + per_sample * b) * (p + f / b)
    (stationary,) = [root for root in sympy.solve(sympy.diff(cost, b), b) if root.is_positive]
    assert sympy.simplify(stationary - sympy.sqrt(fixed * f / (per_sample * p))) == 0
    least = (sympy.sqrt(fixed * p) + sympy.sqrt(per_sample * f)) ** 2
    assert sympy.simplify(cost.subs(b, stationary) - least) == 0
    # one minimum, no other stationary point
    assert sympy.simplify(sympy.diff(cost, b, 2)).is_positive
    solution = best_asynchronous(EXAMPLE)
    values = {fixed: 4 * 15, per_sample: 2, f: sympy.Rational(1, 2), p: sympy.Rational(1, 5)}
    assert solution.b_t == pytest.approx(float(stationary.subs(values)))
    assert solution.m_t * EXAMPLE.memory * EXAMPLE.eta_t(solution.b_t) == pytest.approx(
        float(least.subs(values))
    )


def test_the_optimum_of_problem_7_against_a_grid() -> None:
    """All (b_t, b_g, theta) on a fine grid, with the smallest m that memory allows: no point is
    faster, and some point comes close.
    """
    batches = np.geomspace(0.1, 1e4, 400)
    of_train = (
        (4 * EXAMPLE.weights + EXAMPLE.activation * batches)
        / EXAMPLE.memory
        * np.array([EXAMPLE.eta_t(b) for b in batches])
    )
    of_generate = (
        (EXAMPLE.weights + EXAMPLE.kv_cache * batches)
        / EXAMPLE.memory
        * np.array([EXAMPLE.eta_g(b) for b in batches])
    )
    thetas = np.linspace(0.001, 0.999, 999)
    step = (
        np.maximum(of_train.min() / thetas, of_generate.min() / (1 - thetas)).min()
        * EXAMPLE.batch
        / EXAMPLE.gpus
    )
    best = best_asynchronous(EXAMPLE).step_s
    assert best <= step * (1 + 1e-12)
    assert step == pytest.approx(best, rel=2e-3)


def test_the_optimum_of_problem_6_against_a_grid() -> None:
    batches = np.geomspace(0.1, 1e4, 600)
    b_t = batches[:, None]
    b_g = batches[None, :]
    m = (5 * EXAMPLE.weights + EXAMPLE.activation * b_t + EXAMPLE.kv_cache * b_g) / EXAMPLE.memory
    eta_t = np.array([EXAMPLE.eta_t(b) for b in batches])
    eta_g = np.array([EXAMPLE.eta_g(b) for b in batches])
    step = (m * (eta_t[:, None] + eta_g[None, :])).min() * EXAMPLE.batch / EXAMPLE.gpus
    best = best_synchronous(EXAMPLE).step_s
    assert best <= step * (1 + 1e-12)
    assert step == pytest.approx(best, rel=2e-3)


@settings(max_examples=150, deadline=None)
@given(PROBLEMS)
def test_theorem_7_5_asynchronous_is_strictly_faster(problem: Problem) -> None:
    asynchronous = best_asynchronous(problem)
    synchronous = best_synchronous(problem)
    assert asynchronous.step_s < synchronous.step_s
    a = asynchronous
    s = synchronous
    # Both solutions are admissible and fill the memory (lemmas B.1, B.2), and equations 2 and 3
    # give the same step times.
    assert trainer_memory(problem, a.b_t, a.m_t) == pytest.approx(problem.memory)
    assert generator_memory(problem, a.b_g, a.m_g) == pytest.approx(problem.memory)
    both_memories = trainer_memory(problem, s.b_t, s.m) + generator_memory(problem, s.b_g, s.m)
    assert both_memories == pytest.approx(problem.memory)
    assert asynchronous_s(problem, a.b_t, a.b_g, a.m_t, a.m_g, a.theta) == pytest.approx(a.step_s)
    assert synchronous_s(problem, s.b_t, s.b_g, s.m) == pytest.approx(s.step_s)


@settings(max_examples=40, deadline=None)
@given(PROBLEMS, st.floats(0.1, 10), st.floats(0.1, 10))
def test_theorem_7_5_holds_against_any_synchronous_configuration(
    problem: Problem, b_t: float, b_g: float
) -> None:
    """At any batch sizes, not only at the optimum."""
    m = (5 * problem.weights + problem.activation * b_t + problem.kv_cache * b_g) / problem.memory
    assert best_asynchronous(problem).step_s < synchronous_s(problem, b_t, b_g, m)


@settings(max_examples=100, deadline=None)
@given(PROBLEMS, st.floats(-2, 2), st.floats(-2, 2), st.floats(0.01, 0.99))
def test_nothing_beats_the_closed_form(
    problem: Problem, trainer_log_factor: float, generator_log_factor: float, theta: float
) -> None:
    """Any other batch sizes within a factor e^2 of the best, and any split, with the model
    parallelism that memory needs.
    """
    best = best_asynchronous(problem)
    b_t = best.b_t * math.exp(trainer_log_factor)
    b_g = best.b_g * math.exp(generator_log_factor)
    m_t = (4 * problem.weights + problem.activation * b_t) / problem.memory
    m_g = (problem.weights + problem.kv_cache * b_g) / problem.memory
    assert asynchronous_s(problem, b_t, b_g, m_t, m_g, theta) >= best.step_s * (1 - 1e-9)


BATCHES = tuple(float(2**i) for i in range(6))
MEASURED = st.lists(st.floats(0.05, 2), min_size=6, max_size=6).map(
    lambda seconds: MeasuredEta(BATCHES, tuple(seconds))
)


@settings(max_examples=30, deadline=None)
@given(PROBLEMS, MEASURED, MEASURED)
def test_measured_eta_of_any_shape_has_the_optima_of_a_grid(problem, eta_t, eta_g) -> None:
    """Also values that rise and fall again."""
    problem = replace(problem, eta_t=eta_t, eta_g=eta_g)
    batches = np.append(np.geomspace(1, 32, 200), BATCHES)
    train = (4 * problem.weights + problem.activation * batches) * eta_t(batches)
    generate = (problem.weights + problem.kv_cache * batches) * eta_g(batches)
    per_byte = problem.batch / problem.gpus / problem.memory
    least = per_byte * (train.min() + generate.min())
    assert least * 0.98 < best_asynchronous(problem).step_s <= least * (1 + 1e-4)
    both_memories = 5 * problem.weights + problem.kv_cache * batches[None, :]
    both_memories = both_memories + problem.activation * batches[:, None]
    both_s = eta_t(batches)[:, None] + eta_g(batches)[None, :]
    least = per_byte * (both_memories * both_s).min()
    assert least * 0.98 < best_synchronous(problem).step_s <= least * (1 + 1e-3)


@settings(max_examples=50, deadline=None)
@given(PROBLEMS)
def test_steps_of_equation_11_multiply_to_the_speedup(problem: Problem) -> None:
    memory_factor, batch_factor = speedup_steps(problem)
    assert memory_factor > 1
    assert batch_factor >= 1 - 1e-9
    speedup = best_synchronous(problem).step_s / best_asynchronous(problem).step_s
    assert memory_factor * batch_factor == pytest.approx(speedup)


def test_eta_that_does_not_decrease_is_named_by_its_batches() -> None:
    etas = measured_etas(["t:1=0.9", "t:16=0.45", "t:4=0.4", "g:1=2", "g:8=1"])
    assert etas["t"].increases() == [(4, 16)]
    assert etas["g"].increases() == []


def test_run_gives_eta_at_its_microbatch_and_concurrency(tmp_path: Path) -> None:
    """Two replicas and three engines, 8 samples a step: 4 s of training, 6 s of generation."""
    row = {
        "step": 0,
        "time/step_s": 7,
        "time/trainer_wait_s": 2,
        "time/sync_s": 0.5,
        "time/save_s": 0.5,
    }
    row |= {"time/generator_wait_s": 1, "tokens_per_s": 300, "samples_per_s": 2}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "config.yaml").write_text(
        "model: {path: m}\ntrainer: {dp: 2, max_tokens_per_microbatch: 1024}\n"
        "generator: {engines: 3, max_concurrency: 16}\n"
        "rollout: {prompts_per_step: 4, n: 2}\nplan: {prompt_tokens: 106}\n"
    )
    etas = measured_etas([str(tmp_path), "t:1=9", "g:1=9"])
    assert etas["t"] == MeasuredEta((1, 4), (9, 4 * 2 / 8))
    assert etas["g"] == MeasuredEta((1, 16), (9, 6 * 3 / 8))


@pytest.mark.parametrize("measurement", ["no_such_run", "t:1=0.5", "x:1=2"])
def test_eta_that_cannot_be_used_is_refused(measurement: str) -> None:
    with pytest.raises(ConfigError, match="--eta"):
        measured_etas([measurement])


def test_problem_of_a_run_has_the_numbers_of_the_planner() -> None:
    """8B: 8.03e9 weights of 2 bytes; 2 * 8 heads * 128 keys and values a token in 32 layers;
    decoding of 64 at a time follows the line.
    """
    config = load_config(ROOT / "configs/8b_aipo.yaml")
    spec = load_spec(ROOT / "configs/models/llama-3.1-8b")
    work = Workload.of(config)
    problem = problem_of(config, spec, gpus=8)
    assert (problem.gpus, problem.batch) == (8, work.sequences)
    assert problem.weights == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert problem.kv_cache == work.tokens_per_sequence * 2 * 2 * 8 * 128 * 32
    assert 70 * GIB < problem.memory < 79.1 * GIB
    engines = GenerateModel(spec, config.generator, config.model.dtype, Cluster.of(config))
    step_s = engines.decode_step(64, work.prompt_tokens + work.response_tokens / 2).total
    assert 64 * problem.eta_g(64) == pytest.approx(work.response_tokens * step_s, rel=0.05)
    cut = replace(
        config, trainer=replace(config.trainer, minibatches=config.rollout.prompts_per_step)
    )
    assert problem_of(cut, spec, gpus=8) == problem, "in the paper a step has no mini-batches"
    batches = [1, 2, 4, 8, 64]
    assert [problem.eta_t(b) for b in batches] == sorted(
        (problem.eta_t(b) for b in batches), reverse=True
    )
