"""Confidence intervals against SciPy's and against simulation; majority votes against all draws."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from statistics import fmean

import numpy as np
import pytest
from scipy.stats import binomtest, t

from megarl.base.rollout_types import Group, Prompt, Sample
from megarl.evaluation.evaluate import scores
from megarl.evaluation.scores import _t95, interval
from megarl.rewards.verify import majority, majority_at, vote


@pytest.mark.parametrize(("right", "prompts"), [(0, 30), (30, 30), (1, 7), (37, 100), (499, 500)])
def test_interval_of_single_samples_is_wilsons(right: int, prompts: int) -> None:
    wilson = binomtest(right, prompts).proportion_ci(0.95, "wilson")
    assert interval([1.0] * right + [0.0] * (prompts - right), 1) == pytest.approx(
        (wilson.low, wilson.high), abs=1e-12
    )


@pytest.mark.parametrize(
    ("prompts", "samples", "a", "b"),
    [
        (5, 64, 0.5, 0.5),
        (5, 64, 2, 6),
        (10, 16, 2, 6),
        (30, 8, 0.4, 0.8),
        (30, 16, 2, 6),
        (60, 8, 50, 50),
        (200, 4, 0.2, 0.2),
        (500, 1, 3, 1),
    ],
)
def test_interval_covers_the_mean_of_all_possible_prompts(
    prompts: int, samples: int, a: float, b: float
) -> None:
    """The prompts' chances of a right answer have a beta distribution, from equal for all to nearly
    always 0 or 1.
    """
    rng = np.random.default_rng(5)
    times = 2000
    drawn = rng.binomial(samples, rng.beta(a, b, (times, prompts))) / samples
    inside = 0
    for row in drawn:
        low, high = interval([float(share) for share in row], samples)
        inside += low <= a / (a + b) <= high
    assert 0.935 <= inside / times <= 0.97


@pytest.mark.parametrize(
    "shares", [[1.0] * 16, [1.0] * 500, [0.0] * 7, [0.3, 0.7], [0.25] * 3, [0.5]]
)
def test_mean_is_inside_its_interval(shares: list[float]) -> None:
    low, high = interval(shares, 4)
    assert 0 <= low <= fmean(shares) <= high <= 1 and high - low > 0


@pytest.mark.parametrize("freedom", [*range(1, 12), 29, 499])
def test_quantile_of_student_is_that_of_scipy(freedom: int) -> None:
    assert _t95(freedom) == pytest.approx(t.ppf(0.975, freedom), rel=5e-3)


def test_interval_of_equal_prompts_is_that_of_all_samples() -> None:
    low, high = interval([1.0] * 30, 8)
    assert (low, high) == pytest.approx((binomtest(30, 30).proportion_ci(0.95, "wilson").low, 1.0))
    wilson = binomtest(120, 240).proportion_ci(0.95, "wilson")
    assert interval([0.5] * 30, 8) == pytest.approx((wilson.low, wilson.high))


VOTES = {
    ("7", "7", True): 0.0,
    ("7", True, True): 1.0,
    ("7", True): 0.5,
    ("7", "8", True): 1 / 3,
    (None, None, True): 1.0,
    (None, None): 0.0,
    ("7", "7", True, True, "8"): 0.5,
}


@pytest.mark.parametrize("votes", VOTES)
def test_tied_majority_shares_the_score(votes: Sequence[object]) -> None:
    assert majority(votes) == pytest.approx(VOTES[votes])


def test_maj_at_k_is_without_bias() -> None:
    votes = [True, "7", "7", True, "8", None]
    for k in (1, 2, 3, 4, 6):
        expected = fmean(majority(order[:k]) for order in permutations(votes))
        estimate = fmean(majority_at(k, order) for order in permutations(votes))
        assert estimate == pytest.approx(expected)


def test_equal_answers_are_one_vote() -> None:
    assert (
        vote("math", "\\boxed{0.50}", False)
        == vote("math", "so it is 1/2, that is \\boxed{\\frac12} or \\boxed{.5}", False)
        == "1/2"
    )
    assert vote("math", "\\boxed{x + 1}", False) == vote("math", "the answer is x+1.", False)
    assert vote("choice", "the answer is (C)", False) == "C"
    assert vote("choice", "I do not know", False) is None
    assert vote("math", "\\boxed{1}", True) is True
    assert vote("math", "", False) is None


def test_scores_have_majorities_and_intervals() -> None:
    def sample(text: str, reward: float) -> Sample:
        return Sample([1], [0.0], [0], text, reward, "stop")

    right = sample("\\boxed{3}", 1.0)
    seven = sample("\\boxed{7}", 0.0)
    eight = sample("\\boxed{8}", 0.0)
    groups = [
        Group(Prompt(0, [1], "", ""), [right, seven, right, eight]),
        Group(Prompt(1, [1], "", ""), [seven, seven, right, eight]),
    ]
    measures = scores(groups, grader="math")
    assert measures["avg@4"] == measures["pass@1"] == 0.375
    assert (measures["pass@4"], measures["maj@4"]) == (1.0, 0.5)
    low = measures["ci95/avg@4/low"]
    high = measures["ci95/avg@4/high"]
    assert (low, high) == interval([0.5, 0.25], 4) and low < 0.375 < high
    assert not any("maj" in key for key in scores(groups))
    assert "pass@1" not in scores(groups, graded=True)
