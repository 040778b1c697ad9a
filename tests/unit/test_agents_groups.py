"""Episodes with several branches, in groups: an episode has one reward, one advantage and one place
in the baseline, however many sequences.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from batches import batch_of
from msgspec.structs import replace
from resolving import config

from megarl.algorithms.batches import batch_metrics, batch_rewards, minibatches, to_train_sequences
from megarl.algorithms.registry import make_algorithm
from megarl.base.rollout_types import Group, Prompt, Sample, TrainSequence, episodes
from megarl.config.errors import RunError
from megarl.config.schema import (
    AlgorithmConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from megarl.evaluation.evaluate import scores
from megarl.executors.batch_steps import BatchSteps
from megarl.plan.checks import check_program
from megarl.rewards.credit import has_signal
from megarl.rollouts.environments.base import sample_problems


def branches(reward: float, *lengths: int) -> list[Sample]:
    """The samples of an episode, with the given numbers of tokens."""
    return [
        Sample([3] * tokens, [-0.1] * tokens, [0] * tokens, "", reward, "stop", branch=branch)
        for branch, tokens in enumerate(lengths)
    ]


def group(ordinal: int, *episodes: list[Sample]) -> Group:
    return Group(Prompt(ordinal, [1], "", ""), [*itertools.chain(*episodes)])


TWO = [
    group(0, branches(1.0, 2, 3), branches(0.0, 4)),
    group(1, branches(0.0, 1), branches(0.5, 2, 2, 2)),
]


def test_branches_share_the_advantage_of_their_episode() -> None:
    batch = batch_of(TWO)
    assert [len(samples) for samples in episodes(batch.samples)] == [2, 1, 1, 3]
    rewards = batch_rewards(batch)
    assert rewards.tolist() == [[1.0, 0.0], [0.0, 0.5]]
    advantages = make_algorithm(AlgorithmConfig(name="aipo")).advantages(rewards)
    last_advantages = [
        sequence.advantages[-1]
        for sequence in to_train_sequences(batch, advantages, True).values()
        if isinstance(sequence, TrainSequence)
    ]
    assert last_advantages == [0.5, 0.5, -0.5, -0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    ("loss_mean", "divisors"), [("token", [9.0, 7.0]), ("sequence_sum", [2.0, 2.0])]
)
def test_minibatches_have_whole_groups(loss_mean: str, divisors: list[float]) -> None:
    """They divide the loss by tokens or by episodes."""
    batch = batch_of(TWO)
    algorithm = make_algorithm(AlgorithmConfig(name="aipo", loss_mean=loss_mean))
    two = minibatches(batch, range(7), algorithm, TrainerConfig(minibatches=2), seed=0)
    assert sorted((minibatch.places, minibatch.denominator) for minibatch in two) == [
        ([0, 1, 2], divisors[0]),
        ([3, 4, 5, 6], divisors[1]),
    ]


def test_metrics_and_evaluations_count_an_episode_once() -> None:
    assert batch_metrics(batch_of(TWO), 0)["reward/mean"] == 1.5 / 4
    evaluated = scores(TWO)
    assert evaluated["samples"] == 4
    assert (evaluated["pass@1"], evaluated["pass@2"]) == (0.25, 0.5)
    assert evaluated["reward/mean"] == 1.5 / 4


def test_worst_branch_decides_the_penalty() -> None:
    settings = RunConfig(
        rollout=RolloutConfig(max_tokens=8), reward=RewardConfig(overlong_tokens=4)
    )
    batch = batch_of([group(0, branches(1.0, 2, 8), branches(1.0, 3))])
    assert batch_rewards(batch, settings).tolist() == [[0.0, 1.0]]
    assert has_signal(batch.samples, settings) and not has_signal(batch.samples, RunConfig())


@pytest.mark.parametrize("name", ["ppo", "online_dpo", "ipo", "copg"])
def test_algorithm_for_single_sequences_refuses_branches(name: str) -> None:
    settings = RunConfig(algorithm=AlgorithmConfig(name=name))
    steps = BatchSteps(SimpleNamespace(), make_algorithm(AlgorithmConfig(name="aipo")), settings)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=f"algorithm.name={name}: needs episodes of one sequence"):
        steps.rewards(batch_of(TWO))
    one_branch_each = batch_of([group(0, branches(1.0, 2), branches(0.0, 2))])
    assert steps.rewards(one_branch_each).tolist() == [[1.0, 0.0]]


def test_samples_are_checked_by_episodes() -> None:
    good = [*branches(1.0, 2, 2), *branches(0.0, 2)]
    assert sample_problems(good, 2, 8, 10) == []
    assert sample_problems(good, 3, 8, 10) == ["it must return 3 samples, not 2"]
    assert sample_problems([replace(good[0], branch=1), *good[1:]], 1, 8, 10) == [
        "the first sample has branch=1, but no sample of the same episode comes before it"
    ]
    assert sample_problems([good[0], replace(good[1], reward=0.5), good[2]], 2, 8, 10) == [
        "the branches of an episode must have the same reward"
    ]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["algorithm.name=ppo"], "algorithm.name=ppo: needs episodes of one sequence"),
        (
            ["algorithm.name=aipo", "algorithm.kl_coef=0.1", "algorithm.kl=reward"],
            "algorithm.kl=reward: needs episodes of one sequence",
        ),
        (
            ["timeouts.samples_s=1000"],
            "rollout.args.deadline_s=600: 3 attempts (rollout.args.retries) must take less than "
            "timeouts.samples_s=1000",
        ),
        (
            ["rollout.args.deadline_s=2000", "rollout.args.retries=1"],
            "rollout.args.deadline_s=2000: 2 attempts",
        ),
        (
            ["roles.judge.path=x", "roles.judge.mode=pairwise", "reward.name=roles.judge"],
            "compares responses",
        ),
    ],
)
def test_settings_impossible_for_programs_are_refused(
    tmp_path: Path, overrides: list[str], problem: str
) -> None:
    assert not list(check_program(config(tmp_path, *overrides))), "without a program"
    [message] = check_program(config(tmp_path, "rollout.name=program", *overrides))
    assert problem in message
