"""The limit on the log-prob difference between trainer and generator: usual values, warnings, and
the end of a run.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from megarl.config.load import load_config
from megarl.observe.agreement import (
    DIFFERENCE,
    LIMIT,
    advisories,
    describe_differences,
    probe_limit,
    too_far,
)

REPLAYED = "trainer.routing_replay=true"


@pytest.mark.parametrize(
    "experts, overrides, limit",
    [
        (0, ["model.dtype=float32"], 1e-3),
        (0, ["model.dtype=bfloat16"], 0.05),
        (0, ["model.dtype=float32", "generator.quantization=fp8_block"], 0.15),
        (8, ["model.dtype=bfloat16"], 0.1),
        (8, ["model.dtype=bfloat16", REPLAYED], 0.05),
        (8, ["generator.quantization=fp8_tensor"], 0.3),
        (8, ["model.dtype=float32", "observe.probe_limit=0.7"], 0.7),
    ],
)
def test_limit_follows_from_precisions_of_trainer_and_engines(experts, overrides, limit):
    plan = SimpleNamespace(
        config=load_config("configs/quickstart.yaml", overrides),
        spec=SimpleNamespace(experts=experts),
    )
    assert probe_limit(plan) == limit


def test_each_group_of_engines_has_the_limit_of_its_precision():
    groups = ["generator.groups.plain.engines=1", "generator.groups.fp8.quantization=fp8_block"]
    config = load_config("configs/quickstart.yaml", groups)
    plan = SimpleNamespace(config=config, spec=SimpleNamespace(experts=None))
    assert [probe_limit(plan, group) for group in ("plain", "fp8", None)] == [1e-3, 0.15, 0.15]


def test_far_beyond_the_limit_or_not_finite_ends_the_run():
    assert too_far(0.0099, 1e-3) is None
    assert (
        "differ by 0.36 on average, more than 10 times observe.probe_limit=0.001: they do not"
        in too_far(0.36, 1e-3)
    )
    for value in (math.nan, math.inf):
        assert "are not all finite" in too_far(value, 1e6)


def test_difference_over_the_limit_is_reported():
    rows = [{"step": 0}, {DIFFERENCE: 0.001, LIMIT: 0.05}, {DIFFERENCE: 0.3, LIMIT: 0.05}]
    assert describe_differences(rows[:2]) == ""
    assert (
        describe_differences(rows)
        == "log-probs of trainer and generator differ by 0.3 in a probe, over "
        "observe.probe_limit=0.05"
    )
    assert "differ by 0.4 in 2 probes, over" in describe_differences(
        [*rows, {DIFFERENCE: 0.4, LIMIT: 0.05}]
    )


def test_terminal_and_summary_show_the_difference():
    assert advisories(
        [
            {"step": 0, "reward/mean": 0.5, DIFFERENCE: 0.3, LIMIT: 0.05},
            {"step": 1, "reward/mean": 0.5},
        ]
    ) == [
        "log-probs of trainer and generator differ by 0.3 in a probe, over observe.probe_limit=0.05"
    ]
