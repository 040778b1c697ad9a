"""Mixtures of sources: counts at every prefix, quotas, refusals.

(test_buffer_schedules.py checks each step, and that each prompt comes once.)
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from batches import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from megarl.algorithms.batches import source_metrics
from megarl.base.rollout_types import Group, Prompt, Sample
from megarl.config.errors import ConfigError
from megarl.config.schema import CurriculumConfig, DatasetConfig, MixedConfig, MixtureConfig
from megarl.data.order import (
    LONGEST_PERIOD,
    Curriculum,
    Mixture,
    Place,
    Verdict,
    mixture_of,
    mixture_problems,
    outside_band,
)
from megarl.data.prompts import Sources


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_every_prefix_has_the_share_of_each_source(
    shares: list[int],
) -> None:
    """Of the first ordinals each source has its share, give or take less than one."""
    mixture = Mixture(shares, "abcdef"[: len(shares)])
    period = sum(shares)
    drawn = Counter[int]()
    for ordinal in range(period + 7):
        source = mixture.source(ordinal)
        assert mixture.draw(ordinal) == drawn[source]
        assert mixture.ordinal(source, drawn[source]) == ordinal
        drawn[source] += 1
        assert all(
            abs(drawn[number] - Fraction(share * (ordinal + 1), period)) < 1
            for number, share in enumerate(shares)
        )
    assert mixture.counts(0, period) == mixture.counts(5 * period, 6 * period) == shares
    assert mixture.counts(3, period + 3) == shares, "any stretch of a period's length has them"


def mixture(per_step: int = 16, **sources: dict[str, float]) -> Mixture:
    configs = {
        name: MixedConfig(source=f"{name}.jsonl", **settings) for name, settings in sources.items()
    }  # type: ignore[arg-type]
    return mixture_of(MixtureConfig(sources=configs), per_step)  # type: ignore[arg-type]


def test_quotas_are_exact_in_every_step() -> None:
    """Weights share what the quotas leave."""
    quota_and_weights = mixture(
        maths={"quota": 6}, code={"weight": 0.3}, chat={"weight": 0.1}, prose={}
    )
    assert all(quota_and_weights.counts(16 * step, 16 * (step + 1))[0] == 6 for step in range(50))
    assert quota_and_weights.counts(0, 14 * 16 * 10) == [840, 300, 100, 1000]
    only = mixture(maths={"quota": 5}, code={"quota": 11})
    assert only.counts(16 * 3, 16 * 4) == [5, 11]
    assert mixture().names == ("",)


@pytest.mark.parametrize(
    "sources, problem",
    [
        ({"a": {"quota": 6}, "b": {"quota": 9}},
         "data.train.sources.a.quota=6 + data.train.sources.b.quota=9: together they must be "
         "rollout.prompts_per_step=16"),
        ({"a": {"quota": 16}, "b": {"weight": 1}},
         "data.train.sources.a.quota=16: must leave some of rollout.prompts_per_step=16 for the "
         "other sources"),
        ({"a": {"quota": 6, "weight": 2.0}}, "data.train.sources.a.weight=2: must be null with a "
                                             "quota (quota=6)"),
        ({"a": {"weight": 0.0000012345}, "b": {"weight": 1}}, "data.train.sources.NAME.weight: "
                                                              "shares of 2469 : 2000000000 repeat "
         f"only after 2000002469 prompts; at most {LONGEST_PERIOD}: choose rounder weights"),
    ],
)  # fmt: skip
def test_mixture_is_refused_by_setting(sources: dict[str, dict[str, float]], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        mixture(**sources)
    assert error.value.problems == [problem]


def test_source_and_sources_exclude_each_other() -> None:
    def of(config: MixtureConfig) -> list[str]:
        return [*mixture_problems(config, 4)]

    a = MixedConfig(source="a.jsonl")
    assert of(MixtureConfig()) == [
        "data.train.source: must be set: synthetic:<task>, a file such as rows.jsonl, or a hub name"
    ]
    assert of(MixtureConfig(source="x", sources={"a": a})) == [
        "data.train.source=x: must be sources, or left out, beside data.train.sources"
    ]
    assert of(MixtureConfig(sources={"a/b": a})) == [
        "data.train.sources.a/b: its name must be letters, digits, - and _"
    ]
    assert of(MixtureConfig(source="x")) == of(MixtureConfig(sources={"a": a, "gone": None})) == []
    assert not DatasetConfig(source="x").prompt_key


def test_each_source_has_epochs_of_its_own() -> None:
    sources = Sources([["a0", "a1", "a2"], ["b0", "b1"]], "seed", True, Mixture([1, 2], "ab"))  # type: ignore[list-item]
    drawn = [sources[ordinal] for ordinal in range(36)]
    for letter, rows in ("a", 3), ("b", 2):
        rows_of_source = [row for row in drawn if row[0] == letter]  # type: ignore[index]
        epochs = [
            rows_of_source[first : first + rows] for first in range(0, len(rows_of_source), rows)
        ]
        assert all(len(set(epoch)) == rows for epoch in epochs)
        assert len({*map(tuple, epochs)}) > 1
    assert sources.place(35).epoch == 11


def test_metrics_of_sources_and_of_the_curriculum() -> None:
    def group(ordinal: int, *rewards: float) -> Group:
        return Group(
            Prompt(ordinal, [1], "", ""),
            [
                Sample(
                    [1],
                    [0.0],
                    [0],
                    "",
                    reward,
                    "stop",
                    reward_parts={"format": reward / 2},
                    metrics={"calls": 2.0},
                )
                for reward in rewards
            ],
        )

    batch = replace(
        batch_of([group(0, 1.0, 0.0), group(2, 1.0, 1.0)]),
        dropped=batch_of([group(4, 0.0, 0.0)]).groups,
        rested=5,
    )
    metrics = source_metrics(batch, Mixture([1, 1], ["maths", "code"]), True)
    assert metrics == {
        "prompts/rested": 5, "source/maths/prompts": 2, "source/maths/dropped": 1,
        "source/maths/reward": 0.5, "source/maths/response_tokens/mean": 1,
        "source/maths/turns/mean": 1, "source/maths/truncated_fraction": 0,
        "source/maths/reward/failed_fraction": 0, "source/maths/rollout/failed_fraction": 0,
        "source/maths/reward/format/mean": 0.25, "source/maths/rollout/calls": 2,
        "source/code/prompts": 0,
    }  # fmt: skip
    assert source_metrics(batch, Mixture(), False) == {}


def test_row_rests_by_its_scores_and_waits_for_them() -> None:
    """Ten rows of one source, in order: ordinal 10 e + r is row r in epoch e."""

    def curriculum() -> Curriculum:
        return Curriculum(lambda ordinal: Place(0, *divmod(ordinal, 10)), rest_epochs=2)

    fresh = curriculum()
    assert fresh.begin(3) is Verdict.BEGINS
    assert fresh.begin(13) is Verdict.WAITS
    assert fresh.begin(14) is Verdict.BEGINS
    fresh.finish(3, outside=True)
    assert [fresh.begin(ordinal) for ordinal in (13, 23, 33)] == [
        Verdict.RESTS,
        Verdict.RESTS,
        Verdict.BEGINS,
    ]
    fresh.finish(33, outside=False)
    assert fresh.begin(43) is Verdict.BEGINS
    resumed = curriculum()
    resumed.resume(outside=[3, 25], scored=[14])
    assert [resumed.begin(ordinal) for ordinal in (13, 25, 35, 55)] == [
        Verdict.RESTS,
        Verdict.BEGINS,
        Verdict.WAITS,
        Verdict.WAITS,
    ]
    assert resumed.begin(14) is Verdict.BEGINS and resumed.begin(24) is Verdict.BEGINS, (
        "its scores are known, and were inside"
    )
    resumed.finish(14, outside=True)
    resumed.finish(24, outside=False)
    assert resumed.begin(34) is Verdict.BEGINS, "the first scores of 14 count"


def test_the_band_of_pass_rates() -> None:
    band = CurriculumConfig(min_pass_rate=0.25, max_pass_rate=0.75, pass_reward=0.5)
    rates = {
        passed: outside_band([0.5] * passed + [0.4] * (8 - passed), band) for passed in range(9)
    }
    assert [passed for passed, outside in rates.items() if not outside] == [2, 3, 4, 5, 6]
