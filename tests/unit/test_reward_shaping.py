"""Penalties for length: their values, their effects, and refused settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import batch_of

from megarl.algorithms.batches import batch_metrics, batch_rewards
from megarl.algorithms.registry import make_algorithm
from megarl.base.rollout_types import Group, Prompt, Sample
from megarl.config.schema import RewardConfig, RolloutConfig, RunConfig
from megarl.executors.batch_steps import BatchSteps
from megarl.plan.checks import check_shaping
from megarl.rewards.credit import has_signal
from megarl.rewards.score import trained_score

LONGEST = 100


def config(**reward: Any) -> RunConfig:
    return RunConfig(rollout=RolloutConfig(max_tokens=LONGEST), reward=RewardConfig(**reward))


def sample(tokens: int, reward: float = 1.0, finish: str = "stop") -> Sample:
    return Sample([3] * tokens, [-0.1] * tokens, [0] * tokens, "", reward, finish)


def dapo(length: int, longest: int, cache: int) -> float:
    """Equation 13 of the paper, written out."""
    if length <= longest - cache:
        return 0.0
    return ((longest - cache) - length) / cache if length <= longest else -1.0


@pytest.mark.parametrize("tokens", [1, 79, 80, 81, 90, 99, 100])
def test_overlong_penalty_is_that_of_dapo(tokens: int) -> None:
    for score in (0.0, 1.0):
        lost = score - trained_score(score, tokens, "stop", config(overlong_tokens=20))
        assert lost == pytest.approx(-dapo(tokens, LONGEST, 20))
        lost = score - trained_score(
            score, tokens, "stop", config(overlong_tokens=20, overlong_penalty=3.0)
        )
        assert lost == pytest.approx(-3 * dapo(tokens, LONGEST, 20))


def test_truncated_response_has_a_further_penalty() -> None:
    both_penalties = config(unfinished_penalty=0.5, overlong_tokens=LONGEST)
    assert trained_score(1.0, LONGEST, "length", both_penalties) == -0.5
    assert trained_score(1.0, LONGEST, "stop", both_penalties) == 0.0
    assert trained_score(1.0, LONGEST, "length", config()) == 1.0


@pytest.mark.parametrize("score", [-3.0, 0.0, 2.0])
def test_a_cut_response_may_have_a_fixed_score(score: float) -> None:
    fixed = config(unfinished_score=-1.0)
    assert trained_score(score, LONGEST, "length", fixed) == -1
    assert trained_score(score, LONGEST, "stop", fixed) == score
    both_settings = config(unfinished_score=-1.0, unfinished_penalty=0.5)
    assert [*check_shaping(both_settings)] == [
        "reward.unfinished_score=-1: must be null with reward.unfinished_penalty=0.5"
    ]


@pytest.mark.parametrize("fixed", [-0.1, -1.0, 0.7])
@pytest.mark.parametrize("name", ["online_dpo", "grpo", "best_of_n"])
def test_cut_responses_with_a_fixed_score_are_exactly_equal(fixed: float, name: str) -> None:
    """Neither their own scores nor rounding count.

    So there is no pair and no signal, and the first one is the best.
    """
    settings = config(unfinished_score=fixed)
    settings.algorithm.name = name
    samples = [sample(LONGEST, score, "length") for score in (0.3, 0.1 * 3, -2.3, 5.1, 1 / 3)]
    batch = batch_of([Group(Prompt(ordinal=0, token_ids=[1], text="", answer=""), samples)])
    assert batch_rewards(batch, settings).tolist() == [[fixed] * 5]
    steps = BatchSteps(SimpleNamespace(), make_algorithm(settings.algorithm), settings)  # type: ignore[arg-type]
    advantages = steps.algorithm.advantages(steps.rewards(batch)).tolist()
    assert advantages == ([[5, 0, 0, 0, 0]] if name == "best_of_n" else [[0] * 5])
    assert not has_signal([cut_sample.summary() for cut_sample in samples], settings)
    assert batch_metrics(batch, 0, steps.rewards(batch))["zero_advantage_fraction"] == 1


def test_penalties_count_in_training_and_not_in_the_report() -> None:
    """With the penalties, equal scores differ, so the group is trained on."""
    samples = [sample(10), sample(LONGEST, finish="length")]
    batch = batch_of([Group(Prompt(ordinal=0, token_ids=[1], text="", answer=""), samples)])
    plain = config()
    shaping = config(unfinished_penalty=0.5)
    outcomes = {}
    for name, settings in (("plain", plain), ("shaped", shaping)):
        steps = BatchSteps(SimpleNamespace(), make_algorithm(settings.algorithm), settings)  # type: ignore[arg-type]
        outcomes[name] = (
            steps.algorithm.advantages(steps.rewards(batch)).tolist(),
            batch_metrics(batch, 0, steps.rewards(batch) if name == "shaped" else None),
        )
    assert outcomes["plain"][0] == [[0.0, 0.0]]
    assert outcomes["shaped"][0] == [[0.25, -0.25]]
    assert outcomes["plain"][1]["zero_advantage_fraction"] == 1
    assert "reward/penalty/mean" not in outcomes["plain"][1]
    assert outcomes["shaped"][1]["zero_advantage_fraction"] == 0
    assert outcomes["shaped"][1]["reward/penalty/mean"] == 0.25
    assert outcomes["shaped"][1]["reward/mean"] == outcomes["plain"][1]["reward/mean"] == 1.0
    torch.testing.assert_close(
        batch_rewards(batch, shaping), torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    )


def test_overlong_tokens_are_at_most_a_whole_response() -> None:
    assert [*check_shaping(config(overlong_tokens=101))] == [
        "reward.overlong_tokens=101: must be at most rollout.max_tokens=100"
    ]
    assert not [*check_shaping(config(overlong_tokens=100))]
