"""Win rates and perplexities of held-out responses, beside values by hand."""

from __future__ import annotations

import asyncio
import math
from array import array
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t

from megarl.base.rollout_types import Failure, Group, Prompt, Sample
from megarl.base.teacher_scores import TeacherScores
from megarl.config.errors import RunError
from megarl.config.schema import ModelConfig, RunConfig
from megarl.data.prompts import HeldOutSet
from megarl.data.tokenizer import load_tokenizer
from megarl.evaluation.measures import (
    Measures,
    WinRate,
    initial_logprobs,
    last_turn,
    perplexity_scores,
    win_rate_scores,
)
from megarl.evaluation.scores import interval, ratio_interval
from megarl.generator.completions import Sampling
from megarl.rewards.score import RewardPart, Score, ScoreRequest
from megarl.rollouts.rollout import Scoring

MODEL = Path(__file__).parents[2] / "configs/models/tiny-llama"
FAILED = Failure("timeout", "too slow")
CONFIG = RunConfig()


def sample(text: str, **fields) -> Sample:
    return Sample([5, 6], [0.0, 0.0], [0, 0], text, 0.0, "stop", **fields)


def test_win_rate_is_the_mean_over_prompts_of_decided_samples() -> None:
    result = win_rate_scores([[1.0, 0.5], [0.0, FAILED], [FAILED, FAILED]], CONFIG)
    low, high = interval([0.75, 0.0], 2)
    assert result == {
        "win_rate": 0.375,
        "ci95/win_rate/low": low,
        "ci95/win_rate/high": high,
        "win_rate/failed": 3,
    }


def test_many_failed_comparisons_end_the_evaluation() -> None:
    with pytest.raises(RunError, match="eval.win_rate=None: 2 of 3 responses failed, more than"):
        win_rate_scores([[1.0], [FAILED], [FAILED]], CONFIG)
    with pytest.raises(RunError, match="roles.initial: 1 of 1 responses failed"):
        perplexity_scores([[FAILED]], CONFIG)


def test_response_wins_by_a_higher_score_and_half_by_an_equal_one() -> None:
    requests: list[ScoreRequest] = []

    async def length(request: ScoreRequest) -> Score:
        requests.append(request)
        failures = [FAILED] if request.response == "1" * 9 else []
        return Score(float(len(request.response)), failures=failures)

    prompts = [Prompt(number, [4], f"{number}=", "") for number in range(3)]
    held_out = HeldOutSet("", prompts, 2, Sampling(8), ["22", "333", "1" * 9])
    groups = [Group(prompt, [sample("1"), sample("55")]) for prompt in prompts]
    win_rate = WinRate(Scoring(length), load_tokenizer(ModelConfig(path=str(MODEL))))
    assert asyncio.run(win_rate.of(held_out, groups)) == [
        [0.0, 0.5],
        [0.0, 0.0],
        [FAILED, FAILED],
    ]
    tokenizer = load_tokenizer(ModelConfig(path=str(MODEL)))
    assert requests[0].token_ids == tokenizer.encode_response(requests[0].response)
    requests.clear()
    asyncio.run(win_rate.of(held_out, groups))
    references = [request.response for request in requests if request.response not in ("1", "55")]
    assert references == ["1" * 9], "scores of references are kept, but for failed ones"


def test_judge_compares_with_the_reference_in_both_orders() -> None:
    class Judge:
        async def play(self, prompt: str, answer: str, responses: list[str]):
            assert responses[1] == "reference"
            return {(0, 1): 1.0, (1, 0): {"good": 0.0, "tie": 1.0}[responses[0]]}

    async def unscored(request: ScoreRequest) -> Score:
        raise AssertionError

    scoring = Scoring(unscored, [(RewardPart("roles.judge", 0.0), Judge())])  # type: ignore[list-item]
    win_rate = WinRate(scoring, None)  # type: ignore[arg-type]
    prompt = Prompt(0, [4], "", "")
    held_out = HeldOutSet("", [prompt], 2, Sampling(8), ["reference"])
    groups = [Group(prompt, [sample("good"), sample("tie")])]
    assert asyncio.run(win_rate.of(held_out, groups)) == [[1.0, 0.5]]


def test_perplexity_is_of_all_tokens_together() -> None:
    logprobs = [[np.array([-1.0, -2.0, -3.0])], [np.array([-0.5]), FAILED]]
    result = perplexity_scores(logprobs, CONFIG)
    assert result["perplexity"] == pytest.approx(math.exp(6.5 / 4))
    assert result["perplexity/failed"] == 1
    low, high = ratio_interval([6.0, 0.5], [3, 1])
    assert result["ci95/perplexity/low"] == pytest.approx(math.exp(low))
    assert result["ci95/perplexity/high"] == pytest.approx(math.exp(high))


def test_empty_response_has_no_perplexity_and_no_failure() -> None:
    """An engine has no log-probs for it."""
    empty = Sample([], [], [], "", 0.0, "unanswered")
    nothing = asyncio.run(initial_logprobs(None, Prompt(0, [4], "", ""), empty))  # type: ignore[arg-type]
    assert isinstance(nothing, np.ndarray)
    result = perplexity_scores([[np.array([-1.0, -2.0]), nothing], [nothing]], CONFIG)
    assert result["perplexity"] == pytest.approx(math.exp(1.5))
    assert result["perplexity/failed"] == 0
    assert perplexity_scores([[nothing]], CONFIG) == {"perplexity/failed": 0}


def test_ratio_of_equal_counts_has_the_interval_of_a_mean() -> None:
    values = [21.0, 22.0, 24.0, 29.0, 23.0]
    low, high = ratio_interval([3 * value for value in values], [3] * 5)
    half = t.ppf(0.975, 4) * np.std(values, ddof=1) / math.sqrt(5)
    assert (low, high) == pytest.approx((np.mean(values) - half, np.mean(values) + half), rel=5e-3)
    assert ratio_interval([6.0], [3]) == (2.0, 2.0)


def test_tokens_of_the_environment_do_not_count() -> None:
    class Initial:
        async def judge(self, prompt: Prompt, sample: Sample) -> TeacherScores:
            return TeacherScores(np.zeros((3, 0), np.int32), np.array([[-1.0], [-5.0], [-2.0]]))

    response = Sample(
        [5, 6, 7], [0.0] * 3, [0] * 3, "abc", 0.0, "stop",
        policy_mask=array("b", [1, 0, 1]), environment_spans=[(1, 2)],
    )  # fmt: skip
    prompt = Prompt(0, [4], "", "")
    logprobs = asyncio.run(initial_logprobs(Initial(), prompt, response))  # type: ignore[arg-type]
    assert isinstance(logprobs, np.ndarray) and logprobs.tolist() == [-1.0, -2.0]
    assert last_turn(response) == "c" and last_turn(sample("ab")) == "ab"
    measures = Measures(CONFIG, initial=Initial())  # type: ignore[arg-type]
    held_out = HeldOutSet("", [prompt], 1, Sampling(8))
    result = asyncio.run(measures.of(held_out, [Group(prompt, [response])]))
    assert result["perplexity"] == pytest.approx(math.exp(1.5)) and "win_rate" not in result
