"""`python tests/studies staleness`: what counts as the same reward. These tests make no runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from staleness import SETTINGS, SYNCHRONOUS, BufferSetting, Comparison, RunResult, compare

BASELINE = (0.98, 0.90, 0.95)  # seeds differ more than settings


def results(**differences: tuple[float, ...]) -> list[RunResult]:
    """Results of the baseline and, by name, of settings with the given difference for each seed."""
    settings = {setting.name: setting for setting in SETTINGS}
    rows = {SYNCHRONOUS.name: (0.0,) * len(BASELINE), **differences}
    return [
        RunResult(
            settings[name].capacity,
            settings[name].max_staleness,
            seed,
            BASELINE[seed] + difference,
            1.0,
            1.0,
            2.0,
            0.0,
        )
        for name, row in rows.items()
        for seed, difference in enumerate(row)
    ]


def judged(**differences: tuple[float, ...]) -> dict[str, Comparison]:
    return {
        BufferSetting(comparison.capacity, comparison.max_staleness).name: comparison
        for comparison in compare(results(**differences))
    }


ONE = BufferSetting(1, 1).name
FOUR = BufferSetting(4, 8).name
FREE = BufferSetting(None, 8).name


def test_runs_are_paired_by_seed():
    """Seeds differ by 0.08, so without pairs the standard error would be 0.03."""
    row = (0.002, -0.006, 0.001)
    comparison = judged(**{ONE: row})[ONE]
    assert comparison.difference == pytest.approx(np.mean(row))
    assert comparison.noise == pytest.approx(np.std(row, ddof=1) / math.sqrt(3))
    assert comparison.at_most == pytest.approx(0.001 + 2 * comparison.noise)
    assert comparison.same
    assert compare(list(reversed(results(**{ONE: row}))))[0].difference == pytest.approx(
        comparison.difference
    )


def test_one_collapsed_seed_is_not_taken_for_noise():
    """The second setting's mean of -0.26 is within two of its own standard errors of 0.26."""
    got = judged(**{ONE: (0.002, -0.003, 0.001), FOUR: (0.0, -0.77, 0.0)})
    assert got[ONE].same
    assert not got[FOUR].same
    assert abs(got[FOUR].difference) < 2 * got[FOUR].noise


def test_shared_loss_counts_above_the_spread_of_seeds():
    got = judged(
        **{
            ONE: (-0.079, -0.079, -0.079),
            FOUR: (-0.081, -0.081, -0.081),
            FREE: (0.081, 0.081, 0.081),
        }
    )
    assert got[ONE].same
    assert not got[FOUR].same
    assert not got[FREE].same
