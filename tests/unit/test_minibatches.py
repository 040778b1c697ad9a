"""The mini-batches of a batch, the ranks that train on them, and the reports of several optimizer
steps.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batches import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from megarl.algorithms.batches import (
    MiniBatch,
    batch_rewards,
    cut_into_minibatches,
    masked_places,
    minibatches,
    to_train_sequences,
)
from megarl.algorithms.registry import make_algorithm
from megarl.base.rollout_types import Group, Prompt, Sample, TrainSequence
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import AlgorithmConfig, RunConfig, TrainerConfig
from megarl.executors.batch_steps import BatchSteps, step_metrics
from megarl.plan.checks import check_batch
from megarl.trainer.microbatch import plan_microbatches

CONFIGS = Path(__file__).parents[2] / "configs"
AIPO = make_algorithm(AlgorithmConfig())


def group(ordinal: int, lengths: list[int], rewards: list[float]) -> Group:
    samples = [
        Sample([1] * t, [-0.1] * t, [0] * t, "", reward, "stop")
        for t, reward in zip(lengths, rewards, strict=True)
    ]
    return Group(Prompt(ordinal, [1, 2], "", ""), samples)


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 6),
    count=st.integers(1, 6),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 99),
    step=st.integers(0, 99),
)
def test_every_epoch_has_every_group_once(size: int, count: int, epochs: int, seed: int, step: int):
    parts = cut_into_minibatches(size * count, count, epochs, seed, step)
    assert [len(groups) for groups in parts] == [size] * count * epochs
    for epoch in range(epochs):
        assert sorted(chain(*parts[epoch * count : (epoch + 1) * count])) == list(
            range(size * count)
        )
    assert parts == cut_into_minibatches(size * count, count, epochs, seed, step)
    assert parts[:count] == cut_into_minibatches(size * count, count, 1, seed, step), (
        "an epoch does not depend on how many follow"
    )


def test_order_depends_on_epoch_step_and_seed():
    """And it never changes: a resumed run may be on another process, machine or version."""
    assert cut_into_minibatches(8, 2, 2, seed=1, step=5) == [
        [0, 2, 3, 5],
        [1, 4, 6, 7],
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]
    drawn = [
        cut_into_minibatches(8, 2, 1, seed, step) for seed, step in ((1, 5), (1, 6), (2, 5))
    ] + [cut_into_minibatches(8, 2, 2, 1, 5)[2:]]
    assert len({str(order) for order in drawn}) == 4
    assert cut_into_minibatches(5, 1, 3, 0, 0) == [[0, 1, 2, 3, 4]] * 3, (
        "whole batches keep their order"
    )


def test_a_mini_batch_has_whole_groups_and_its_own_denominator():
    batch = batch_of([group(i, [1 + i, 2 + i], [float(i % 2), 1.0]) for i in range(4)], step=3)
    trained = {0, 1, 4, 5}  # groups 1 and 3 have equal rewards
    for loss_mean, weight_of_group in (("token", lambda i: 3 + 2 * i), ("sequence", lambda i: 2)):
        algorithm = make_algorithm(AlgorithmConfig(loss_mean=loss_mean))
        cut = minibatches(batch, trained, algorithm, TrainerConfig(minibatches=2, epochs=3), seed=7)
        assert len(cut) == 6
        for minibatch, groups in zip(cut, cut_into_minibatches(4, 2, 3, 7, 3), strict=True):
            places = [place for i in groups if i in (0, 2) for place in (2 * i, 2 * i + 1)]
            assert minibatch == MiniBatch(
                places,
                sum(3 + 2 * i for i in groups if i in (0, 2)),
                sum(map(weight_of_group, groups)),
            )


@pytest.mark.parametrize(
    ("loss_mean", "denominators"),
    [("token", [5.0, 10.0]), ("sequence", [2.0, 2.0]), ("sequence_sum", [2.0, 2.0])],
)
def test_truncated_samples_count_in_rewards_and_not_in_the_loss(
    loss_mean: str, denominators: list[float]
):
    groups = [group(0, [2, 3, 4], [1.0, 0.0, 0.0]), group(1, [5, 6, 5], [1.0, 1.0, 0.0])]
    batch = batch_of([cut_at(groups[0], 2), cut_at(groups[1], 1)], step=0)
    # with a bonus, nothing else is left out
    algorithm = make_algorithm(AlgorithmConfig(loss_mean=loss_mean, entropy_coefficient=0.1))
    masked = masked_places(batch, RunConfig(algorithm=AlgorithmConfig(mask_truncated=True)))
    assert masked == {2, 4}
    assert masked_places(batch, RunConfig()) == set()
    sequences = to_train_sequences(
        batch, algorithm.advantages(batch_rewards(batch)), algorithm.skip_zero, masked
    )
    largest = {
        place: abs(part.advantages).max()
        for place, part in sequences.items()
        if isinstance(part, TrainSequence)
    }
    assert largest == pytest.approx({0: 2 / 3, 1: 1 / 3, 3: 1 / 3, 5: 2 / 3})
    cut = minibatches(batch, sequences, algorithm, TrainerConfig(minibatches=2), 0, masked)
    assert sorted((part.places, part.denominator) for part in cut) == [
        ([0, 1], denominators[0]),
        ([3, 5], denominators[1]),
    ]
    everything = minibatches(batch, [], algorithm, TrainerConfig(), 0, range(6))
    assert everything == [MiniBatch([], 0, 1.0)], (
        "a batch of which all is masked still makes its step"
    )


def cut_at(group: Group, number: int) -> Group:
    """The batch with that sample cut at its limit."""
    return Group(
        group.prompt,
        [
            replace(sample, finish_reason="length") if i == number else sample
            for i, sample in enumerate(group.samples)
        ],
    )


class Shares:
    """A trainer without a model, which only assigns samples."""

    topology = SimpleNamespace(dp=3)

    def shares(self, sequences: list) -> list[list[int]]:
        return [
            [i for microbatch in plan for i in microbatch.indices]
            for plan in plan_microbatches([len(s) for s in sequences], 3, 8)
        ]


def test_a_rank_is_assigned_what_it_trains_on_in_any_mini_batch():
    """The assignment follows from the mini-batches. Ranks without numbers find the same one."""
    trainer: Any = Shares()
    batch = batch_of(
        [group(i, [1 + i % 5, 2 + i % 3], [1.0, float(i % 4 > 0)]) for i in range(12)], step=9
    )
    config = load_config(
        CONFIGS / "quickstart.yaml",
        ["trainer.minibatches=3", "trainer.epochs=2", "rollout.prompts_per_step=12"],
    )
    steps = BatchSteps(trainer, AIPO, config)
    assigned = steps.assign(batch)
    trained = {place for i in range(0, 12, 4) for place in (2 * i, 2 * i + 1)}
    needed: list[set[int]] = [set(), set(), set()]
    for minibatch in minibatches(batch, trained, AIPO, config.trainer, config.seed):
        lengths = [2 + batch.samples[place].tokens for place in minibatch.places]
        for rank, plan in enumerate(plan_microbatches(lengths, 3, 8)):
            needed[rank] |= {minibatch.places[i] for microbatch in plan for i in microbatch.indices}
    assert assigned == [sorted(places) for places in needed]
    assert set().union(*needed) == trained
    assert max(Counter(chain(*assigned)).values()) > 1, "another rank's in another epoch"
    batch.numbers.clear()
    assert steps.assign(batch) == assigned


def result(**changed: Any) -> Any:
    """A StepResult, whose class would import Megatron."""
    plain = dict(
        loss=1.0,
        grad_norm=2.0,
        sums={"tokens": 4.0, "is_ratio": 6.0, "is_ratio_clipped": 1.0},
        sequences=2,
        tokens=4,
    )
    plain |= {
        "entropy": 0.5,
        "learning_rate": 0.1,
        "padded": 0,
        "routing": {},
        "flops": 1e6,
        "agreement": None,
        "mtp_loss": math.nan,
    }
    return SimpleNamespace(**{**plain, **changed})


def test_metrics_of_several_optimizer_steps():
    empty = {
        "sums": {"tokens": 0.0, "is_ratio": 0.0, "is_ratio_clipped": 0.0},
        "tokens": 0,
        "entropy": math.nan,
        "loss": 0.0,
    }
    first = result(**empty, grad_norm=0.0, padded=1, routing={"router/replayed_fraction": 0.0})
    sums = {"tokens": 12.0, "is_ratio": 10.0, "is_ratio_clipped": 3.0}
    later = [
        result(entropy=0.7, routing={"router/replayed_fraction": 1.0}),
        result(
            sums=sums,
            tokens=12,
            loss=2.0,
            grad_norm=4.0,
            learning_rate=0.2,
            routing={"router/replayed_fraction": 0.5},
        ),
    ]
    assert step_metrics([first, *later], AIPO) == {
        "loss": 1.0,
        "entropy/mean": 0.7,
        "grad_norm": 2.0,
        "grad_norm/max": 4.0,
        "learning_rate": 0.2,
        "optimizer_steps": 3,
        "optimizer_steps/empty": 1,
        "router/replayed_fraction": 0.75,
        "is_ratio/mean": 1.0,
        "is_ratio/clipped_fraction": 0.25,
        "tokens/padded": 1,
        "flops/policy": 3e6,
    }
    alone = step_metrics([first], AIPO)
    assert (alone["loss"], alone["optimizer_steps/empty"]) == (0.0, 1)
    assert not {"entropy/mean", "is_ratio/mean"} & alone.keys(), (
        "nothing was trained on, which is not the same as a loss that diverges"
    )
    assert step_metrics([], AIPO) == {
        "optimizer_steps": 0,
        "optimizer_steps/empty": 0,
        "tokens/padded": 0,
    }
    diverged = step_metrics([result(loss=math.nan, entropy=math.nan)], AIPO)
    assert math.isnan(diverged["loss"])
    assert math.isnan(diverged["entropy/mean"])


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["trainer.minibatches=3"],
            "trainer.minibatches=3: must divide rollout.prompts_per_step=8",
        ),
        (
            ["trainer.minibatches=16"],
            "trainer.minibatches=16: must divide rollout.prompts_per_step=8",
        ),
        (
            ["trainer.minibatches=8", "trainer.dp=5", "trainer.tp=1"],
            "rollout.prompts_per_step=8 * rollout.n=4 / trainer.minibatches=8: 4 sequences an "
            "optimizer step must be at least trainer.dp=5",
        ),
    ],
)
def test_batch_that_cannot_be_cut_is_refused(overrides: list[str], problem: str):
    config = load_config(
        CONFIGS / "quickstart.yaml", ["rollout.prompts_per_step=8", "rollout.n=4", *overrides]
    )
    assert list(check_batch(config)) == [problem]


@pytest.mark.parametrize("key", ["trainer.minibatches", "trainer.epochs"])
def test_number_of_minibatches_and_epochs_is_at_least_one(key: str):
    with pytest.raises(ConfigError, match=f"{key}=0: must be at least 1"):
        load_config(CONFIGS / "quickstart.yaml", [f"{key}=0"])
