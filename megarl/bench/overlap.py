"""`megarl bench overlap`: how close asynchronous steps come to perfect overlap, over trainer/generator ratios, lengths and settings.

Engines and trainer are emulated: they sleep for set times (`emulated`, `overlap_cell`). Controller, channels, admission, buffer, messages
and processes are those of a run. The sleeps are not shortened by what the code itself costs, which is little beside the phases.

    ideal        seconds of a step if trainer and generator overlapped perfectly: the longer of the two phases at full use. The
                 generator's phase is the time to decode the trained tokens with every slot busy; neither phase includes the update
    efficiency   ideal / achieved. The paper on asynchronous RLHF (Noukhovitch et al. 2024, arXiv:2410.18252) reached about 0.85

The first WARM_UP steps of a cell are not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megarl.bench.emulated import Lengths
from megarl.bench.lanes import Rows, run_cells
from megarl.bench.overlap_cell import Cell
from megarl.bench.overlap_picture import draw
from megarl.config.errors import ConfigError
from megarl.config.schema import AsyncConfig

WARM_UP = 4
RATIOS = (0.5, 1.0, 2.0)  # trainer's phase / generator's phase
LENGTHS = {"constant": Lengths(64, 0.0, 256), "long-tailed": Lengths(64, 0.8, 256)}
WRITE_SHARE = 0.01  # an update, as a share of the longer phase
DEPTH = 4  # capacity of the streaming settings
SETTINGS = {
    "synchronous": AsyncConfig(0),
    "one step, block": AsyncConfig(1),
    "streaming, block": AsyncConfig(DEPTH),
    "streaming, in_flight": AsyncConfig(DEPTH, partial_rollout="in_flight"),
    "streaming, retract": AsyncConfig(DEPTH, partial_rollout="retract"),
    "streaming, resume": AsyncConfig(DEPTH, partial_rollout="resume", chunk_tokens=16, max_in_flight=24),
    "streaming, abort": AsyncConfig(DEPTH, partial_rollout="abort"),
}


@dataclass(frozen=True)
class Result:
    """One cell's result; seconds are means per step."""

    lengths: str
    ratio: float
    setting: str
    step_s: float
    ideal_s: float
    efficiency: float
    batch_wait_s: float  # how long the trainer waits for its batch
    weights_wait_s: float  # how long the trainer waits for the engines to take its weights: with block, for stragglers
    generator_wait_s: float  # see docs/asynchrony.md
    bubble_s: float
    late: float  # by what share the trainer's sleeps took longer than set: above 1 % the machine is busy with something else
    mixed: float  # share of samples with tokens of more than one version


def run(step_s: float, steps: int, lanes: int, as_json: bool, picture: str | None) -> None:
    """Prints a table, or one JSON object. `step_s`: seconds of the longer phase. Raises ConfigError, RuntimeError, TimeoutError."""
    problems = [f"--steps {steps}: must be more than the {WARM_UP} that are not counted"] if steps <= WARM_UP else []
    problems += [f"--step-s {step_s:g}: must be above 0"] if step_s <= 0 else []
    problems += [f"--lanes {lanes}: must be at least 1"] if lanes < 1 else []
    if problems:
        raise ConfigError(problems)
    facts = {
        "emulated": True,
        "hardware": f"{os.cpu_count()} CPU cores",
        "longer_phase_s": step_s,
        "update_s": WRITE_SHARE * step_s,
        "steps": steps,
        "not_counted": WARM_UP,
        "cells": [asdict(result) for result in measure(step_s, steps, lanes)],
    }
    if picture is not None:
        draw(facts, picture)
    print(json.dumps(facts) if as_json else render(facts))


def measure(step_s: float, steps: int, lanes: int) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        found = list(grid(step_s, steps, folder))
        cells = [cell for _, cell in found]
        left = len(cells)

        def done(cell: Cell) -> None:
            nonlocal left
            left -= 1
            print(f"{cell.name}; {left} cells to go", file=sys.stderr)

        timeout_s = 60 + 20 * steps * step_s
        return [result(*key, cell, rows) for (key, cell), rows in zip(found, run_cells(cells, lanes, timeout_s, done))]


def grid(step_s: float, steps: int, folder: str) -> Iterator[tuple[tuple[str, float, str], Cell]]:
    """((lengths, ratio, setting), cell) of every cell."""
    for lengths in LENGTHS:
        for ratio in RATIOS:
            train_s, generate_s = min(step_s, ratio * step_s), min(step_s, step_s / ratio)
            for setting, async_ in SETTINGS.items():
                name = f"{lengths} lengths, ratio {ratio:g}, {setting}"
                run_dir = os.path.join(folder, name.replace(" ", "_"))
                cell = Cell(name, train_s, generate_s, WRITE_SHARE * step_s, LENGTHS[lengths], async_, steps, run_dir)
                yield (lengths, ratio, setting), cell


def result(lengths: str, ratio: float, setting: str, cell: Cell, rows: Rows) -> Result:
    counted = rows[WARM_UP:]

    def mean(name: str) -> float:
        return statistics.fmean(row[f"time/{name}"] for row in counted)

    tokens = statistics.fmean(sum(row["lengths"]) for row in counted)
    ideal_s = max(cell.train_s, tokens * cell.token_s / (cell.engines * cell.slots))
    step_s, weights_wait_s = mean("step_s"), mean("weights_wait_s")
    samples = cell.prompts_per_step * cell.n
    return Result(
        lengths,
        ratio,
        setting,
        step_s,
        ideal_s,
        efficiency=ideal_s / step_s,
        batch_wait_s=mean("trainer_wait_s") - weights_wait_s,
        weights_wait_s=weights_wait_s,
        generator_wait_s=mean("generator_wait_s"),
        bubble_s=mean("bubble_s"),
        late=mean("train_s") / cell.train_s - 1,
        mixed=statistics.fmean(row["mixed"] for row in counted) / samples,
    )


def title(facts: Mapping[str, Any]) -> str:
    return (
        f"EMULATED: engines and trainer sleep; longer phase {facts['longer_phase_s']:g} s, update {facts['update_s'] * 1e3:g} ms; "
        f"{facts['steps'] - facts['not_counted']} steps a cell; {facts['hardware']}"
    )


def render(facts: Mapping[str, Any]) -> str:
    header = ["lengths", "trainer/generator", "setting", "step s", "ideal s", "efficiency",
              "for batch", "for engines", "generator waits", "bubble", "mixed versions", "late"]  # fmt: skip
    rows = [header]
    for cell in facts["cells"]:
        names = ("step_s", "ideal_s", "efficiency", "batch_wait_s", "weights_wait_s", "generator_wait_s", "bubble_s")
        values = [f"{cell[name]:.3f}" for name in names]
        rows.append([cell["lengths"], f"{cell['ratio']:g}", cell["setting"], *values, f"{cell['mixed']:.0%}", f"{cell['late']:.1%}"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for row in rows:
        cells = [text.ljust(width) if column < 3 else text.rjust(width) for column, (text, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    notes = ["Seconds are means per step. The trainer waits for its batch and for engines to take its weights.",
             "Efficiency is ideal / step; the ideal is the longer phase at full use.",
             "late: how much the trainer overslept; above 1% the machine was busy with something else: discard the cell."]  # fmt: skip
    return "\n".join([title(facts), *lines, *notes])
