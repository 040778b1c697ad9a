"""`python tests/studies simulated`: compares the scheduler in virtual time with the scheduler in
real time.

Cells of `megarl bench overlap` run in real time, in two processes with sockets between them. They
are also simulated, with the same lengths and phase times. With `--runs FOLDER…`, earlier runs are
simulated instead, with their lengths, times and failures. `--kills CONFIG FOLDER key=value…` makes
such a run, and kills engines and a trainer rank during it.

The comparison covers the mean step, the waits of trainer and generator, the distribution of the
tokens' ages, and the time from the first step to the end of the last.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from megarl.bench.overlap import WARM_UP, Rows, grid, run_cells
from megarl.bench.overlap_cell import Cell
from megarl.config.load import load_config
from megarl.config.schema import GeneratorConfig, PlanConfig, SimulationConfig
from megarl.observe.metrics import METRICS_FILE, read_metrics
from megarl.plan.resolve import RunPlan, resolve
from megarl.report.reading import RunReader
from megarl.simulation.engines import Speed
from megarl.simulation.measured import measured_models
from megarl.simulation.run import Failures, Models, SimulationTotals, simulate

WAITS = ("trainer_wait", "generator_wait")
# (steps done, process)
KILLS = (
    (15, "megarl.generator.server"),
    (30, "megarl.generator.server"),
    (45, "megarl.launch.worker trainer 0"),
)
MOST_STARTS = 3


@dataclass(frozen=True)
class ComparedRun:
    name: str
    real_step_s: float
    simulated_step_s: float
    step_error: float
    wait_error: float  # the larger error of the two waits, as a share of the step
    age_distance: float  # total variation of the tokens' ages
    # error of the time from the first step to the end of the last; None for cells
    end_error: float | None = None


def run(
    steps: int,
    step_s: float,
    lanes: int,
    folders: Sequence[str],
    kills: Sequence[str],
    as_json: bool,
) -> None:
    if kills:
        make_with_kills(kills[0], kills[1], kills[2:])
        folders = [kills[1]]
    comparisons = (
        [of_run(Path(folder)) for folder in folders] if folders else of_cells(steps, step_s, lanes)
    )
    if as_json:
        print(json.dumps([asdict(comparison) for comparison in comparisons]))
    else:
        print(*render(comparisons), sep="\n")


def of_cells(steps: int, step_s: float, lanes: int) -> list[ComparedRun]:
    with tempfile.TemporaryDirectory() as folder:
        cells = [cell for _, cell in grid(step_s, steps, folder)]
        real = run_cells(
            cells, lanes, 60 + 20 * steps * step_s, lambda cell: print(cell.name, file=sys.stderr)
        )
    return [compare(cell.name, rows, simulated(cell)) for cell, rows in zip(cells, real)]


def of_run(folder: Path) -> ComparedRun:
    """Simulates a run with its own times and lengths."""
    samples = folder / "rollouts" / "samples.jsonl"
    config = load_config(folder / "config.yaml", [f"plan.simulation.lengths={samples}"])
    events = RunReader(folder, 1).read()
    simulation = simulate(
        resolve(config, "plan"),
        lambda plan, unit: measured_models(plan, unit, folder),
        failures=failures_of(events),
    )
    by_step: dict[int, Counter[int]] = defaultdict(Counter)
    for line in samples.read_text().splitlines():
        group = json.loads(line)
        for sample in group["samples"]:
            for version, tokens in sample["versions"]:
                by_step[group["step"]][group["step"] - version] += tokens
    real = [{**row, "ages": by_step[row["step"]]} for row in read_metrics(folder / METRICS_FILE)]
    trained = [
        (start_s, start_s + took)
        for kind, start_s, took, *_ in events["lanes"]["trainer.0"]
        if kind == "train"
    ]
    first = simulation.rows[0]
    took_s = max(trained)[1] - min(trained)[0]
    end_error = (
        simulation.rows[-1]["wall_s"] - first["wall_s"] + first["time/train_s"]
    ) / took_s - 1
    return replace(compare(folder.name, real, with_ages(simulation)), end_error=end_error)


def failures_of(events: dict[str, Any]) -> Failures:
    """The failures in a run's trace.

    Times count from the first weight update, where the simulation begins.
    """
    origin_s = _first_update_s(events, -math.inf)
    away = {
        (lane, round(start_s, 1)): took
        for lane, spans in events["lanes"].items()
        for kind, start_s, took, *_ in spans
        if kind == "away"
    }
    lost = [(mark["who"], mark["at"]) for mark in events["marks"] if mark["what"] == "lost"]
    engines = [
        (
            lost_s - origin_s,
            int(lost_lane.removeprefix("engine.")),
            away.get((lost_lane, round(lost_s, 1)), math.inf),
        )
        for lost_lane, lost_s in lost
    ]
    ends = [
        mark["at"]
        for mark in events["marks"]
        if mark["what"] == "end" and mark["how"] != "finished"
    ]
    return Failures(
        tuple(sorted(engines)),
        tuple((lost_s - origin_s, _first_update_s(events, lost_s) - lost_s) for lost_s in ends),
    )


def _first_update_s(events: dict[str, Any], after_s: float) -> float:
    return min(
        start_s
        for kind, start_s, *_ in events["lanes"]["trainer.0"]
        if kind == "write weights" and start_s >= after_s
    )


def make_with_kills(config: str, folder: str, overrides: Sequence[str]) -> None:
    """Makes the run of `config` in `folder`.

    Kills each process of KILLS at its step. If that ends the run, starts it again.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "megarl",
        "train",
        config,
        f"run_dir={folder}",
        *overrides,
    ]
    kills = list(KILLS)
    for _ in range(MOST_STARTS):
        run = subprocess.Popen(command, stdout=sys.stderr)
        while run.poll() is None:
            if kills and _steps(Path(folder)) >= kills[0][0]:
                _kill(run.pid, kills.pop(0)[1])
            time.sleep(0.1)
        if run.returncode == 0 and not kills:
            return
        if run.returncode in (0, 2):  # it ended too early, or refused its settings
            break
    raise SystemExit(
        f"{folder}: did not finish in {MOST_STARTS} starts, or was not killed by {kills}"
    )


