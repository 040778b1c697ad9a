"""`megarl plan --simulate`: runs a config in virtual time, once or for all values of a sweep, and
names what limits its speed.
"""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megarl.base.files import write_whole
from megarl.base.results import CommandResult, aligned
from megarl.config.errors import ConfigError, RunError
from megarl.config.load import dump_config
from megarl.config.schema import GeneratorConfig, RunConfig
from megarl.estimate.estimate import check_longest, estimate, with_kv_caches
from megarl.estimate.memory import Workload
from megarl.estimate.report import CLOSE, not_counted
from megarl.observe.metrics import SIMULATED_FILE, MetricsWriter
from megarl.observe.status import TraceWriter
from megarl.plan.checks import refused_by_train
from megarl.plan.resolve import RunPlan
from megarl.plan.topologies import engine_groups
from megarl.simulation.measured import measured_models
from megarl.simulation.run import (
    BrokenGuarantee,
    Models,
    SimulationTotals,
    Tell,
    ignore,
    simulate,
    with_simulation,
)
from megarl.simulation.virtual import Deadlock

WARM_UP = 5  # first steps that do not count, but at most a fifth of all
EVERY_S = 5.0  # interval of progress messages
PART = 0.01  # share of a step from which a difference from the plan is named
ROOM = 0.6  # below this share of the requests that it could run, an engine has too few
Configure = Callable[[Sequence[str]], RunPlan]  # the plan of the config with further overrides


@dataclass(frozen=True)
class Summary:
    """The result of a simulated run.

    Shares of the trainer and of waits leave out the first steps; the engines' share covers the
    whole time, with restarts.
    """

    step_p50_s: float
    step_p95_s: float
    tokens_per_s: float  # tokens trained on, over the whole run with failures and restarts
    trainer_busy: float
    engines_busy: float
    requests: float  # mean number that an engine runs at a time while it is busy
    waits_for_batch: float  # share of the trainer's time
    waits_for_engines: float  # share of the trainer's time, until engines are ready for an update
    waits_for_weights: float  # share of the time of places in flight
    waits_for_checkpoints: float  # share of the trainer's time
    step_parts_s: dict[str, float]  # of a mean step, in seconds; together they are the step
    staleness: dict[str, float]  # age -> share of the tokens
    rejected: int  # rejected groups
    discarded: float  # share of sampled tokens that are not trained on
    # mean length of the first half's responses, relative to the first as many prompts, minus 1
    length_bias: float
    retracted: int  # requests retracted for lack of KV cache
    engine_failures: int
    trainer_failures: int
    goodput: float  # share of the time not lost to failures and restarts
    steps: int
    hours: float  # simulated time


