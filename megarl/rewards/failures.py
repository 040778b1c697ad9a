"""Counts failed scores by kind, and says when there are too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from megarl.config.schema import RewardConfig
from megarl.rewards.parts import ROLE, Part, parts_of
from megarl.types import Failure, Sample, SampleSummary

METRICS = {"timeout": "reward/timeouts", "error": "reward/errors", "memory": "reward/out_of_memory", "exit": "reward/exits"}
FAILED_FRACTION = "reward/failed_fraction"

Scored = Sample | SampleSummary


def failure_metrics(samples: Sequence[Scored]) -> dict[str, float]:
    """How many of the samples' scores failed, by kind and by part of the reward, and which share of the samples that is."""
    failures = [failure for sample in samples for failure in sample.failures if not _of_teacher(failure)]
    kinds, parts = (Counter(getattr(failure, name) for failure in failures) for name in ("kind", "part"))
    by_kind: dict[str, float] = {key: kinds[kind] for kind, key in METRICS.items()}
    by_part = {f"reward/{part}/failed": count for part, count in parts.items() if part}
    failed = sum(not all(map(_of_teacher, sample.failures)) for sample in samples)
    return {**by_kind, **by_part, FAILED_FRACTION: failed / len(samples)}


def teacher_failures(samples: Sequence[Scored]) -> dict[str, float]:
    """How many of the samples each teacher on engines has failed to judge."""
    failures = [failure for sample in samples for failure in sample.failures if _of_teacher(failure)]
    return {f"distill/{part.removeprefix(ROLE)}/failed": count for part, count in Counter(failure.part for failure in failures).items()}


def _of_teacher(failure: Failure) -> bool:
    return failure.part.startswith(ROLE)


def too_many_failures(
    config: RewardConfig, samples: Sequence[Scored], parts: Sequence[Part] | None = None, teachers: Iterable[str] = ()
) -> str | None:
    """Why the run must stop, if more than `reward.max_failed_fraction` of the samples' scores, or of a part of these, failed, or of what a
    teacher was asked: kinds, limit and an example. `parts`: of the reward, if it is not that of training."""
    asked = [(part.part, part.setting) for part in parts or parts_of(config)] + [(f"{ROLE}{name}", f"{ROLE}{name}") for name in teachers]
    for name, setting in asked:
        failures = [failure for sample in samples for failure in sample.failures if failure.part == name]
        if len(failures) > config.max_failed_fraction * len(samples):
            share = f"of {len(samples)} samples {_described(Counter(METRICS[failure.kind] for failure in failures))}"
            limit = f"more than reward.max_failed_fraction={config.max_failed_fraction:g}"
            return f"{setting}: {share}, {limit}; for example {failures[0].text!a}: {failures[0].reason}"
    return None


def describe_failures(rows: Sequence[Mapping[str, float]]) -> str:
    """The failures that rows of metrics count, in words; empty if there are none."""
    return _described({key: sum(row.get(key, 0) for row in rows) for key in METRICS.values()})


def _described(counts: Mapping[str, float]) -> str:
    told = ", ".join(f"{counts[key]:g} {key.partition('/')[2].replace('_', ' ')}" for key in METRICS.values() if counts.get(key))
    return f"{sum(counts.values()):g} scores failed: {told}" if told else ""


def told(failure: Failure) -> str:
    """Its kind, and the part of the reward that it is of."""
    return f"{failure.kind} of {failure.part}" if failure.part else failure.kind
