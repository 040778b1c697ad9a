"""`python tests/studies staleness CONFIG`: does the reward depend on how far generation runs ahead?

It makes real runs over settings and seeds.

Every run is a `megarl train` with the shipped program. Runs with the same seed begin from the same
warm start. The same command continues an interrupted table: it keeps complete runs and continues
interrupted ones.

With capacity 0 no sample is stale, and with capacity 1 no sample is older than 1 step, whatever the
bound. So each has one row; capacity 0 is the baseline. Runs are compared in pairs with the same
seed, which share data, order and warm start. *difference* is the mean over the pairs, and *noise*
its standard error. *at most* is |difference| + 2 noise: with three seeds a one-sided 91 % bound by
Student's t. A setting reaches the baseline's reward within noise if *at most* does not exceed the
range of the baseline's own seeds. So noise counts against a setting: a run that collapses increases
the noise.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whole_runs import check_settings, note_settings, run_megarl

from megarl.config.keys import yaml_text
from megarl.config.load import load_config
from megarl.evaluation.scores import read_results
from megarl.observe.metrics import METRICS_FILE, read_metrics
from megarl.plan.resolve import RunPlan, resolve

LAST = 10  # the reward is the mean of the last steps


@dataclass(frozen=True)
class BufferSetting:
    capacity: int | None
    max_staleness: int | None

    @property
    def overrides(self) -> list[str]:
        return [f"async.{name}={yaml_text(value)}" for name, value in asdict(self).items()]

    @property
    def name(self) -> str:
        return "-".join(
            override.removeprefix("async.").replace("=", "_") for override in self.overrides
        )


SYNCHRONOUS = BufferSetting(0, None)
SETTINGS = (
    SYNCHRONOUS,
    BufferSetting(1, 1),
    *(BufferSetting(capacity, bound) for capacity in (4, None) for bound in (1, 2, 8)),
)


@dataclass(frozen=True)
class RunResult:
    """The result of one run."""

    capacity: int | None
    max_staleness: int | None
    seed: int
    reward: float  # mean of the last steps
    pass_at_1: float  # of the last weights, on held-out prompts, greedy
    staleness_mean: float  # in steps, over all samples trained on
    staleness_max: float
    rejected: float  # groups that were too old and generated again


@dataclass(frozen=True)
class Comparison:
    """A setting against the baseline: differences of reward between runs with the same seed."""

    capacity: int | None
    max_staleness: int | None
    difference: float  # mean over seeds
    noise: float  # standard error of the mean; NaN with one seed
    at_most: float  # |difference| + 2 noise
    same: bool  # at_most does not exceed the range of the baseline's seeds


def run(config: str, overrides: Sequence[str], runs: Path, seeds: int, as_json: bool) -> None:
    """Prints a table, or one JSON object.

    `runs`: the folder of all runs. Raises ConfigError; RuntimeError if a run fails.
    """
    jobs = [(setting, seed) for seed in range(seeds) for setting in SETTINGS]
    # wrong settings show before anything starts
    plans = {job: _plan(config, overrides, runs, *job) for job in jobs}
    settings = load_config(config, overrides)
    check_settings(runs, settings)
    note_settings(runs, settings)
    results = []
    for remaining_jobs, (job, plan) in zip(range(len(jobs), 0, -1), plans.items()):
        print(f"{plan.config.run_dir}; {remaining_jobs} runs to go", file=sys.stderr)
        for command in ("sft", "train"):
            run_megarl(
                command, config, [*overrides, *_overrides(runs, *job)], Path(plan.config.run_dir)
            )
        results.append(_result(*job, plan))
    rows = [asdict(result) for result in results]
    compared = [asdict(comparison) for comparison in compare(results)]
    facts = {
        "config": config,
        "overrides": list(overrides),
        "last_steps": LAST,
        "runs": rows,
        "compared": compared,
    }
    print(json.dumps(facts) if as_json else render(facts))


def _plan(
    config: str, overrides: Sequence[str], runs: Path, setting: BufferSetting, seed: int
) -> RunPlan:
    return resolve(load_config(config, [*overrides, *_overrides(runs, setting, seed)]), "sft")


def _overrides(runs: Path, setting: BufferSetting, seed: int) -> list[str]:
    seeded = runs / f"seed_{seed}"
    return [
        f"seed={seed}",
        f"run_dir={seeded / setting.name}",
        f"sft.output={seeded / 'warm_start'}",
        *setting.overrides,
    ]


def _result(setting: BufferSetting, seed: int, plan: RunPlan) -> RunResult:
    run_dir = Path(plan.config.run_dir)
    rows = read_metrics(run_dir / METRICS_FILE)
    return RunResult(
        setting.capacity,
        setting.max_staleness,
        seed,
        reward=statistics.fmean(row["reward/mean"] for row in rows[-LAST:]),
        pass_at_1=read_results(run_dir)[-1]["pass@1"],
        staleness_mean=statistics.fmean(row["staleness/mean"] for row in rows),
        staleness_max=max(row["staleness/max"] for row in rows),
        rejected=sum(row["staleness/rejected"] for row in rows),
    )


def compare(results: Sequence[RunResult]) -> list[Comparison]:
    """A comparison for each setting except the baseline, in the order of `results`.

    Raises KeyError if a run has no baseline with its seed.
    """
    rewards: dict[BufferSetting, dict[int, float]] = {}
    for result in results:
        rewards.setdefault(BufferSetting(result.capacity, result.max_staleness), {})[
            result.seed
        ] = result.reward
    baseline = rewards.pop(SYNCHRONOUS)
    spread = max(baseline.values()) - min(baseline.values())
    differences = {
        setting: [value - baseline[seed] for seed, value in by_seed.items()]
        for setting, by_seed in rewards.items()
    }
    return [_comparison(setting, by_seed, spread) for setting, by_seed in differences.items()]


def _comparison(setting: BufferSetting, differences: Sequence[float], spread: float) -> Comparison:
    mean = statistics.fmean(differences)
    noise = (
        statistics.stdev(differences) / math.sqrt(len(differences))
        if len(differences) > 1
        else math.nan
    )
    at_most = abs(mean) + 2 * noise
    return Comparison(
        setting.capacity, setting.max_staleness, mean, noise, at_most, at_most <= spread
    )


def render(facts: Mapping[str, Any]) -> str:
    """A Markdown table with a row and a verdict for each setting."""
    by_setting: dict[tuple, list[Mapping[str, Any]]] = {}
    for result in facts["runs"]:
        by_setting.setdefault((result["capacity"], result["max_staleness"]), []).append(result)
    compared = {
        (comparison["capacity"], comparison["max_staleness"]): comparison
        for comparison in facts["compared"]
    }
    lines = [
        f"| capacity | max_staleness | reward of the last {facts['last_steps']} steps, by seed | "
        "mean | difference | noise | at most "
        "| same | pass@1 | staleness mean / max | rejected |",
        "|" + "---|" * 11,
        *(
            _row(capacity, bound, results, compared.get((capacity, bound)))
            for (capacity, bound), results in by_setting.items()
        ),
    ]
    same = sum(comparison["same"] for comparison in compared.values())
    verdict = (
        f"{same} of {len(compared)} settings reach the reward of the first row, within the "
        "range of its own seeds."
    )
    return "\n".join([*lines, "", verdict])


def _row(
    capacity: int | None,
    bound: int | None,
    results: Sequence[Mapping[str, Any]],
    compared: Mapping[str, Any] | None,
) -> str:
    mean = {
        name: statistics.fmean(result[name] for result in results)
        for name in ("reward", "pass_at_1", "staleness_mean", "rejected")
    }
    judged = ["–"] * 4
    if compared is not None:
        judged = [
            f"{compared['difference']:+.3f}",
            f"{compared['noise']:.3f}",
            f"{compared['at_most']:.3f}",
        ]
        judged.append("yes" if compared["same"] else "no")
    cells = [
        "unbounded" if capacity is None else str(capacity),
        "–" if bound is None else str(bound),
        " ".join(f"{result['reward']:.3f}" for result in results),
        f"{mean['reward']:.3f}",
        *judged,
        f"{mean['pass_at_1']:.3f}",
        f"{mean['staleness_mean']:.2f} / {max(result['staleness_max'] for result in results):.0f}",
        f"{mean['rejected']:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"
