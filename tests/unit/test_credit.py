"""Credit by turn: rewards at turns, the turns that are compared, and the advantages of tokens, by
hand-computed cases.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.batches import to_train_sequences, turn_advantages
from megarl.algorithms.registry import make_algorithm
from megarl.base.rollout_types import (
    Batch,
    GroupSummary,
    Sample,
    SampleNumbers,
    TurnReward,
)
from megarl.config.schema import (
    MixedConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SourceAlgorithmConfig,
    SourceRewardConfig,
)
from megarl.rewards.credit import fraction_without_signal, has_signal, ignores_turns, turn_metrics
from megarl.rewards.score import RewardPart, Score, weighted_sum
from megarl.rollouts.environments.base import sample_problems

PROMPT = np.array([7, 8], np.int32)


def config(credit: str, **settings: Any) -> RunConfig:
    run = RunConfig()
    run.algorithm.credit = credit
    for key, value in settings.items():
        setattr(run.algorithm, key, value)
    return run


def sample(rewards: list[float], mask: str = "", **fields: Any) -> Sample:
    """Turns of two tokens, each followed by one of the environment, unless `mask` has other tokens:
    1 for the policy's, 0 for the environment's.
    """
    mask = mask or "0".join(["11"] * len(rewards))
    ends = [index + 1 for index in range(len(mask)) if mask[index : index + 2] in ("10", "1")]
    fields = {"reward": sum(rewards), "finish_reason": "stop", "text": "", **fields}
    return Sample(
        token_ids=array("i", range(len(mask))),
        logprobs=array("f", [-1.0] * len(mask)),
        versions=array("i", [0] * len(mask)),
        policy_mask=array("b", [value == "1" for value in mask]),
        turn_rewards=[TurnReward(*turn) for turn in zip(ends, rewards)] if rewards else [],
        **fields,
    )


def batch_of(*groups: list[Sample]) -> Batch:
    numbers = {}
    for place, response in enumerate(response for group in groups for response in group):
        numbers[place] = SampleNumbers(
            PROMPT,
            np.array(response.token_ids, np.int32),
            np.array(response.logprobs, np.float32),
            np.array(response.policy_mask, bool),
            b"",
            None,
        )
    summaries = []
    for ordinal, group in enumerate(groups):
        summaries.append(GroupSummary(ordinal, 2, [response.summary() for response in group]))
    return Batch(step=0, groups=summaries, generate_s=0.0, generator_wait_s=0.0, numbers=numbers)


def advantages_of(batch: Batch, run: RunConfig) -> list[list[float]]:
    return turn_advantages(batch.groups, make_algorithm(run.algorithm), run)


# two prompts; the responses have two, one and three turns, and two and two
FIRST = [sample([1.0, 2.0]), sample([5.0]), sample([0.0, 0.0, 4.0])]
SECOND = [sample([1.0, 0.0]), sample([1.0, 3.0])]


def test_returns_are_compared_with_the_same_turn() -> None:
    """Returns by hand, at gamma 1/2: 2, 2 | 5 | 1, 2, 4 and 1, 0 | 2.5, 3."""
    run = config("returns", turn_gamma=0.5)
    advantages = advantages_of(batch_of(FIRST, SECOND), run)
    first_turns = np.array([2.0, 5.0, 1.0]) - 8 / 3
    expected = [
        [first_turns[0], 0.0],  # the second turns have returned 2 and 2
        [first_turns[1]],
        [first_turns[2], 0.0, 0.0],  # nothing is compared with the third turn
        [1.0 - 1.75, 0.0 - 1.5],
        [2.5 - 1.75, 3.0 - 1.5],
    ]
    for row, expected_row in zip(advantages, expected, strict=True):
        np.testing.assert_allclose(row, expected_row, rtol=0, atol=1e-12)


def test_process_supervision_is_that_of_deepseekmath() -> None:
    """Rewards of all turns of a prompt are normalised together, and summed from a turn on."""
    run = config("process", advantage="normalized")
    advantages = advantages_of(batch_of(FIRST, SECOND), run)
    first = torch.tensor([1.0, 2.0, 5.0, 0.0, 0.0, 4.0], dtype=torch.float64)
    second = torch.tensor([1.0, 0.0, 1.0, 3.0], dtype=torch.float64)
    a, b, c, d, e, f = ((first - first.mean()) / (first.std() + 1e-6)).tolist()
    g, h, i, j = ((second - second.mean()) / (second.std() + 1e-6)).tolist()
    expected = [[a + b, b], [c], [d + e + f, e + f, f], [g + h, h], [i + j, j]]
    for row, expected_row in zip(advantages, expected, strict=True):
        np.testing.assert_allclose(row, expected_row, rtol=0, atol=1e-12)


def test_turns_follow_rule_and_penalties_of_their_source() -> None:
    run = config("returns")
    run.data.train.sources["alone"] = MixedConfig(
        source="alone.jsonl",
        reward=SourceRewardConfig(unfinished_penalty=10.0),
        algorithm=SourceAlgorithmConfig(advantage="leave_one_out"),
    )
    cut = [sample([1.0, 2.0], finish_reason="length"), sample([1.0, 0.0])]
    batch = batch_of(SECOND, cut)
    other = replace(batch.groups[1], source="alone")
    advantages = advantages_of(replace(batch, groups=[batch.groups[0], other]), run)
    assert advantages[:2] == advantages_of(batch_of(SECOND), run)
    # returns 1 + 2 - 10 and 2 - 10, minus those of the other response
    assert advantages[2:] == [[-7.0 - 1.0, -8.0 - 0.0], [1.0 + 7.0, 0.0 + 8.0]]


def test_signal_of_turns_is_that_of_their_source() -> None:
    run = config("returns")
    penalty = SourceRewardConfig(unfinished_penalty=10.0)
    run.data.train.sources["strict"] = MixedConfig(source="strict.jsonl", reward=penalty)
    equal = [sample([1.0, 2.0], finish_reason="length"), sample([1.0, 2.0])]
    batch = batch_of(equal, equal)
    groups = [batch.groups[0], replace(batch.groups[1], source="strict")]
    assert fraction_without_signal(groups, run) == 0.5


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("credit", ["returns", "process"])
def test_one_turn_has_the_advantage_of_its_outcome(credit: str, advantage: str) -> None:
    """Bit for bit, whatever gamma is."""
    random = np.random.default_rng(0)
    groups = [[sample([reward]) for reward in random.normal(size=5)] for _ in range(3)]
    run = config(credit, advantage=advantage)
    rewards = torch.tensor([[response.reward for response in group] for group in groups])
    outcome = make_algorithm(run.algorithm).advantages(rewards.double())
    assert advantages_of(batch_of(*groups), run) == [[a] for a in outcome.flatten().tolist()]


def test_batch_normalized_divides_by_the_deviation_of_all_turns() -> None:
    run = config("returns", advantage="batch_normalized")
    by_mean = advantages_of(batch_of(FIRST, SECOND), config("returns"))
    scale = np.concatenate(by_mean).std(ddof=1) + 1e-6
    advantages = advantages_of(batch_of(FIRST, SECOND), run)
    np.testing.assert_allclose(
        np.concatenate(advantages), np.concatenate(by_mean) / scale, atol=1e-12
    )


def test_branches_keep_their_own_rewards() -> None:
    """The second branch shares a turn, which is learned and compared in the first alone."""
    first = sample([1.0, 2.0], "11011", reward=9.0)
    second = sample([], "00011", reward=9.0, branch=1)
    second = replace(second, turn_rewards=[TurnReward(2, 1.0), TurnReward(5, 6.0)])
    other = sample([0.0, 1.0])
    batch = batch_of([first, second, other])
    assert [s.shared_turns for s in batch.samples] == [0, 1, 0]
    advantages = advantages_of(batch, config("returns"))
    assert advantages[0] == [3.0 - 2.0, 2.0 - 3.0]
    assert advantages[1][1] == 6.0 - 3.0
    assert advantages[2] == [1.0 - 2.0, 1.0 - 3.0]
    sequences = to_train_sequences(batch, advantages, skip_zero=True)
    assert sequences[1].advantages.tolist() == [0, 0, 0, 0, 0, 3, 3]
    assert sequences[0].advantages.tolist() == [0, 0, 1, 1, 0, -1, -1]
    in_process = advantages_of(batch, config("process"))
    mean = (1.0 + 2.0 + 6.0 + 0.0 + 1.0) / 5
    np.testing.assert_allclose(in_process[0], [3.0 - 2 * mean, 2.0 - mean])
    assert in_process[1][1] == pytest.approx(6.0 - mean)


def test_steps_of_one_turn_meet_at_their_tokens() -> None:
    steps = replace(sample([], "1111"), turn_rewards=[TurnReward(1, 1.0), TurnReward(4, 0.0)])
    batch = batch_of([steps, sample([0.0])])
    run = config("process")
    sequences = to_train_sequences(batch, advantages_of(batch, run), skip_zero=True)
    assert sequences[0].advantages[2:].tolist() == pytest.approx([1 / 3, -1 / 3, -1 / 3, -1 / 3])


def test_only_samples_without_any_advantage_are_left_out() -> None:
    run = config("returns")
    batch = batch_of([sample([1.0, 0.0]), sample([0.0, 1.0])], [sample([1.0]), sample([1.0])])
    advantages = advantages_of(batch, run)
    assert advantages == [[0.0, -0.5], [0.0, 0.5], [0.0], [0.0]]
    assert list(to_train_sequences(batch, advantages, skip_zero=True)) == [0, 1]
    assert len(to_train_sequences(batch, advantages, skip_zero=False)) == 4
    assert [has_signal(group.samples, run) for group in batch.groups] == [True, False]
    assert not has_signal(batch.groups[0].samples, config("outcome"))


def test_turns_that_return_the_same_teach_what_the_outcome_does() -> None:
    """With all rewards at the end and equal numbers of turns."""
    group = [sample([0.0, 1.0]), sample([0.0, 0.0])]
    batch = batch_of(group)
    outcome = make_algorithm(config("outcome").algorithm).advantages(torch.tensor([[1.0, 0.0]]))
    of_outcome = to_train_sequences(batch, outcome.double(), skip_zero=True)
    of_returns = to_train_sequences(batch, advantages_of(batch, config("returns")), skip_zero=True)
    assert of_outcome == of_returns


def test_last_turn_bears_the_penalties() -> None:
    run = config("returns")
    run.reward = RewardConfig(unfinished_penalty=2.0)
    run.rollout = RolloutConfig(max_tokens=5)
    group = [sample([1.0, 1.0], finish_reason="length"), sample([1.0, 1.0])]
    assert advantages_of(batch_of(group), run) == [[-1.0, -1.0], [1.0, 1.0]]


def test_fixed_score_of_cut_responses_is_exact() -> None:
    """0.1 + (-0.3 - 0.1) is not -0.3."""
    run = config("returns")
    run.reward = RewardConfig(unfinished_score=-0.3)
    group = [sample([reward], finish_reason="length") for reward in (0.1, 0.7)]
    assert not has_signal(batch_of(group).samples, run)


def test_turns_without_rewards_end_where_the_environment_writes() -> None:
    response = sample([], "110110", reward=3.0)
    assert response.summary().turn_rewards == [(2, 0.0), (5, 3.0)]
    assert response.summary().turns_or_one[-1] == (5, 3.0)
    assert sample([], "11", reward=3.0).summary().turns_or_one == [(2, 3.0)]
    run = config("returns", turn_gamma=0.5)
    [row, _] = advantages_of(batch_of([response, sample([0.0, 0.0])]), run)
    assert row == [0.75, 1.5]


def test_metrics_tell_rewards_that_are_ignored() -> None:
    plain = sample([0.0, 1.0])
    shared_out = sample([0.25, 0.75])
    extra = sample([0.5, 1.0], reward=1.0)
    assert [ignores_turns(s) for s in (plain, shared_out, extra)] == [False, False, True]
    summaries = [s.summary() for s in (plain, shared_out, extra)]
    assert turn_metrics(summaries[:1], config("outcome")) == {}
    assert turn_metrics(summaries, config("outcome")) == {
        "reward/turns/mean": 2.5 / 4,
        "reward/turns/sum": 2.5 / 2,
        "reward/turns/ignored_fraction": 1 / 3,
    }
    assert "reward/turns/ignored_fraction" not in turn_metrics(summaries, config("returns"))


@pytest.mark.parametrize(("turns", "problem"), [
    ([(2, 1.0), (5, float("nan"))], "the reward must be a finite number"),
    ([(2, 1.0), (2, 1.0)], r"turn_rewards\[1\]=\(2, 1.0\): it must end after token 2"),
    ([(9, 1.0)], "within 5"),
    ([(2, 1.0)], "turn_rewards end at token 2, but the policy sampled later ones"),
    ([(2, 1.0), (3, 1.0), (5, 0.0)], "the policy sampled none of its tokens"),
])  # fmt: skip
def test_malformed_rewards_of_turns_are_refused(turns: list[Any], problem: str) -> None:
    response = sample([], "11011", reward=1.0)
    malformed = replace(response, turn_rewards=turns)
    problems = sample_problems([malformed], n=1, max_tokens=9, vocab_size=99)
    assert len(problems) == 1
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(problems[0])
    assert not sample_problems([sample([1.0, 2.0])], n=1, max_tokens=9, vocab_size=99)


def test_parts_with_and_without_steps_add_up() -> None:
    steps = Score(0.5, turn_rewards=[TurnReward(3, 0.25), TurnReward(7, 0.5)])
    verdict = Score(1.0)
    parts = [RewardPart("roles.prm", 0.0, "prm", 2.0), RewardPart("math", 0.0, "right", 3.0)]
    score = weighted_sum(list(zip(parts, [steps, verdict])))
    assert score.reward == 4.0
    assert score.turn_rewards == [(3, 0.5), (7, 1.0 + 3.0)]
    assert weighted_sum([(parts[1], verdict)]).turn_rewards == []
