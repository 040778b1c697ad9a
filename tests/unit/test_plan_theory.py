"""Section 7 of the LlamaRL paper: the closed form against brute force and against sympy, and the theorem on random problems."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.planner.theory import (
    AffineEta,
    Problem,
    asynchronous_s,
    best_asynchronous,
    best_synchronous,
    generator_memory,
    synchronous_s,
    trainer_memory,
)

SIZE = st.floats(1e-3, 1e3)
AFFINE = st.builds(AffineEta, fixed_s=SIZE, per_sample_s=SIZE)


class Power:
    """Falls with the batch, and is not of the form that the closed form is of."""

    def __init__(self, scale: float, power: float, floor: float):
        self.scale, self.power, self.floor = scale, power, floor

    def __call__(self, batch: float) -> float:
        return self.floor + self.scale * batch**-self.power


POWER = st.builds(Power, scale=st.floats(0.1, 10), power=st.floats(0.2, 2), floor=st.floats(0.01, 1))


def problems(eta: st.SearchStrategy) -> st.SearchStrategy[Problem]:
    return st.builds(
        Problem, gpus=st.floats(1, 1e5), batch=st.floats(1, 1e5), memory=SIZE, weights=SIZE, activation=SIZE, kv_cache=SIZE,
        eta_t=eta, eta_g=eta,
    )  # fmt: skip


# 8B on H100s, in GiB and seconds: of the size of the paper's runs.
EXAMPLE = Problem(
    gpus=256, batch=2048, memory=80, weights=15, activation=2, kv_cache=0.3, eta_t=AffineEta(0.5, 0.2), eta_g=AffineEta(20, 0.1)
)


def test_the_closed_form_is_the_minimum_that_sympy_derives() -> None:
    fixed, per_sample, f, p, b = sympy.symbols("C A f p b", positive=True)
    cost = (fixed + per_sample * b) * (p + f / b)
    (stationary,) = [root for root in sympy.solve(sympy.diff(cost, b), b) if root.is_positive]
    assert sympy.simplify(stationary - sympy.sqrt(fixed * f / (per_sample * p))) == 0
    least = (sympy.sqrt(fixed * p) + sympy.sqrt(per_sample * f)) ** 2
    assert sympy.simplify(cost.subs(b, stationary) - least) == 0
    assert sympy.simplify(sympy.diff(cost, b, 2)).is_positive  # one minimum, no other stationary point
    found = best_asynchronous(EXAMPLE)
    values = {fixed: 4 * 15, per_sample: 2, f: sympy.Rational(1, 2), p: sympy.Rational(1, 5)}
    assert found.b_t == pytest.approx(float(stationary.subs(values)))
    assert found.m_t * EXAMPLE.memory * EXAMPLE.eta_t(found.b_t) == pytest.approx(float(least.subs(values)))


def test_the_optimum_of_problem_7_against_a_grid() -> None:
    """All of (b_t, b_g, theta) on a fine grid, with the least m that memory allows: nothing is faster, something comes near."""
    batches = np.geomspace(0.1, 1e4, 400)
    of_train = (4 * EXAMPLE.weights + EXAMPLE.activation * batches) / EXAMPLE.memory * np.array([EXAMPLE.eta_t(b) for b in batches])
    of_generate = (EXAMPLE.weights + EXAMPLE.kv_cache * batches) / EXAMPLE.memory * np.array([EXAMPLE.eta_g(b) for b in batches])
    thetas = np.linspace(0.001, 0.999, 999)
    step = np.maximum(of_train.min() / thetas, of_generate.min() / (1 - thetas)).min() * EXAMPLE.batch / EXAMPLE.gpus
    best = best_asynchronous(EXAMPLE).step_s
    assert best <= step * (1 + 1e-12) and step == pytest.approx(best, rel=2e-3)


def test_the_optimum_of_problem_6_against_a_grid() -> None:
    batches = np.geomspace(0.1, 1e4, 600)
    b_t, b_g = batches[:, None], batches[None, :]
    m = (5 * EXAMPLE.weights + EXAMPLE.activation * b_t + EXAMPLE.kv_cache * b_g) / EXAMPLE.memory
    eta_t, eta_g = (np.array([eta(b) for b in batches]) for eta in (EXAMPLE.eta_t, EXAMPLE.eta_g))
    step = (m * (eta_t[:, None] + eta_g[None, :])).min() * EXAMPLE.batch / EXAMPLE.gpus
    best = best_synchronous(EXAMPLE).step_s
    assert best <= step * (1 + 1e-12) and step == pytest.approx(best, rel=2e-3)


@settings(max_examples=150, deadline=None)
@given(problems(AFFINE))
def test_theorem_7_5_asynchronous_is_strictly_faster(problem: Problem) -> None:
    asynchronous, synchronous = best_asynchronous(problem), best_synchronous(problem)
    assert asynchronous.step_s < synchronous.step_s
    a, s = asynchronous, synchronous
    # Both are admissible, memory is full (lemmas B.1, B.2), and equations 2 and 3 give the same step times.
    assert trainer_memory(problem, a.b_t, a.m_t) == pytest.approx(problem.memory)
    assert generator_memory(problem, a.b_g, a.m_g) == pytest.approx(problem.memory)
    both = trainer_memory(problem, s.b_t, s.m) + generator_memory(problem, s.b_g, s.m)
    assert both == pytest.approx(problem.memory)
    assert asynchronous_s(problem, a.b_t, a.b_g, a.m_t, a.m_g, a.theta) == pytest.approx(a.step_s)
    assert synchronous_s(problem, s.b_t, s.b_g, s.m) == pytest.approx(s.step_s)


@settings(max_examples=40, deadline=None)
@given(problems(POWER), st.floats(0.1, 10), st.floats(0.1, 10))
def test_theorem_7_5_holds_for_any_falling_eta(problem: Problem, b_t: float, b_g: float) -> None:
    """Remark 7.1. Against the best synchronous configuration at any batches, not only at its optimum."""
    m = (5 * problem.weights + problem.activation * b_t + problem.kv_cache * b_g) / problem.memory
    found = best_asynchronous(problem)
    assert found.step_s < synchronous_s(problem, b_t, b_g, m)
    assert found.step_s < best_synchronous(problem, rounds=20).step_s


@settings(max_examples=100, deadline=None)
@given(problems(AFFINE), st.floats(-2, 2), st.floats(-2, 2), st.floats(0.01, 0.99))
def test_nothing_beats_the_closed_form(problem: Problem, left: float, right: float, theta: float) -> None:
    """Any other batches within e^2 of the best, and any split, with as much model parallelism as memory asks for."""
    best = best_asynchronous(problem)
    b_t, b_g = best.b_t * math.exp(left), best.b_g * math.exp(right)
    m_t = (4 * problem.weights + problem.activation * b_t) / problem.memory
    m_g = (problem.weights + problem.kv_cache * b_g) / problem.memory
    assert asynchronous_s(problem, b_t, b_g, m_t, m_g, theta) >= best.step_s * (1 - 1e-9)


def test_the_search_of_the_batch_finds_what_the_closed_form_says() -> None:
    """The same eta, once as a form that is known and once as a function."""
    opaque = Problem(**(vars(EXAMPLE) | {"eta_t": lambda b: EXAMPLE.eta_t(b), "eta_g": lambda b: EXAMPLE.eta_g(b)}))
    known, searched = best_asynchronous(EXAMPLE), best_asynchronous(opaque)
    assert searched.step_s == pytest.approx(known.step_s, rel=1e-9) and searched.b_g == pytest.approx(known.b_g, rel=1e-3)