def summarize(plan: RunPlan, totals: SimulationTotals) -> Summary:
    rows = totals.rows[min(WARM_UP, len(totals.rows) // 5) :]
    took = sum(row["time/step_s"] for row in rows)
    share = {
        name: sum(row[f"time/{name}_s"] for row in rows) / took
        for name in ("train", "trainer_wait", "weights_wait", "generator_wait", "save")
    }
    steps = [row["time/step_s"] for row in rows]
    mean_s = took / len(rows)
    parts_s = {
        "training": share["train"] * mean_s,
        "waits for batches": (share["trainer_wait"] - share["weights_wait"]) * mean_s,
        "waits for engines": share["weights_wait"] * mean_s,
        "checkpoints": share["save"] * mean_s,
    }
    parts_s["updates"] = mean_s - sum(parts_s.values())
    trained = sum(int(lengths.sum()) for lengths in totals.lengths)
    half = max(1, len(totals.lengths) // 2)
    first_half_mean = np.concatenate(totals.lengths[:half]).mean()
    ages = totals.ages
    return Summary(
        step_p50_s=float(np.median(steps)),
        step_p95_s=float(np.quantile(steps, 0.95)),
        tokens_per_s=trained / totals.end_s,
        trainer_busy=share["train"],
        engines_busy=totals.busy_s / totals.end_s / plan.engines,
        requests=totals.running_s / totals.busy_s if totals.busy_s else 0.0,
        waits_for_batch=share["trainer_wait"] - share["weights_wait"],
        waits_for_engines=share["weights_wait"],
        waits_for_weights=share["generator_wait"],
        waits_for_checkpoints=share["save"],
        step_parts_s=parts_s,
        staleness={str(age): tokens / ages.total() for age, tokens in sorted(ages.items())},
        rejected=sum(row["staleness/rejected"] for row in totals.rows),
        discarded=max(0.0, 1 - trained / totals.sampled),
        length_bias=float(first_half_mean / totals.expected_length - 1),
        retracted=totals.retracted,
        engine_failures=totals.engine_failures,
        trainer_failures=totals.trainer_failures,
        goodput=1 - totals.lost_s / totals.end_s,
        steps=len(totals.rows),
        hours=totals.end_s / 3600,
    )


def run_simulation(
    configure: Configure,
    *,
    sweep: Sequence[str] = (),
    source: str | None = None,
    output: str | None = None,
) -> CommandResult:
    """The result of a simulated run. With `sweep`, `rows` has one of each combination of the swept
    values, and `take` the settings of the one to choose.

    Its `refused` says what megarl train would refuse.

    `sweep`: key=value,value,… each. `source`: the folder of a run whose measured times replace the
    planner's. `output`: a folder for the simulated run, which `megarl report` opens. Raises
    ConfigError, RunError.
    """
    combinations = _combinations(sweep)
    if output and sweep:
        raise ConfigError(
            f"--output {output}: must be left out with --sweep: it is for one simulated run"
        )
    # checks all of them before the first begins
    plans = list(map(configure, combinations))
    _check(plans)
    summaries = []
    gc.freeze()  # garbage collections then skip objects from imports
    for overrides, plan in zip(combinations, plans):
        started_s = time.monotonic()
        summaries.append(_simulate_once(plan, source, output))
        if sweep:
            print(f"{' '.join(overrides)}: {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    rows = []
    for overrides, summary, plan in zip(combinations, summaries, plans):
        refused = refused_by_train(plan.config, plan.spec)
        rows.append({"settings": overrides, **asdict(summary), "refused": refused})
    if sweep:
        best = best_index(summaries)
        text = "\n".join(table(combinations, summaries))
        return CommandResult({"rows": rows, "take": combinations[best]}, text)
    lines = render(plans[0], summaries[0])
    if output:
        lines.append(f"page       megarl report {output}")
    return CommandResult(rows[0], "\n".join(lines))


def _simulate_once(plan: RunPlan, source: str | None, output: str | None) -> Summary:
    models = Models.of
    if source:
        models = partial(measured_models, run=Path(source))
    with ExitStack() as files:
        tell = _timeline(plan, Path(output), files) if output else ignore
        try:
            totals = simulate(plan, models, tell, follow=ProgressPrinter())
        except (Deadlock, BrokenGuarantee) as error:
            if output:
                shutil.rmtree(output)  # the folder was made for this run
            raise RunError(f"the simulated run failed: {error}") from error
        if output:
            writer = MetricsWriter(output)
            files.callback(writer.close)
            for row in totals.rows:
                writer.write(
                    row["step"], {key: value for key, value in row.items() if key != "step"}
                )
    return summarize(with_simulation(plan), totals)


class ProgressPrinter:
    """Prints the progress of a simulated run on stderr every few seconds."""

    def __init__(self) -> None:
        self._printed_s = time.monotonic()

    def __call__(self, steps: int, max_steps: int) -> None:
        if steps < max_steps and time.monotonic() - self._printed_s >= EVERY_S:
            self._printed_s = time.monotonic()
            print(f"simulated {steps} of {max_steps} steps", file=sys.stderr)


def _check(plans: Sequence[RunPlan]) -> None:
    for plan in plans:
        check_longest(plan.config, plan.spec)
        overfull = estimate(plan.config, plan.spec).overfull
        if overfull:
            side, gib = next(iter(overfull.items()))
            raise ConfigError(
                f"the {side} is {gib:.1f} GiB per GPU too large, so it is not simulated; megarl "
                "plan proposes what fits"
            )


def _timeline(plan: RunPlan, folder: Path, files: ExitStack) -> Tell:
    """Returns a function that writes the spans of the page's timeline."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror}") from error
    write_whole(folder / SIMULATED_FILE, json.dumps({"simulated": True}))
    write_whole(folder / "config.yaml", dump_config(plan.config))
    writers = {
        name: TraceWriter(folder, name) for name in ("launcher.0", "trainer.0", "generator.0")
    }
    for writer in writers.values():
        files.callback(writer.close)

    def tell(
        process: str,
        activity: str,
        began_s: float,
        ended_s: float,
        track: str = "main",
        **details: Any,
    ) -> None:
        writers[process].add(activity, began_s, ended_s, track, **details)

    return tell


def _combinations(sweep: Sequence[str]) -> list[list[str]]:
    """The overrides of every combination. Raises ConfigError."""
    axes = []
    for axis_text in sweep:
        key, equals, values = axis_text.partition("=")
        if not equals or not all(values.split(",")):
            raise ConfigError(f"--sweep {axis_text}: must be KEY=VALUE,VALUE,…")
        if any(key == axis[0].partition("=")[0] for axis in axes) or len(
            set(values.split(","))
        ) < len(values.split(",")):
            raise ConfigError(
                f"--sweep {axis_text}: must give a key, and each of its values, only once"
            )
        axes.append([f"{key}={value}" for value in values.split(",")])
    return list(map(list, itertools.product(*axes)))


def render(plan: RunPlan, summary: Summary) -> list[str]:
    shares = [(age, share) for age, share in summary.staleness.items() if share >= 0.005]
    by_age = ", ".join(f"{age}: {share:.0%}" for age, share in shares)
    waits = (
        f"for batches {summary.waits_for_batch:.0%}, for engines to take weights "
        f"{summary.waits_for_engines:.0%}, for checkpoints {summary.waits_for_checkpoints:.0%}"
    )
    lines = [
        f"simulated  {summary.steps} steps, {summary.hours:.1f} hours, by the run's own scheduler "
        "in virtual time",
        f"a step     {summary.step_p50_s:.4g} s (median), {summary.step_p95_s:.4g} s (95 %)",
        f"adds       {added_to_plan(plan, summary)}",
        f"tokens     {summary.tokens_per_s:,.0f} trained on a second; {summary.discarded:.1%} of "
        "those sampled are not trained on",
        f"busy       trainer {summary.trainer_busy:.0%}, engines {summary.engines_busy:.0%}",
        f"waits      the trainer {waits}; places in flight for weights "
        f"{summary.waits_for_weights:.0%}",
        f"staleness  of tokens, in versions: {by_age}; {summary.rejected} groups rejected",
        "lengths    responses that the first half of the steps trains on are "
        f"{summary.length_bias:+.1%} longer than the policy's",
    ]
    if summary.retracted:
        lines.append(
            f"KV cache   {summary.retracted} requests gave their place to others, and were "
            "prefilled again"
        )
    if summary.engine_failures or summary.trainer_failures:
        lost = (
            f"{summary.engine_failures} engines and {summary.trainer_failures} trainer ranks failed"
        )
        lines.append(
            f"failures   {lost}; {summary.goodput:.1%} of the time was neither undone nor spent on "
            "restarts"
        )
    for problem in refused_by_train(plan.config, plan.spec):
        lines.append(f"refused    by megarl train: {problem}")
    ignored_settings = not_counted(plan.config)
    for role in plan.served:
        ignored_settings.append(f"scores of {role.name} (set plan.simulation.score_s)")
    if ignored_settings:
        lines.append(f"not counted: {', '.join(ignored_settings)}")
    return [*lines, f"advice     {advice(plan, summary)}"]


def added_to_plan(plan: RunPlan, summary: Summary) -> str:
    """What a mean step has more than the plan's step, by parts in seconds."""
    planned = estimate(plan.config, plan.spec)
    training_s = planned.train.total + planned.glue_s
    planned_parts_s = {
        "training": training_s,
        "waits for batches": planned.step_s - training_s - planned.sync_s,
        "updates": planned.sync_s,
    }
    step_s = sum(summary.step_parts_s.values())
    shown = []
    for name, seconds in summary.step_parts_s.items():
        added_s = seconds - planned_parts_s.get(name, 0.0)
        if abs(added_s) > PART * step_s:
            shown.append(f"{name} {added_s:+.2g} s")
    parts = f": {', '.join(shown)}; the simulated step is the better estimate" if shown else ""
    more_s = step_s - planned.step_s
    return f"{more_s:+.2g} s in the mean to the plan's step of {planned.step_s:.4g} s{parts}"


def advice(plan: RunPlan, summary: Summary) -> str:
    """One sentence on what to change first, with its reason."""
    if summary.goodput < 0.9:
        lost = f"failures cost {1 - summary.goodput:.0%} of the time"
        return (
            "restart faster, or write checkpoints more often, while writing one takes less "
            f"than the steps between them: {lost}"
        )
    if summary.waits_for_checkpoints > 0.1:
        return (
            "write checkpoints less often (checkpoint.every), or beside training: the trainer "
            f"waits {summary.waits_for_checkpoints:.0%} of the time for them"
        )
    if plan.config.cluster.share_gpus:
        return _advice_on_shared_gpus(plan)
    if summary.waits_for_batch > 0.1 and summary.waits_for_weights > 0.1:
        waits_text = (
            f"the trainer {summary.waits_for_batch:.0%} of the time for batches, the engines "
            f"{summary.waits_for_weights:.0%} for weights"
        )
        return (
            f"raise {_depth(plan.config)} or use another async.partial_rollout: both sides "
            f"wait, {waits_text}"
        )
    if summary.waits_for_engines > 0.1:
        return (
            "use async.partial_rollout=in_flight: the trainer waits "
            f"{summary.waits_for_engines:.0%} of the time for rollouts to finish"
        )
    could_run = _could_run(plan)
    if (
        summary.waits_for_batch > 0.1
        and summary.requests < ROOM * could_run
        and plan.config.async_.capacity != 0
    ):
        reason = (
            f"the trainer waits {summary.waits_for_batch:.0%} of the time for batches, and an "
            f"engine runs {summary.requests:.0f} requests"
        )
        return (
            f"raise async.max_in_flight and {_depth(plan.config)}: {reason} at a time, of "
            f"{could_run:.0f} that it could"
        )
    if summary.waits_for_batch > 0.1:
        return (
            f"give the engines more GPUs: the trainer waits {summary.waits_for_batch:.0%} of the "
            "time for batches"
        )
    if summary.waits_for_weights > 0.1:
        return (
            f"give the trainer more GPUs: places in flight wait {summary.waits_for_weights:.0%} "
            "of the time for newer weights"
        )
    return "leave it: neither side waits a tenth of the time"


def _advice_on_shared_gpus(plan: RunPlan) -> str:
    """Neither side can get more GPUs from the other: what the longer one takes counts."""
    planned = estimate(plan.config, plan.spec)
    sides_s = {"generation": planned.scored_s, "training": planned.train.total}
    longer, shorter = sorted(sides_s, key=lambda side: -sides_s[side])
    return (
        f"shorten {longer}, or take more GPUs: on the shared ones {longer} takes "
        f"{sides_s[longer]:.3g} s a step by itself, {shorter} {sides_s[shorter]:.3g} s"
    )


def _depth(config: RunConfig) -> str:
    """The setting that bounds how far rollouts run ahead."""
    capacity = config.async_.capacity
    staleness = config.async_.max_staleness
    if staleness is not None and (capacity is None or staleness <= capacity):
        return "async.max_staleness"
    return "async.capacity"


def _could_run(plan: RunPlan) -> float:
    """The number of requests that an engine has room for at a time, a mean over all engines."""
    groups = engine_groups(with_kv_caches(plan.config, plan.spec).generator)
    rooms = [(group.settings.engines, _room(plan, group.settings)) for group in groups]
    return sum(engines * room for engines, room in rooms) / plan.engines


def _room(plan: RunPlan, generator: GeneratorConfig) -> float:
    assert generator.kv_cache_tokens is not None  # with_kv_caches
    return min(
        generator.max_concurrency,
        generator.kv_cache_tokens / Workload.of(plan.config).tokens_per_sequence,
    )


COLUMNS: Mapping[str, Callable[[Summary], str]] = {
    "step s": lambda summary: f"{summary.step_p50_s:.4g}",
    "95 %": lambda summary: f"{summary.step_p95_s:.4g}",
    "tokens/s": lambda summary: f"{summary.tokens_per_s:,.0f}",
    "trainer": lambda summary: f"{summary.trainer_busy:.0%}",
    "engines": lambda summary: f"{summary.engines_busy:.0%}",
    "for batch": lambda summary: f"{summary.waits_for_batch:.0%}",
    "for engines": lambda summary: f"{summary.waits_for_engines:.0%}",
    "for weights": lambda summary: f"{summary.waits_for_weights:.0%}",
    "saving": lambda summary: f"{summary.waits_for_checkpoints:.0%}",
    "age": lambda summary: f"{mean_age(summary):.2f}",
    "rejected": lambda summary: str(summary.rejected),
    "discarded": lambda summary: f"{summary.discarded:.1%}",
    "lengths": lambda summary: f"{summary.length_bias:+.1%}",
    "goodput": lambda summary: f"{summary.goodput:.1%}",
}


def mean_age(summary: Summary) -> float:
    return sum(int(age) * share for age, share in summary.staleness.items())


def table(combinations: Sequence[Sequence[str]], summaries: Sequence[Summary]) -> list[str]:
    """A row for each combination, and a line that says which one to choose."""
    rows = [["settings", *COLUMNS]]
    for overrides, summary in zip(combinations, summaries):
        rows.append([" ".join(overrides), *(show(summary) for show in COLUMNS.values())])
    best = best_index(summaries)
    close = near_fastest(summaries)
    reason = "is the fastest"
    if len(close) > 1:
        reason = (
            f"has the freshest tokens of the {len(close)} that are within {CLOSE:.0%} of the "
            "fastest"
        )
    return [
        *aligned(rows),
        f"take {' '.join(combinations[best])}: it {reason} "
        f"({summaries[best].tokens_per_s:,.0f} tokens/s)",
    ]


def best_index(summaries: Sequence[Summary]) -> int:
    """The place of the one to take: with the freshest tokens among the fastest."""
    return min(
        near_fastest(summaries),
        key=lambda index: (round(mean_age(summaries[index]), 2), -summaries[index].tokens_per_s),
    )


def near_fastest(summaries: Sequence[Summary]) -> list[int]:
    """The places of those that are about as fast as the fastest."""
    fastest = max(summary.tokens_per_s for summary in summaries)
    places = []
    for place, summary in enumerate(summaries):
        if summary.tokens_per_s >= (1 - CLOSE) * fastest:
            places.append(place)
    return places
