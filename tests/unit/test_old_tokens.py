"""async.too_old=mask: old tokens are context, in a batch and in the rules of the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from batches import batch_of
from msgspec.structs import replace
from rollout_schedules import ready

from megarl.algorithms.batches import (
    masked_places,
    minibatches,
    old_token_metrics,
    to_train_sequences,
    without_old_tokens,
)
from megarl.algorithms.registry import make_algorithm
from megarl.base.rollout_types import Batch, Group, Prompt, RemoteSequence, Sample
from megarl.config.schema import AlgorithmConfig, AsyncConfig, RunConfig, TrainerConfig
from megarl.rollouts.buffer import RolloutBuffer
from megarl.rollouts.channel import pack

MASKING = AsyncConfig(capacity=4, max_staleness=2, too_old="mask")


def sample(versions: list[int], mask: Sequence[bool] = (), branch: int = 0) -> Sample:
    count = len(versions)
    return Sample(
        range(10, 10 + count),
        [-0.5] * count,
        versions,
        "",
        1.0,
        "stop",
        policy_mask=mask,
        branch=branch,
    )


def batch() -> Batch:
    """At step 5, tokens of versions below 3 are too old."""
    environment_between = [True, True, False, False, True, True]
    groups = [
        Group(
            Prompt(0, [1, 2], "", ""),
            [sample([1, 2, 2, 2, 3, 4], environment_between), sample([3, 4])],
        ),
        Group(Prompt(1, [1], "", ""), [sample([1, 2]), sample([2, 3])]),
    ]
    return replace(batch_of(groups), step=5)


def trained(batch: Batch) -> dict[int, Any]:
    advantages = torch.tensor([[1.0, -1.0], [2.0, -2.0]])
    return to_train_sequences(
        batch, advantages, skip_zero=True, masked=masked_places(batch, RunConfig())
    )


def test_old_tokens_are_context():
    sequences = trained(without_old_tokens(batch(), MASKING))
    assert sorted(sequences) == [0, 1, 3], "all tokens of sample 2 are too old"
    first = sequences[0]
    assert first.token_ids.tolist() == [1, 2, 10, 11, 12, 13, 14, 15]
    assert first.loss_mask.tolist() == [False] * 6 + [True] * 2
    assert first.mu_logprobs.tolist() == [0.0] * 6 + [-0.5] * 2
    assert first.advantages.tolist() == [0.0] * 6 + [1.0] * 2
    assert sequences[1].loss_mask.tolist() == [False] * 2 + [True] * 2
    assert sequences[3].advantages.tolist() == [0.0, 0.0, -2.0]


def test_denominators_count_young_tokens_and_their_episodes():
    young = without_old_tokens(batch(), MASKING)
    masked = masked_places(young, RunConfig())
    for loss_mean, denominator in (("token", 5.0), ("sequence", 3.0)):
        algorithm = make_algorithm(AlgorithmConfig(loss_mean=loss_mean))
        [part] = minibatches(young, trained(young).keys(), algorithm, TrainerConfig(), 0, masked)
        assert (part.places, part.tokens, part.denominator) == ([0, 1, 3], 5, denominator)


def test_episode_counts_if_only_a_later_branch_is_young():
    group = Group(Prompt(0, [1], "", ""), [sample([1]), sample([4], branch=1), sample([4])])
    young = without_old_tokens(replace(batch_of([group]), step=5), MASKING)
    algorithm = make_algorithm(AlgorithmConfig(loss_mean="sequence"))
    [part] = minibatches(
        young, {1, 2}, algorithm, TrainerConfig(), 0, masked_places(young, RunConfig())
    )
    assert part.denominator == 2.0


def test_ranks_without_the_numbers_see_the_same_batch():
    whole = without_old_tokens(batch(), MASKING)
    remote = without_old_tokens(replace(batch(), numbers={}), MASKING)
    assert remote.groups == whole.groups
    assert all(isinstance(sequence, RemoteSequence) for sequence in trained(remote).values())
    assert trained(remote).keys() == trained(whole).keys()


def test_masked_tokens_and_groups_are_told():
    metrics = old_token_metrics(batch(), MASKING)
    assert metrics == {"staleness/masked_fraction": 0.5, "staleness/masked_groups": 2}
    young = replace(batch(), step=2)
    assert set(old_token_metrics(young, MASKING).values()) == {0}
    assert old_token_metrics(batch(), AsyncConfig(max_staleness=2)) == {}


def test_group_is_rejected_only_without_a_young_token():
    mixed = pack(Group(Prompt(1, [1], "", ""), [sample([1, 4])]))
    assert (mixed.oldest, mixed.newest) == (1, 4)
    for masks, rejected in ((False, [0, 1]), (True, [0])):
        buffer = RolloutBuffer(1, 2, masks=masks)
        buffer.begin([0, 1], 1)
        buffer.finish(replace(ready(0, 1), newest=1))
        buffer.finish(mixed)
        assert buffer.reject(5) == rejected


def test_masking_batch_waits_for_no_running_group():
    for masks in (False, True):
        buffer = RolloutBuffer(1, 2, masks=masks)
        buffer.begin([0], 1)
        buffer.begin([1], 3)
        buffer.finish(replace(ready(1, 3), newest=3))
        assert (buffer.take(3) is not None) == masks
