"""Prompts whose samples all have the same reward: when they are dropped, and how that is reported.

(test_buffer_schedules.py, and tests/cpu/test_run_dynamic_sampling.py with whole runs, check that
each prompt is dropped or trained on exactly once.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from batches import batch_of
from hypothesis import given
from hypothesis import strategies as st
from json_files import json_lines, write_json_lines
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
def test_dropped_groups_are_those_without_advantage(
    drawn: list[Sample], unfinished: float, overlong: int
) -> None:
    settings = config(unfinished_penalty=unfinished, overlong_tokens=overlong)
    ready = judged(pack(group(7, *drawn)), settings)
    batch = batch_of([group(7, *drawn)])
    rewards = batch_rewards(batch, settings)
    for advantages in (*ADVANTAGES.values(), best_and_worst):
        assert ready.dropped == (not advantages(rewards).any())
    assert ready.dropped == (not ready.pieces)
    assert summary_of(ready).ordinal == 7
    assert texts_of(ready.texts).prompt == "1+1="
    assert not judged(pack(group(7, *drawn)), config(dynamic=False)).dropped


def batch(groups: list[Group], dropped: list[Group]) -> Batch:
    of_dropped = batch_of(dropped)
    return replace(batch_of(groups), dropped=of_dropped.groups, dropped_texts=of_dropped.texts)


def test_metrics_cover_generated_trained_and_dropped_groups() -> None:
    right = group(1, sample(1.0), sample(1.0, 3))
    wrong = group(2, sample(0.0), sample(0.0))
    failed = group(
        3, sample(0.0, failure=Failure("timeout", "too slow")), sample(0.0, LONGEST, "length")
    )
    mixed = batch([group(0, sample(1.0), sample(0.0))], [right, wrong, failed])
    metrics = batch_metrics(mixed, 0) | dropped_metrics(mixed)
    expected = {
        "reward/mean": 3 / 8,
        "reward/trained_mean": 1 / 2,
        "reward/dropped_mean": 2 / 6,
        "prompts/dropped": 3,
        "prompts/dropped_right": 1,
        "prompts/dropped_wrong": 2,
        "response_tokens/mean": 17 / 8,
        "truncated_fraction": 1 / 8,
        "reward/timeouts": 1,
        "zero_advantage_fraction": 0,
        "environment_tokens/fraction": 0,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert "reward/dropped_mean" not in dropped_metrics(batch_of([right]))


def test_too_few_useful_prompts_end_with_their_rewards() -> None:
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


def test_rollouts_show_dropped_prompts(tmp_path: Path) -> None:
    mixed = batch([group(0, sample(1.0), sample(0.0))], [group(1, sample(0.0), sample(0.0))])
    shown = [(mixed.groups[0], texts_of(mixed.texts[0]))]
    dropped = [(mixed.dropped[0], texts_of(mixed.dropped_texts[0]))]
    text = write_rollouts(tmp_path, 4, shown, dropped, 9).read_text()  # type: ignore[union-attr]
    assert text.startswith("step 4, 9 prompts dropped\n")
    assert "\nprompt 0\n" in text
    assert "\nprompt 1, dropped: its samples all have the same reward in training\n" in text


def test_record_of_a_step_is_restored_with_its_dropped_prompts(tmp_path: Path) -> None:
    writer = OrdinalsWriter(tmp_path)
    path = tmp_path / "rollouts/ordinals.jsonl"
    writer.write(0, [0, 2], [1])
    writer.write(1, [4, 5], [3])
    writer.write(2, [6, 8], [])
    writer.close()
    unreported = judged(pack(group(7, sample(0.0), sample(0.0))), config())
    ledger = Ledger(9, [], [], [1, 3, 7], [unreported])
    lines = json_lines(path)
    assert lines[1:] == [
        {"step": 1, "ordinals": [4, 5], "dropped": [3]},
        {"step": 2, "ordinals": [6, 8]},
    ]
    for lost in range(3):
        write_json_lines(path, (line for line in lines if line["step"] != lost))
        report = recover_ordinals(tmp_path, 3, ledger.trained(), ledger.reported_drops())
        assert "restored" in report
        assert json_lines(path) == lines


def test_dynamic_sampling_is_refused_for_best_of_n() -> None:
    """It learns from equal rewards, too."""
    best = RunConfig(
        rollout=RolloutConfig(dynamic_sampling=True), algorithm=AlgorithmConfig(name="best_of_n")
    )
    [problem] = check_dynamic_sampling(best)
    assert problem.startswith(
        "rollout.dynamic_sampling=true: best_of_n trains on the best sample of every prompt"
    )
    assert not [*check_dynamic_sampling(config())]


@pytest.mark.parametrize("batches, shown", [(2, "2"), (None, "null")])
def test_limit_is_refused_without_dynamic_sampling(batches: int | None, shown: str) -> None:
    settings = RunConfig(rollout=RolloutConfig(max_num_gen_batches=batches))
    assert list(check_dynamic_sampling(settings)) == [
        f"rollout.max_num_gen_batches={shown}: must be left out (10) without "
        "rollout.dynamic_sampling"
    ]
    settings.rollout.dynamic_sampling = True
    assert not list(check_dynamic_sampling(settings))


@pytest.mark.parametrize("share, generated", [(None, 64), (0.5, 128), (0.2, 80)])
def test_planner_counts_the_expected_dropped_share(share: float | None, generated: int) -> None:
    from megarl.estimate.memory import Workload
    from megarl.estimate.report import not_counted

    settings = RunConfig(rollout=RolloutConfig(prompts_per_step=16, n=4, dynamic_sampling=True))
    settings.plan.dropped_share = share
    assert Workload.of(settings).sequences == 64
    assert Workload.generated(settings).sequences == generated
    assert not_counted(settings) == (
        ["rollout.dynamic_sampling (set plan.dropped_share)"] if share is None else []
    )
    settings.rollout.dynamic_sampling = False
    assert Workload.generated(settings) == Workload.of(settings) and not_counted(settings) == []
