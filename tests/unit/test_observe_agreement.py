"""The metrics of agreement, against their papers' formulas in float64 on the tokens themselves; and
the reports of drift.
"""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from meters_reference import meters

from megarl.config.schema import AlgorithmConfig
from megarl.observe.agreement import (
    AGES,
    DIFFERENCE,
    ESS_LIMIT,
    HISTOGRAM_EDGES,
    LIMIT,
    advisories,
    describe_agreement,
    least_ess,
)
from megarl.observe.metrics import MetricsWriter, Row
from megarl.observe.tracking import send
from megarl.trackers.trackers import TrackerSettings, open_tracker
from megarl.trainer.step import Tally


def microbatch(
    random: np.random.Generator, lengths: list[int], scale: float
) -> tuple[torch.Tensor, Any]:
    """(log-probs, MicroBatch) with padding, an environment's tokens, ages of every class, and
    garbage outside the mask.
    """
    tokens = sum(lengths)
    mask = random.random(tokens) < 0.8
    mask[: lengths[0]] = False  # no token of the first sequence counts
    mu = -random.exponential(2.0, tokens).astype(np.float32)
    of_pi = (mu + scale * random.standard_t(2, tokens)).clip(max=0).astype(np.float32)
    mu[~mask] = 3e30
    boundaries = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    ages = torch.from_numpy(
        random.choice([0, 0, 0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 90], tokens).astype(np.int32)
    )
    fields = dict(
        loss_mask=torch.from_numpy(mask),
        mu_logprobs=torch.from_numpy(mu),
        ages=ages,
        boundaries=boundaries,
    )
    return torch.from_numpy(of_pi), SimpleNamespace(**fields)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 0.1, 3.0])
def test_meters_equal_their_formulas(scale: float) -> None:
    random = np.random.default_rng(1)
    tally = Tally(torch.device("cpu"))
    sequences = []
    for lengths in ([4, 300, 1, 700], [5, 2, 2], [9, 1000]):
        logprobs, fields = microbatch(random, lengths, scale)
        tally.add(logprobs, fields)
        for start, end in zip(fields.boundaries[:-1], fields.boundaries[1:]):
            mask = fields.loss_mask[start:end]
            sequences.append(
                [
                    values[start:end][mask].numpy()
                    for values in (logprobs, fields.mu_logprobs, fields.ages)
                ]
            )
    totals = tally.totals(True)
    expected, histograms = meters(sequences)
    metrics = totals.metrics()
    assert metrics.keys() == expected.keys()
    assert {name.split("/")[1] for name in metrics} > set(AGES)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(
            value, rel=0.015 if "p99" in name else 1e-9, abs=1e-7 if "p99" in name else 1e-300
        ), name
    assert {name: histogram.counts for name, histogram in totals.histograms().items()} == histograms


def test_percentile_is_exact_at_both_ends_of_its_scale() -> None:
    """And it is never above the maximum."""
    for size, expected in ((0.0, 0.0), (2**-29, 2**-29), (5000.0, 5000.0), (0.25, 0.25)):
        tally = Tally(torch.device("cpu"))
        ones = torch.ones(3, dtype=torch.bool)
        same = dict(
            loss_mask=ones,
            ages=torch.zeros(3, dtype=torch.int32),
            boundaries=torch.tensor([0, 3], dtype=torch.int32),
        )
        tally.add(torch.full((3,), -size), SimpleNamespace(mu_logprobs=torch.zeros(3), **same))
        metrics = tally.totals(True).metrics()
        assert metrics["agreement/abs_diff_p99"] == pytest.approx(expected, rel=0.015)
        assert metrics["agreement/abs_diff_p99"] <= metrics["agreement/abs_diff_max"] == size


def test_a_token_impossible_for_the_trainer_is_not_hidden() -> None:
    tally = Tally(torch.device("cpu"))
    ones = torch.ones(2, dtype=torch.bool)
    fields = dict(
        loss_mask=ones,
        ages=torch.tensor([0, 2]),
        boundaries=torch.tensor([0, 2], dtype=torch.int32),
    )
    tally.add(
        torch.tensor([-1.0, -math.inf]),
        SimpleNamespace(mu_logprobs=torch.tensor([-1.0, -1.0]), **fields),
    )
    metrics = tally.totals(True).metrics()
    assert (
        metrics["agreement/abs_diff_mean"]
        == metrics["agreement/age_2/abs_diff_max"]
        == metrics["agreement/kl_k3"]
        == math.inf
    )
    assert metrics["agreement/ess"] == 0.5
    assert metrics["agreement/age_0/abs_diff_mean"] == 0


def test_without_tokens_there_are_no_meters() -> None:
    assert (
        Tally(torch.device("cpu")).totals(True).metrics()
        == Tally(torch.device("cpu")).totals(True).histograms()
        == {}
    )


