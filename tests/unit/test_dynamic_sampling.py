"""Prompts whose samples all have the same reward: when they are dropped, and how that is reported.

(test_buffer_schedules.py, and tests/cpu/test_run_dynamic_sampling.py with whole runs, check that
each prompt is dropped or trained on exactly once.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from batches import batch_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megarl.algorithms.advantages import ADVANTAGES, best_and_worst
from megarl.algorithms.batches import (
    batch_metrics,
    batch_rewards,
    dropped_metrics,
    too_many_dropped,
)
from megarl.base.rollout_types import Batch, Failure, Group, Prompt, Sample
from megarl.config.schema import AlgorithmConfig, RewardConfig, RolloutConfig, RunConfig
from megarl.observe.samples import OrdinalsWriter, recover_ordinals, write_rollouts
from megarl.plan.checks import check_dynamic_sampling
from megarl.rollouts.buffer import Ledger
from megarl.rollouts.channel import judged, pack, summary_of, texts_of

LONGEST = 8


def config(dynamic: bool = True, **reward: Any) -> RunConfig:
    rollout = RolloutConfig(
        max_tokens=LONGEST, prompts_per_step=2, n=2, dynamic_sampling=dynamic, max_num_gen_batches=3
    )
    return RunConfig(rollout=rollout, reward=RewardConfig(**reward))


def sample(
    reward: float, tokens: int = 1, finish: str = "stop", failure: Failure | None = None
) -> Sample:
    return Sample(
        [3] * tokens,
        [-0.1] * tokens,
        [0] * tokens,
        f"{reward:g}",
        reward,
        finish,
        failures=[failure] if failure else [],
    )


def group(ordinal: int, *samples: Sample) -> Group:
    return Group(Prompt(ordinal, [1], "1+1=", "2"), list(samples))


samples = st.builds(
    sample,
    st.sampled_from((0.0, 0.1, 0.30000000000000004, 1.0)),
    st.integers(1, LONGEST),
    st.sampled_from(("stop", "length")),
)


@given(
    st.lists(samples, min_size=2, max_size=4),
    st.sampled_from((0.0, 0.1, 1.0)),
    st.sampled_from((0, 3)),
)
def test_what_is_dropped_is_what_training_finds_no_advantage_in(
    found: list[Sample], unfinished: float, overlong: int
) -> None:
    settings = config(unfinished_penalty=unfinished, overlong_tokens=overlong)
    ready = judged(pack(group(7, *found)), settings)
    batch = batch_of([group(7, *found)])
    rewards = batch_rewards(batch, settings)
    for advantages in (*ADVANTAGES.values(), best_and_worst):
        assert ready.dropped == (not advantages(rewards).any())
    assert (
        ready.dropped == (not ready.pieces)
        and summary_of(ready).ordinal == 7
        and texts_of(ready.texts).prompt == "1+1="
    )
    assert not judged(pack(group(7, *found)), config(dynamic=False)).dropped


def batch(groups: list[Group], dropped: list[Group]) -> Batch:
    of_dropped = batch_of(dropped)
    return replace(batch_of(groups), dropped=of_dropped.groups, dropped_texts=of_dropped.texts)


def test_rewards_are_told_of_all_that_was_generated_and_of_what_was_trained_on() -> None:
    right = group(1, sample(1.0), sample(1.0, 3))
    wrong = group(2, sample(0.0), sample(0.0))
    failed = group(
        3, sample(0.0, failure=Failure("timeout", "too slow")), sample(0.0, LONGEST, "length")
    )
    both = batch([group(0, sample(1.0), sample(0.0))], [right, wrong, failed])
    told = batch_metrics(both, 0) | dropped_metrics(both)
    assert (told["reward/mean"], told["reward/trained_mean"], told["reward/dropped_mean"]) == (
        3 / 8,
        1 / 2,
        2 / 6,
    )
    assert (
        told["prompts/dropped"],
        told["prompts/dropped_right"],
        told["prompts/dropped_wrong"],
    ) == (3, 1, 2)
    assert (told["response_tokens/mean"], told["truncated_fraction"], told["reward/timeouts"]) == (
        17 / 8,
        1 / 8,
        1,
    )
    assert (told["zero_advantage_fraction"], told["environment_tokens/fraction"]) == (0, 0)
    assert "reward/dropped_mean" not in dropped_metrics(batch_of([right]))


def test_a_run_that_finds_too_few_prompts_to_learn_from_says_what_it_found() -> None:
    dropped = [
        group(ordinal, sample(float(ordinal == 3)), sample(float(ordinal == 3)))
        for ordinal in range(5)
    ]
    assert too_many_dropped(batch_of(dropped), config()) is None
    assert str(too_many_dropped(batch([], dropped), config())).startswith(
        "at least 3 times rollout.prompts_per_step=2 prompts were generated for it, and too few "
        "are left for a batch: in 5 of them all "
        "samples had the same reward (mean reward 0.200; 1 all right, 4 all wrong)."
    )


def test_rollouts_show_what_was_dropped(tmp_path: Path) -> None:
    both = batch([group(0, sample(1.0), sample(0.0))], [group(1, sample(0.0), sample(0.0))])
    shown = [(both.groups[0], texts_of(both.texts[0]))]
    dropped = [(both.dropped[0], texts_of(both.dropped_texts[0]))]
    text = write_rollouts(tmp_path, 4, shown, dropped, 9).read_text()  # type: ignore[union-attr]
    assert text.startswith("step 4, 9 prompts dropped\n")
    assert (
        "\nprompt 0\n" in text
        and "\nprompt 1, dropped: its samples all have the same reward in training\n" in text
    )


def test_the_record_of_a_step_is_restored_with_what_was_dropped_for_it(tmp_path: Path) -> None:
    writer = OrdinalsWriter(tmp_path)
    path = tmp_path / "rollouts/ordinals.jsonl"
    for step, of_step in enumerate([([0, 2], [1]), ([4, 5], [3]), ([6, 8], [])]):
        writer.write(step, *of_step)
    writer.close()
    untold = judged(pack(group(7, sample(0.0), sample(0.0))), config())
    ledger = Ledger(9, [], [], [1, 3, 7], [untold])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1:] == [
        {"step": 1, "ordinals": [4, 5], "dropped": [3]},
        {"step": 2, "ordinals": [6, 8]},
    ]
    for lost in range(3):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines if line["step"] != lost))
        assert "restored" in recover_ordinals(
            tmp_path, 3, ledger.trained(), ledger.reported_drops()
        )
        assert [json.loads(line) for line in path.read_text().splitlines()] == lines


def test_it_is_refused_where_equal_rewards_are_learned_from() -> None:
    best = RunConfig(
        rollout=RolloutConfig(dynamic_sampling=True), algorithm=AlgorithmConfig(name="best_of_n")
    )
    [problem] = check_dynamic_sampling(best)
    assert problem.startswith(
        "rollout.dynamic_sampling=true: best_of_n trains on the best sample of every prompt"
    )
    assert not [*check_dynamic_sampling(config())]


@pytest.mark.parametrize("batches, shown", [(2, "2"), (None, "null")])
def test_its_limit_is_refused_without_it(batches: int | None, shown: str) -> None:
    [problem] = check_dynamic_sampling(
        RunConfig(rollout=RolloutConfig(max_num_gen_batches=batches))
    )
    assert (
        problem == f"rollout.max_num_gen_batches={shown}: must be left out (10) without "
        "rollout.dynamic_sampling"
    )
    assert not [
        *check_dynamic_sampling(
            RunConfig(rollout=RolloutConfig(max_num_gen_batches=batches, dynamic_sampling=True))
        )
    ]


@pytest.mark.parametrize("share, generated", [(None, 64), (0.5, 128), (0.2, 80)])
def test_the_planner_counts_what_is_expected_to_be_dropped(
    share: float | None, generated: int
) -> None:
    from megarl.estimate.memory import Workload
    from megarl.estimate.report import not_counted

    settings = RunConfig(rollout=RolloutConfig(prompts_per_step=16, n=4, dynamic_sampling=True))
    settings.plan.dropped_share = share
    assert (
        Workload.of(settings).sequences == 64
        and Workload.generated(settings).sequences == generated
    )
    assert not_counted(settings) == (
        ["rollout.dynamic_sampling (set plan.dropped_share)"] if share is None else []
    )
    settings.rollout.dynamic_sampling = False
    assert Workload.generated(settings) == Workload.of(settings) and not_counted(settings) == []
