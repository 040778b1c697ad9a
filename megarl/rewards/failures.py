"""Counts failed scores and failed episodes by kind, and says when there are too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from megarl.config.schema import RewardConfig, RolloutConfig
from megarl.rewards.parts import ROLE, Part, excerpt, parts_of
from megarl.types import EPISODE, UNANSWERED, Failure, Sample, SampleSummary

METRICS = {"timeout": "reward/timeouts", "error": "reward/errors", "memory": "reward/out_of_memory", "exit": "reward/exits"}
FAILED_FRACTION, FAILED_EPISODES = "reward/failed_fraction", "rollout/failed_fraction"
_FAILED_KIND = "rollout/failed_"  # begins the key of the share of episodes that failed in one way

Scored = Sample | SampleSummary


def failure_metrics(samples: Sequence[Scored]) -> dict[str, float]:
    """How many of the samples' scores failed, by kind and by part of the reward, and which share of the samples that is."""
    failures = [failure for sample in samples for failure in sample.failures if _of_score(failure)]
    kinds, parts = (Counter(getattr(failure, name) for failure in failures) for name in ("kind", "part"))
    by_kind: dict[str, float] = {key: kinds[kind] for kind, key in METRICS.items()}
    by_part = {f"reward/{part}/failed": count for part, count in parts.items() if part}
    failed = sum(any(map(_of_score, sample.failures)) for sample in samples)
    return {**by_kind, **by_part, FAILED_FRACTION: failed / len(samples)}


def teacher_failures(samples: Sequence[Scored]) -> dict[str, float]:
    """How many of the samples each teacher on engines has failed to judge."""
    failures = [failure for sample in samples for failure in sample.failures if _of_teacher(failure)]
    return {f"distill/{part.removeprefix(ROLE)}/failed": count for part, count in Counter(failure.part for failure in failures).items()}


def _of_teacher(failure: Failure) -> bool:
    return failure.part.startswith(ROLE)


def of_episode(failure: Failure) -> bool:
    """Whether the episode itself has failed, not its scoring."""
    return failure.part.startswith(EPISODE)


def _of_score(failure: Failure) -> bool:
    return not _of_teacher(failure) and not of_episode(failure)


def failed_episodes(samples: Sequence[Scored]) -> list[Failure]:
    """What each episode that failed has failed of; a branch is no episode of its own."""
    return [failure for sample in samples for failure in list(filter(of_episode, sample.failures))[:1]]


def episode_metrics(samples: Sequence[Scored]) -> dict[str, float]:
    """Which share of the episodes failed."""
    return {FAILED_EPISODES: len(failed_episodes(samples)) / max(1, sum(not sample.branch for sample in samples))}


def too_many_failed_episodes(config: RolloutConfig, samples: Sequence[Scored]) -> str | None:
    """Why the run must stop, if more than `rollout.max_failed_fraction` of the samples' episodes failed: kinds, limit and an example.

    Those that sampled nothing do not count: nothing is learned of them, and rollout.args.max_unanswered is their limit.
    """
    failures = [failure for failure in failed_episodes(samples) if failure.kind != UNANSWERED]
    episodes = sum(not sample.branch for sample in samples)
    if len(failures) <= config.max_failed_fraction * episodes:
        return None
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(failure.kind for failure in failures).items())
    share = f"{len(failures)} of {episodes} episodes failed ({kinds}), more than rollout.max_failed_fraction={config.max_failed_fraction:g}"
    return f"rollout.name={config.name}: {share}; for example {failures[-1].reason!a}"


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


def describe_failed_episodes(rows: Sequence[Mapping[str, float]]) -> str:
    """Which share of the episodes failed in rows of metrics, all and by kind, in words; empty if none did."""
    if not any(row.get(FAILED_EPISODES) for row in rows):
        return ""
    kinds = dict.fromkeys(key for row in rows for key in row if key.startswith(_FAILED_KIND) and key != FAILED_EPISODES)
    shares = {key.removeprefix(_FAILED_KIND): fmean(row.get(key, 0.0) for row in rows) for key in kinds}
    told = ", ".join(f"{share:.3g}% {kind}" for kind, share in ((kind, 100 * share) for kind, share in shares.items()) if share)
    share = 100 * fmean(row.get(FAILED_EPISODES, 0.0) for row in rows)
    return f"{share:.3g}% of the episodes failed{f' ({told})' if told else ''}"


def _described(counts: Mapping[str, float]) -> str:
    told = ", ".join(f"{counts[key]:g} {key.partition('/')[2].replace('_', ' ')}" for key in METRICS.values() if counts.get(key))
    return f"{sum(counts.values()):g} scores failed: {told}" if told else ""


def told(failure: Failure) -> str:
    """Its kind, and the part of the reward that it is of."""
    return f"{failure.kind} of {failure.part}" if failure.part else failure.kind


def short(reason: str, errors: str = "") -> str:
    """Why an episode failed, as Failure.reason: with the last line of what its program wrote to standard error."""
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    return excerpt(f"{reason}: {last}" if last else reason)
