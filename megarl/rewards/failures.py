"""Counts failed scores by kind, and says when there are too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from megarl.config.schema import RewardConfig
from megarl.types import Sample, SampleSummary

METRICS = {"timeout": "reward/timeouts", "error": "reward/errors", "memory": "reward/out_of_memory", "exit": "reward/exits"}
FAILED_FRACTION = "reward/failed_fraction"
_EXAMPLE_CHARS = 200

Scored = Sample | SampleSummary


def excerpt(response: str) -> str:
    """The beginning of a response, to be shown in an error."""
    return response if len(response) <= _EXAMPLE_CHARS else response[:_EXAMPLE_CHARS] + "…"


def failure_metrics(samples: Sequence[Scored]) -> dict[str, float]:
    """How many of the samples' scores failed, by kind, and which share of all that is."""
    counts = _counts(samples)
    by_kind: dict[str, float] = {key: counts[kind] for kind, key in METRICS.items()}
    return {**by_kind, FAILED_FRACTION: counts.total() / len(samples)}


def too_many_failures(config: RewardConfig, samples: Sequence[Scored]) -> str | None:
    """Why the run must stop, if more than `reward.max_failed_fraction` of the samples' scores failed: kinds, limit and an example."""
    counts = _counts(samples)
    if counts.total() <= config.max_failed_fraction * len(samples):
        return None
    share = f"of {len(samples)} samples {describe_failures([failure_metrics(samples)])}"
    failure = next(sample.failure for sample in samples if sample.failure is not None)
    limit = f"more than reward.max_failed_fraction={config.max_failed_fraction:g}"
    return f"reward.name={config.name}: {share}, {limit}; for example {failure.text!a}: {failure.reason}"


def describe_failures(rows: Sequence[Mapping[str, float]]) -> str:
    """The failures that rows of metrics count, in words; empty if there are none."""
    counts = {key: sum(row.get(key, 0) for row in rows) for key in METRICS.values()}
    told = ", ".join(f"{count:g} {key.partition('/')[2].replace('_', ' ')}" for key, count in counts.items() if count)
    return f"{sum(counts.values()):g} scores failed: {told}" if told else ""


def _counts(samples: Sequence[Scored]) -> Counter[str]:
    return Counter(sample.failure.kind for sample in samples if sample.failure is not None)
