"""Microbatches: every sequence once, within the limit, balanced by cost, the same number for all
ranks; and their tensors.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.base.geometry import TrainerTopology
from megarl.base.rollout_types import TrainSequence
from megarl.trainer.layers import held_positions
from megarl.trainer.microbatch import Alignment, MicrobatchPlan, build, plan_microbatches

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
ALIGNMENTS = [Alignment(), Alignment(1, 4), Alignment(4, 4), Alignment(4, 12)]
CPU = torch.device("cpu")


@given(
    LENGTHS,
    st.integers(1, 5),
    st.integers(1, 400),
    st.sampled_from(ALIGNMENTS),
    st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_plan(
    lengths: list[int], dp: int, max_tokens: int, alignment: Alignment, squares: float
) -> None:
    ranks = plan_microbatches(lengths, dp, max_tokens, alignment, squares)
    assert len(ranks) == dp
    assert len({len(plan) for plan in ranks}) == 1
    assert len(ranks[0]) >= 1
    sizes = [-(-(length - 1) // alignment.sequence) * alignment.sequence for length in lengths]
    predict = [i for i, length in enumerate(lengths) if length > 1]
    assert sorted(i for plan in ranks for m in plan for i in m.indices) == predict
    for microbatch in (m for plan in ranks for m in plan):
        assert len(microbatch.boundaries) == max(1, len(microbatch.indices)) + 1
        assert microbatch.boundaries[0] == 0
        assert microbatch.positions % alignment.microbatch == 0
        for (start, end), index in zip(pairwise(microbatch.boundaries), microbatch.indices):
            padding = end - start - (lengths[index] - 1)
            assert (end - start) % alignment.sequence == 0
            assert (
                0
                <= padding
                < (
                    alignment.sequence
                    if end < microbatch.positions
                    else alignment.sequence + alignment.microbatch
                )
            )
        laid = [sizes[i] for i in microbatch.indices]
        assert laid == sorted(laid, reverse=True), "equal lengths side by side"
        assert (
            microbatch.positions <= max(max_tokens, alignment.microbatch)
            or len(microbatch.indices) <= 1
        )
        if not microbatch.indices:
            assert microbatch.positions == alignment.microbatch
    if alignment == Alignment():
        assert sum(m.positions for plan in ranks for m in plan if m.indices) == sum(
            lengths[i] - 1 for i in predict
        ), "no padding"

    def cost(plan: list[MicrobatchPlan]) -> float:
        return sum(sizes[i] + squares * sizes[i] ** 2 for m in plan for i in m.indices)

    padded = max(lengths, default=1) + alignment.sequence
    assert max(map(cost, ranks)) - min(map(cost, ranks)) <= padded + squares * padded**2
    assert ranks == plan_microbatches(lengths, dp, max_tokens, alignment, squares)


def test_balance_is_of_cost_and_not_of_tokens() -> None:
    """A long sequence has as many tokens as seven short ones.

    With attention's quadratic cost it costs as much as eleven.
    """
    lengths = [701] + [101] * 14

    def sequences_by_rank(squares: float) -> list[int]:
        ranks = plan_microbatches(lengths, 2, 10_000, squares=squares)
        return [sum(len(microbatch.indices) for microbatch in plan) for plan in ranks]

    assert sequences_by_rank(0.0) == [5, 10]
    assert sequences_by_rank(1e-3) == [3, 12]


def test_microbatches_of_a_rank_cost_the_same_too() -> None:
    (plan,) = plan_microbatches([51, 41, 31, 31, 21, 21, 11], dp=1, max_tokens=110)
    assert [m.positions for m in plan] == [100, 100]
    # no space for all in the cheapest one: first fit
    (fuller,) = plan_microbatches([61, 51, 41, 31, 31, 21], dp=1, max_tokens=130)
    assert [m.positions for m in fuller] == [120, 110]


def test_no_more_microbatches_than_first_fit_needs() -> None:
    random = np.random.default_rng(0)
    lengths = (1 + random.lognormal(5, 1, 500).clip(1, 2000)).astype(int).tolist()
    (plan,) = plan_microbatches(lengths, dp=1, max_tokens=4096)
    needed = sum(length - 1 for length in lengths) / 4096
    assert len(plan) <= 1.02 * needed + 1


def test_no_sequences_is_one_empty_microbatch_for_all() -> None:
    assert (
        plan_microbatches([], dp=3, max_tokens=100, alignment=Alignment(4, 4))
        == [[MicrobatchPlan((), (0, 4))]] * 3
    )
    assert plan_microbatches([1, 1], dp=2, max_tokens=100) == [[MicrobatchPlan((), (0, 1))]] * 2, (
        "a single token predicts nothing"
    )


def test_alignment_follows_sequence_and_context_parallelism() -> None:
    cases = {
        (1, 1, False): (1, 1),
        (4, 1, False): (1, 1),
        (4, 1, True): (1, 4),
        (1, 2, False): (4, 4),
        (4, 2, True): (4, 8),
    }
    cases[3, 2, True] = (4, 12)
    for (tp, cp, sequence_parallel), alignment in cases.items():
        assert Alignment.of(TrainerTopology(tp=tp, cp=cp), sequence_parallel) == Alignment(
            *alignment
        )


def sequence(*token_ids: int) -> TrainSequence:
    n = len(token_ids)
    return TrainSequence(
        list(token_ids),
        [False] + [True] * (n - 1),
        [0.0] + [-0.5] * (n - 1),
        [0.0] + [2.0] * (n - 1),
    )


def test_the_last_token_is_only_predicted() -> None:
    (plan,) = plan_microbatches([21, 21], dp=1, max_tokens=40)
    assert plan == [MicrobatchPlan((0, 1), (0, 20, 40))]


@pytest.mark.parametrize(("lengths", "count"), [([], 4), ([9] * 4, 4), ([9] * 5, 8)])
def test_number_of_microbatches_is_a_multiple_of_the_stages(lengths: list[int], count: int) -> None:
    (plan,) = plan_microbatches(lengths, dp=1, max_tokens=8, count_multiple=4)
    assert len(plan) == count
    assert sorted(i for p in plan for i in p.indices) == list(range(len(lengths)))


@pytest.mark.parametrize("arrays", [False, True])
def test_build_lays_sequences_end_to_end(arrays: bool) -> None:
    sequences = [sequence(5, 6), sequence(9), sequence(7, 8, 9)]
    reference = [[0.0, -1.0], [0.0], [0.0, -2.0, -3.0]]
    if arrays:
        fields = ("token_ids", "loss_mask", "mu_logprobs", "advantages")
        sequences = [
            TrainSequence(*(np.array(getattr(s, field)) for field in fields)) for s in sequences
        ]
        reference = [np.array(row, np.float32) for row in reference]
    # the last one has a position of padding
    batch = build(MicrobatchPlan((2, 0), (0, 2, 4)), sequences, CPU, reference)
    assert batch.inputs.tolist() == [7, 8, 5, 0]
    assert batch.targets.tolist() == [8, 9, 6, 0]
    assert batch.inputs.dtype == torch.int64
    assert batch.boundaries.tolist() == [0, 2, 4]
    assert batch.boundaries.dtype == torch.int32
    assert batch.loss_mask.tolist() == [True, True, True, False]
    assert batch.loss_mask.dtype == torch.bool
    assert batch.scored.tolist() == batch.loss_mask.tolist()
    assert batch.mu_logprobs.tolist() == [-0.5, -0.5, -0.5, 0.0]
    assert batch.mu_logprobs.dtype == torch.float32
    assert batch.advantages.tolist() == [2.0, 2.0, 2.0, 0.0]
    assert batch.reference_logprobs is not None
    assert batch.reference_logprobs.tolist() == [
        -2.0,
        -3.0,
        -1.0,
        0.0,
    ]


def test_build_of_an_empty_microbatch_is_masked_padding() -> None:
    batch = build(MicrobatchPlan((), (0, 3)), [], CPU)
    assert batch.inputs.tolist() == batch.targets.tolist() == [0, 0, 0]
    assert not batch.loss_mask.any()
    assert batch.reference_logprobs is None
    assert batch.boundaries.tolist() == [0, 3]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 4))
def test_context_rank_has_an_early_and_a_late_chunk_per_sequence(
    chunks: list[int], ranks: int
) -> None:
    boundaries = np.cumsum([0] + [2 * ranks * size for size in chunks])
    positions_by_rank = [held_positions(boundaries, ranks, rank).tolist() for rank in range(ranks)]
    assert Counter(p for positions in positions_by_rank for p in positions) == Counter(
        range(boundaries[-1])
    )
    for rank, positions_of_rank in enumerate(positions_by_rank):
        expected = []
        for start, size in zip(boundaries, chunks):
            for chunk in (rank, 2 * ranks - 1 - rank):
                expected += range(start + chunk * size, start + (chunk + 1) * size)
        assert positions_of_rank == expected