def test_histograms_are_written_and_drawn(tmp_path) -> None:
    tally = Tally(torch.device("cpu"))
    tally.add(*microbatch(np.random.default_rng(2), [3, 50], 0.1))
    totals = tally.totals(True)
    writer = MetricsWriter(tmp_path)
    writer.write(7, totals.metrics(), histograms=totals.histograms())
    writer.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert sum(row["agreement/histogram"]) == row["agreement/tokens"]
    assert len(row["agreement/histogram"]) == len(HISTOGRAM_EDGES) + 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = open_tracker("tensorboard", TrackerSettings(tmp_path, project="", name="", config={}))
    send(board, row)
    board.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    (drawn,) = events.Histograms("agreement/histogram")
    assert drawn.histogram_value.num == row["agreement/tokens"]
    assert drawn.histogram_value.bucket == row["agreement/histogram"]
    assert events.Scalars("agreement/ess")[0].value == pytest.approx(row["agreement/ess"])


def rows(
    *differences: float,
    limit: float = 0.05,
    ess: float = 0.98,
    tokens: int = 400,
    key: str = "age_0",
) -> list[Row]:
    metrics = [
        {
            "agreement/tokens": tokens,
            "agreement/ess": ess,
            "staleness/mean": 0.0,
            f"agreement/{key}/tokens": tokens,
            f"agreement/{key}/abs_diff_mean": difference,
        }
        for difference in differences
    ]
    return [{"step": step, LIMIT: limit, **row} for step, row in enumerate(metrics)]


NOISE = np.random.default_rng(3).lognormal(0, 0.5, 500)


@pytest.mark.parametrize(
    "ordinary",
    [
        rows(*(2e-3 * NOISE)),
        rows(*(2e-3 * NOISE * np.linspace(1, 3, 500))),  # log-probs get sharper
        rows(*(1e-7 * NOISE * np.linspace(1, 100, 500)), limit=1e-3),  # rounding in float32
        rows(*(0.2 * NOISE), key="age_1"),  # a difference of weights
        rows(*(2e-3 * NOISE), 9.0),  # one outlier step
        rows(*(0.5 * NOISE), tokens=5),
        # keys and values of older weights
        [row | {"agreement/tokens": 500} for row in rows(*(0.2 * NOISE))],
        [{"step": 0, "reward/mean": 0.5}],
    ],
)
def test_ordinary_run_has_no_advisory(ordinary: list[Row]) -> None:
    assert [
        describe_agreement(ordinary[:end])
        for end in range(1, len(ordinary) + 1)
        if describe_agreement(ordinary[:end])
    ] == []


def test_drift_is_advised() -> None:
    drifting = rows(*(2e-3 * NOISE[:400] * np.linspace(1, 12, 400)))
    advised_steps = [step for step in range(400) if describe_agreement(drifting[: step + 1])]
    assert (
        advised_steps and 60 < advised_steps[0] < 300 and advised_steps[-50:] == [*range(350, 400)]
    ), "once it has begun to hold, it holds"
    assert "it was 0.0025 after the first steps: they drift apart" in describe_agreement(
        drifting[:350]
    )
    probes = [
        {"step": 10 * step, LIMIT: 0.05, DIFFERENCE: 1e-3 if step < 15 else 0.02}
        for step in range(30)
    ]
    assert "on probes (median of the last 10)" in describe_agreement(probes)


def test_difference_over_the_limit_and_small_ess_are_advised() -> None:
    assert "differ by 0.2 on tokens" in describe_agreement(rows(0.2))
    # one step behind: only the first step has tokens of equal weights
    after = [*rows(0.2), *({"step": step} for step in range(1, 300))]
    (advisory,) = advisories(after)
    assert (
        "(median of the last 1), over observe.probe_limit=0.05: they do not compute the same"
        in advisory
    )
    assert describe_agreement(rows(math.nan))
    assert describe_agreement(rows(math.inf))
    assert describe_agreement(rows(*(2e-3 * NOISE[:9]), ess=0.2)) == ""
    assert "the effective sample size is 20%" in describe_agreement(
        rows(*(2e-3 * NOISE[:10]), ess=0.2)
    )


@pytest.mark.parametrize(
    ("name", "ess", "warned"),
    [
        ("reinforce", 0.95, False),
        ("reinforce", 0.85, True),
        ("aipo", 0.85, False),
        ("aipo", 0.65, True),
        ("grpo", 0.65, True),
        ("aipo", math.nan, True),
    ],
)
def test_old_samples_are_advised_by_the_rule_of_the_loss(name: str, ess: float, warned: bool):
    limit = least_ess(AlgorithmConfig(name=name))
    steps = [row | {ESS_LIMIT: limit, "staleness/mean": 7.4} for row in rows(*[2e-3] * 12, ess=ess)]
    advised = [bool(describe_agreement(steps[: end + 1])) for end in range(len(steps))]
    assert advised == [False] * 9 + [warned] * 3
    if warned:
        text = describe_agreement(steps)
        assert f"the effective sample size is {0 if math.isnan(ess) else ess:.0%}" in text
        assert "samples 7.4 updates old" in text
        assert ("a loss that corrects for pi/mu" in text) == (name == "reinforce")