def _steps(folder: Path) -> int:
    file = folder / METRICS_FILE
    return len(read_metrics(file)) if file.exists() else 0


def _kill(launcher: int, command: str) -> None:
    """Kills the first of the launcher's processes that has this text in its command."""
    for process in psutil.Process(launcher).children(recursive=True):
        if command in " ".join(process.cmdline()):
            process.kill()
            return
    raise SystemExit(f"no process to kill: {command}")


def compare(name: str, real: Rows, rows: Rows) -> ComparedRun:
    real_step, real_waits = of_rows(real)
    step, waits = of_rows(rows)
    of_real = ages(real)
    of_simulated = ages(rows)
    distance = (
        sum(
            abs(of_real[age] / of_real.total() - of_simulated[age] / of_simulated.total())
            for age in of_real | of_simulated
        )
        / 2
    )
    wait_error = max(abs(one - real_wait) for one, real_wait in zip(waits, real_waits)) / real_step
    return ComparedRun(name, real_step, step, step / real_step - 1, wait_error, distance)


def of_rows(rows: Rows) -> tuple[float, list[float]]:
    counted = rows[WARM_UP:]
    return statistics.fmean(row["time/step_s"] for row in counted), [
        statistics.fmean(row[f"time/{name}_s"] for row in counted) for name in WAITS
    ]


def ages(rows: Rows) -> Counter[int]:
    return sum((Counter(row["ages"]) for row in rows[WARM_UP:]), Counter())


def simulated(cell: Cell) -> Rows:
    return with_ages(
        simulate(plan_of(cell), lambda plan, unit: models_of(cell), lengths=cell.lengths)
    )


def with_ages(totals: SimulationTotals) -> Rows:
    return [
        {**row, "ages": ages_of_step}
        for row, ages_of_step in zip(totals.rows, totals.ages_of_steps)
    ]


def plan_of(cell: Cell) -> RunPlan:
    plan = cell.plan()
    places = cell.async_.max_in_flight or cell.prompts_per_step
    config = replace(
        plan.config,
        # a cell counts the places of one engine
        async_=replace(cell.async_, max_in_flight=cell.engines * places),
        generator=GeneratorConfig(engines=cell.engines, max_concurrency=cell.slots),
        plan=PlanConfig(
            prompt_tokens=16,
            response_tokens=cell.lengths.mean,
            simulation=SimulationConfig(steps=cell.steps),
        ),
    )
    return replace(plan, config=config)


def models_of(cell: Cell) -> Models:
    speed = Speed(
        lambda running, context: cell.token_s,
        lambda tokens, length: tokens * cell.token_s / 400,
        1e9,
        cell.slots,
    )
    return Models(speed, lambda batch: cell.train_s, cell.write_s, 0.0)


def render(comparisons: Sequence[ComparedRun]) -> list[str]:
    width = max(len(comparison.name) for comparison in comparisons)
    lines = [f"{'cell':<{width}}  real s  simulated s   step   waits  ages   end"]
    for comparison in comparisons:
        numbers = (
            f"{comparison.real_step_s:6.3f}  {comparison.simulated_step_s:11.3f}  "
            f"{comparison.step_error:+5.1%}  {comparison.wait_error:6.1%}"
        )
        end = "" if comparison.end_error is None else f"  {comparison.end_error:+.1%}"
        lines.append(f"{comparison.name:<{width}}  {numbers}  {comparison.age_distance:.3f}{end}")
    worst = [
        max(abs(getattr(comparison, name)) for comparison in comparisons)
        for name in ("step_error", "wait_error", "age_distance")
    ]
    return [
        *lines,
        f"worst: step {worst[0]:.1%}, waits {worst[1]:.1%} of a step, ages {worst[2]:.3f}",
    ]
