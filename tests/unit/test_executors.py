"""Parts of the executors that need neither engines nor trainers."""

from __future__ import annotations

import asyncio
from itertools import combinations
from pathlib import Path

import pytest
from msgspec.structs import replace

from megarl.base.rollout_types import Group, Prompt, Sample
from megarl.config.schema import RunConfig
from megarl.data.prompts import HeldOutSet
from megarl.evaluation.evaluate import answer_all, pass_at, scores
from megarl.generator.completions import Sampling
from megarl.plan.checkpoints import checkpoint_path, complete_checkpoints, prune_checkpoints
from megarl.rollouts.rollout import Rollout


def sample(reward: float, tokens: int = 1) -> Sample:
    return Sample(
        [1] * tokens, [0.0] * tokens, [0] * tokens, "", reward, "stop" if tokens < 3 else "length"
    )


class FakeTokenizer:
    eos_ids = (7,)


def evaluated(rollout: Rollout, held_out: HeldOutSet) -> dict[str, float]:
    return asyncio.run(
        answer_all(rollout, held_out, FakeTokenizer(), at_once=8, config=RunConfig())
    )


def test_evaluation_is_limited_to_the_places_of_engines():
    running = 0
    most = 0
    samplings = []

    async def rollout(prompt: Prompt, sampling: Sampling, n: int) -> Group:
        nonlocal running, most
        running += n
        most = max(most, running)
        samplings.append(sampling)
        await asyncio.sleep(0)
        running -= n
        return Group(prompt, [sample(float((prompt.ordinal + i) % 2)) for i in range(n)])

    prompts = [Prompt(ordinal, [1], "", "") for ordinal in range(10)]
    greedy = HeldOutSet("", prompts, 1, Sampling(5, 0.0))
    several = HeldOutSet("hard", prompts[:3], 4, Sampling(9, 0.8, top_p=0.9, stop=("\n",)))
    result = evaluated(rollout, greedy)
    assert (most, result["correct"], result["prompts"], result["pass@1"]) == (8, 5, 10, 0.5)
    hard = evaluated(rollout, several)
    assert hard["pass@1"] == hard["avg@4"] == 0.5
    assert (hard["pass@2"], hard["pass@4"]) == (5 / 6, 1.0)
    assert hard["samples"] == 12
    seedless = [replace(sampling, seed=None) for sampling in (samplings[0], samplings[-1])]
    assert seedless == [
        Sampling(5, 0.0, stop_token_ids=(7,)),
        Sampling(9, 0.8, 0.9, stop_token_ids=(7,), stop=("\n",)),
    ]
    assert samplings[0].seed != samplings[-1].seed, "sets have seeds of their own"
    assert hard["sampling"] == {
        "samples": 4,
        "max_tokens": 9,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "stop": ["\n"],
    }
    most = 0
    evaluated(rollout, HeldOutSet("", prompts, 64, Sampling(1, 1.0)))
    assert most == 64, "one prompt at a time where its samples alone fill the engines"


def test_pass_at_k_is_the_mean_over_all_draws_of_k_samples():
    for n, correct in ((1, 0), (1, 1), (5, 2), (6, 6), (7, 0), (8, 3)):
        right = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            draws = list(combinations(right, k))
            assert pass_at(k, n, correct) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_scores_count_lengths_and_rewards_of_every_sample():
    groups = [Group(Prompt(0, [1], "", ""), [sample(1.0), sample(0.5, 3), sample(2.0)])]
    measures = scores(groups)
    assert (measures["pass@3"], measures["correct"]) == (1.0, 2)
    assert measures["pass@1"] == pytest.approx(2 / 3)
    assert measures["reward/mean"] == pytest.approx(3.5 / 3)
    assert measures["response_tokens/mean"] == pytest.approx(5 / 3)
    assert measures["truncated_fraction"] == pytest.approx(1 / 3)


def test_undeletable_old_checkpoint_ends_no_run(tmp_path: Path, capsys):
    for step in (1, 2, 3):
        checkpoint_path(tmp_path, step).mkdir(parents=True)
    remnant = checkpoint_path(tmp_path, 1).with_suffix(".removing")
    (remnant / ".nfs0001").mkdir(parents=True)  # left by an earlier attempt
    prune_checkpoints(tmp_path, keep=1)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [1, 3]
    assert "step_000001 could not be removed" in capsys.readouterr().out
