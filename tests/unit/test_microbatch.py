"""Microbatches: every sequence once, within the budget, balanced, the same number for all ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.trainer.microbatch import MicrobatchPlan, build, plan_microbatches
from megarl.types import TrainSequence

LENGTHS = st.lists(st.integers(1, 300), max_size=60)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 400), st.sampled_from([1, 4, 8, 12]))
def test_plan(lengths: list[int], dp: int, max_tokens: int, multiple: int) -> None:
    ranks = plan_microbatches(lengths, dp, max_tokens, multiple)
    assert len(ranks) == dp
    assert len({len(plan) for plan in ranks}) == 1 and len(ranks[0]) >= 1
    assert sorted(i for plan in ranks for m in plan for i in m.indices) == list(range(len(lengths)))
    for microbatch in (m for plan in ranks for m in plan):
        assert microbatch.positions % multiple == 0 and microbatch.positions > 0
        if microbatch.indices:
            longest = max(lengths[i] for i in microbatch.indices)
            assert longest <= microbatch.length < max(longest, 2) + multiple
        else:
            assert microbatch.length == multiple + 1
        assert len(microbatch.indices) * microbatch.positions <= max_tokens or len(microbatch.indices) <= 1
    tokens = [sum(lengths[i] for m in plan for i in m.indices) for plan in ranks]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)
    assert ranks == plan_microbatches(lengths, dp, max_tokens, multiple)


def test_neighbours_are_of_similar_length() -> None:
    (plan,) = plan_microbatches([10, 100, 10, 100, 10, 100], dp=1, max_tokens=300, multiple=4)
    assert plan == [MicrobatchPlan((1, 3, 5), 101), MicrobatchPlan((0, 2, 4), 13)]


def test_no_sequences_is_one_empty_microbatch_for_all() -> None:
    assert plan_microbatches([], dp=3, max_tokens=100, multiple=4) == [[MicrobatchPlan((), 5)]] * 3


def sequence(*token_ids: int) -> TrainSequence:
    n = len(token_ids)
    return TrainSequence(list(token_ids), [False] + [True] * (n - 1), [0.0] + [-0.5] * (n - 1), [0.0] + [2.0] * (n - 1))


def test_the_last_token_is_only_predicted() -> None:
    (plan,) = plan_microbatches([21, 21], dp=1, max_tokens=40, multiple=1)
    assert plan == [MicrobatchPlan((0, 1), 21)] and plan[0].positions == 20


@pytest.mark.parametrize(("lengths", "count"), [([], 4), ([9] * 4, 4), ([9] * 5, 8)])
def test_number_of_microbatches_is_a_multiple_of_the_stages(lengths: list[int], count: int) -> None:
    (plan,) = plan_microbatches(lengths, dp=1, max_tokens=8, multiple=1, count_multiple=4)
    assert len(plan) == count and sorted(i for p in plan for i in p.indices) == list(range(len(lengths)))


def test_build_pads_with_masked_columns() -> None:
    sequences, reference = [sequence(5, 6), sequence(9), sequence(7, 8, 9)], [[0.0, -1.0], [0.0], [0.0, -2.0, -3.0]]
    batch = build(MicrobatchPlan((2, 0), 4), sequences, torch.device("cpu"), reference)
    assert batch.tokens.tolist() == [[7, 8, 9, 0], [5, 6, 0, 0]] and batch.tokens.dtype == torch.int64
    assert batch.loss_mask.tolist() == [[False, True, True, False], [False, True, False, False]]
    assert batch.mu_logprobs.tolist() == [[0.0, -0.5, -0.5, 0.0], [0.0, -0.5, 0.0, 0.0]]
    assert batch.advantages.tolist() == [[0.0, 2.0, 2.0, 0.0], [0.0, 2.0, 0.0, 0.0]]
    assert batch.reference_logprobs.tolist() == [[0.0, -2.0, -3.0, 0.0], [0.0, -1.0, 0.0, 0.0]]
    assert batch.indices == (2, 0)


def test_build_of_an_empty_microbatch_is_one_masked_row() -> None:
    batch = build(MicrobatchPlan((), 4), [], torch.device("cpu"))
    assert batch.tokens.tolist() == [[0, 0, 0, 0]] and not batch.loss_mask.any() and batch.reference_logprobs is None
