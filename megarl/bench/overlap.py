"""`megarl bench overlap`: how close asynchronous steps come to perfect overlap, by
trainer/generator ratio, lengths and settings.

Engines and trainer are emulated: they sleep for set times (`emulated`, `overlap_cell`). Controller,
channels, admission, buffer, messages and processes are those of a run. The sleeps are not shortened
by the time of that code, which is short compared with the phases.

    ideal        seconds of a step if trainer and generator overlapped perfectly: the longer of the
                 two phases at full use. The generator's phase is the time to decode the trained
                 tokens with every slot busy; neither phase includes the update
    co-located   both phases have the hardware of both sides, one after the other, and so take half
                 as long; its ideal is that of the two sides beside each other
    efficiency   ideal / achieved. The paper on asynchronous RLHF (Noukhovitch et al. 2024,
                 arXiv:2410.18252) reached about 0.85

The first WARM_UP steps of a cell do not count.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from megarl.base.cores import usable_cores
from megarl.base.processes import kill
from megarl.base.results import aligned
from megarl.bench.emulated import EmulatedLengths
from megarl.bench.overlap_cell import Cell, generate, train
from megarl.config.errors import ConfigError
from megarl.config.schema import AsyncConfig
from megarl.messaging.link import RunKey

Rows = list[dict[str, Any]]


class Lane:
    """A trainer process and a generator process that run one cell after another. Several lanes run
    side by side.
    """

    def __init__(self, timeout_s: float):
        context = multiprocessing.get_context("forkserver")  # so that common imports happen once
        context.set_forkserver_preload([__name__])
        self._timeout_s = timeout_s
        self._key = RunKey.generate()
        addresses_in, addresses_out = context.Pipe(duplex=False)
        self._pipes = []
        self._processes = []
        for body, address in ((_generator, addresses_out), (_trainer, addresses_in)):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=body, args=(child_end, self._key, address, timeout_s), daemon=True
            )
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)
        addresses_in.close()
        addresses_out.close()

    def run(self, cell: Cell) -> Rows:
        """The trainer's rows.

        Raises RuntimeError if one of the two processes fails, TimeoutError past the deadline.
        """
        for pipe in self._pipes:
            pipe.send(cell)
        deadline = time.monotonic() + self._timeout_s
        answers = {}
        while len(answers) < 2:
            remaining_s = deadline - time.monotonic()
            waiting_pipes = [pipe for pipe in self._pipes if pipe not in answers]
            ready_pipes = wait(waiting_pipes, max(0.0, remaining_s))
            if not ready_pipes:
                names = ["the trainer"] if self._pipes[1] in waiting_pipes else []
                if self._pipes[0] in waiting_pipes:
                    names.insert(0, "the generator")
                raise TimeoutError(
                    f"{cell.name}: {' and '.join(names)} did not finish within "
                    f"{self._timeout_s:.0f} s"
                )
            for pipe in waiting_pipes:
                if pipe in ready_pipes:
                    answers[pipe] = _answer(cell, pipe)
        return answers[self._pipes[1]]

    def close(self) -> None:
        kill(self._processes)


def _answer(cell: Cell, pipe: Connection) -> Rows:
    try:
        is_ok, answer = pipe.recv()
    except EOFError as error:
        raise RuntimeError(f"{cell.name}: a process ended before its time") from error
    if not is_ok:
        raise RuntimeError(f"{cell.name}:\n{answer}")
    return answer


def run_cells(
    cells: Sequence[Cell], lanes: int, timeout_s: float, report: Callable[[Cell], None]
) -> list[Rows]:
    """The rows of every cell, in order. A lane's thread calls `report` when a cell ends."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(cells)):
        todo.put(index)
    rows: list[Rows] = [[] for _ in cells]
    failed = threading.Event()

    def work(lane: Lane) -> None:
        try:
            while not failed.is_set():
                index = todo.get_nowait()
                rows[index] = lane.run(cells[index])
                report(cells[index])
        except queue.Empty:
            return
        except BaseException:
            failed.set()
            raise

    opened: list[Lane] = []
    try:
        opened += [Lane(timeout_s) for _ in range(min(lanes, len(cells)))]
        with ThreadPoolExecutor(len(opened)) as pool:
            for future in [pool.submit(work, lane) for lane in opened]:
                future.result()
    finally:
        for lane in opened:
            lane.close()
    return rows


def _generator(pipe: Connection, key: RunKey, address: Connection, timeout_s: float) -> None:
    _serve(pipe, lambda cell: generate(cell, key, address), timeout_s)


def _trainer(pipe: Connection, key: RunKey, address: Connection, timeout_s: float) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _serve(pipe, lambda cell: train(cell, key, address.recv()), timeout_s)


def _serve(pipe: Connection, run: Callable[[Cell], Any], timeout_s: float) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            cell = pipe.recv()
        except EOFError:  # the benchmark has ended
            return
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        try:
            pipe.send((True, run(cell)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()


COLOURS = (
    "#9a9a9a",
    "#5c5c5c",
    "#c26a2d",
    "#d9a441",
    "#2f6fab",
    "#5a93c4",
    "#3b8f6b",
    "#8c5a8c",
    "#7a7a2d",
    "#2d7a7a",
)


def draw(facts: Mapping[str, Any], path: str) -> None:
    """Writes `path`: a panel for each kind of lengths, a group of bars for each ratio, a bar for
    each setting.
    """
    from matplotlib.figure import Figure

    cells = facts["cells"]
    efficiencies = {}
    for cell in cells:
        efficiencies[cell["lengths"], cell["ratio"], cell["setting"]] = cell["efficiency"]
    lengths, ratios, settings = (list(dict.fromkeys(names)) for names in zip(*efficiencies))
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    width = 0.84 / len(settings)
    for panel, kind in zip(panels, lengths):
        for index, (setting, colour) in enumerate(zip(settings, COLOURS, strict=True)):
            offset = (index - (len(settings) - 1) / 2) * width
            panel.bar(
                [place + offset for place in range(len(ratios))],
                [efficiencies[kind, ratio, setting] for ratio in ratios],
                width,
                color=colour,
                label=setting,
            )
        panel.axhline(0.95, color="black", lw=0.8, ls="--")
        panel.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
        panel.set_xlabel("trainer's phase / generator's")
        panel.set_title(f"{kind} lengths (emulated)", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ideal / achieved step time")
    panels[0].set_ylim(0, 1.05)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside right center",
        frameon=False,
        fontsize=8,
    )
    figure.savefig(path, dpi=150)


WARM_UP = 4
ENGINES = 2  # of the generator's side
RATIOS = (0.5, 1.0, 2.0)  # trainer's phase / generator's phase
LENGTHS = {"constant": EmulatedLengths(64, 0.0, 256), "long-tailed": EmulatedLengths(64, 0.8, 256)}
WRITE_SHARE = 0.01  # duration of an update, as a share of the longer phase
DEPTH = 4  # capacity of the streaming settings
COLOCATED = "co-located, synchronous"
SETTINGS = {
    "synchronous": AsyncConfig(0),
    COLOCATED: AsyncConfig(0),
    "one step, block": AsyncConfig(1, partial_rollout="block"),
    "streaming, block": AsyncConfig(DEPTH, partial_rollout="block"),
    "streaming, in_flight": AsyncConfig(DEPTH, partial_rollout="in_flight"),
    "streaming, retract": AsyncConfig(DEPTH, partial_rollout="retract"),
    "streaming, resume": AsyncConfig(
        DEPTH, partial_rollout="resume", chunk_tokens=16, max_in_flight=24
    ),
    "streaming, abort": AsyncConfig(DEPTH, partial_rollout="abort"),
    "streaming, idle updates": AsyncConfig(DEPTH, idle="updates", max_updates=4),
    "streaming, idle samples": AsyncConfig(DEPTH, idle="samples", max_samples=16),
}


def sides_of(setting: str) -> int:
    """The number of sides whose hardware a phase has."""
    return 2 if setting == COLOCATED else 1


@dataclass(frozen=True)
class OverlapResult:
    """One cell's result; seconds are means per step."""

    lengths: str
    ratio: float
    setting: str
    step_s: float
    ideal_s: float
    efficiency: float
    batch_wait_s: float  # how long the trainer waits for its batch
    # how long the trainer waits for the engines to take its weights: with block, for stragglers
    weights_wait_s: float
    generator_wait_s: float  # see docs/asynchrony.md
    bubble_s: float
    # share by which the trainer's sleeps took longer than set: above 1 % the machine is busy with
    # other work
    late: float
    mixed: float  # share of samples whose tokens have more than one version
    updates: float  # passes over a batch
    samples: float  # responses sampled for a prompt


def run(step_s: float, steps: int, lanes: int, as_json: bool, picture: str | None) -> None:
    """Prints a table, or one JSON object.

    `step_s`: seconds of the longer phase. Raises ConfigError, RuntimeError, TimeoutError.
    """
    problems = []
    if steps <= WARM_UP:
        problems.append(f"--steps {steps}: must be more than the {WARM_UP} that are not counted")
    if step_s <= 0:
        problems.append(f"--step-s {step_s:g}: must be above 0")
    if lanes < 1:
        problems.append(f"--lanes {lanes}: must be at least 1")
    if problems:
        raise ConfigError(problems)
    facts = {
        "emulated": True,
        "hardware": f"{usable_cores()} CPU cores",
        "longer_phase_s": step_s,
        "update_s": WRITE_SHARE * step_s,
        "steps": steps,
        "not_counted": WARM_UP,
        "cells": list(map(asdict, measure(step_s, steps, lanes))),
    }
    if picture is not None:
        draw(facts, picture)
    print(json.dumps(facts) if as_json else render(facts))


def measure(step_s: float, steps: int, lanes: int) -> list[OverlapResult]:
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        keyed_cells = list(grid(step_s, steps, folder))
        cells = [cell for _, cell in keyed_cells]
        remaining = len(cells)

        def report(cell: Cell) -> None:
            nonlocal remaining
            remaining -= 1
            print(f"{cell.name}; {remaining} cells to go", file=sys.stderr)

        timeout_s = 60 + 20 * steps * step_s
        results = []
        for (key, cell), rows in zip(keyed_cells, run_cells(cells, lanes, timeout_s, report)):
            results.append(result(*key, cell, rows))
        return results


def grid(step_s: float, steps: int, folder: str) -> Iterator[tuple[tuple[str, float, str], Cell]]:
    """((lengths, ratio, setting), cell) of every cell."""
    for lengths in LENGTHS:
        for ratio in RATIOS:
            train_s = min(step_s, ratio * step_s)
            generate_s = min(step_s, step_s / ratio)
            for setting, async_ in SETTINGS.items():
                name = f"{lengths} lengths, ratio {ratio:g}, {setting}"
                sides = sides_of(setting)
                cell = Cell(
                    name=name,
                    train_s=train_s / sides,
                    generate_s=generate_s / sides,
                    write_s=WRITE_SHARE * step_s,
                    lengths=LENGTHS[lengths],
                    async_=async_,
                    steps=steps,
                    run_dir=os.path.join(folder, name.replace(" ", "_")),
                    engines=ENGINES * sides,
                )
                yield (lengths, ratio, setting), cell


def result(lengths: str, ratio: float, setting: str, cell: Cell, rows: Rows) -> OverlapResult:
    counted = rows[WARM_UP:]

    def mean(name: str) -> float:
        return statistics.fmean(row[f"time/{name}"] for row in counted)

    tokens = statistics.fmean(sum(row["lengths"]) for row in counted)
    decode_s = tokens * cell.token_s / (cell.engines * cell.slots)
    ideal_s = sides_of(setting) * max(cell.train_s, decode_s)
    step_s = mean("step_s")
    weights_wait_s = mean("weights_wait_s")
    samples = cell.prompts_per_step * cell.n
    return OverlapResult(
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
        updates=statistics.fmean(row["updates"] for row in counted),
        samples=statistics.fmean(row["samples"] for row in counted),
    )


def title(facts: Mapping[str, Any]) -> str:
    return (
        f"EMULATED: engines and trainer sleep; longer phase {facts['longer_phase_s']:g} s, update "
        f"{facts['update_s'] * 1e3:g} ms; "
        f"{facts['steps'] - facts['not_counted']} steps a cell; {facts['hardware']}"
    )


def render(facts: Mapping[str, Any]) -> str:
    header = [
        "lengths",
        "trainer/generator",
        "setting",
        "step s",
        "ideal s",
        "efficiency",
        "for batch",
        "for engines",
        "generator waits",
        "bubble",
        "updates",
        "samples",
        "mixed versions",
        "late",
    ]
    rows = [header]
    for cell in facts["cells"]:
        names = (
            "step_s",
            "ideal_s",
            "efficiency",
            "batch_wait_s",
            "weights_wait_s",
            "generator_wait_s",
            "bubble_s",
        )
        values = [f"{cell[name]:.3f}" for name in names]
        rows.append(
            [
                cell["lengths"],
                f"{cell['ratio']:g}",
                cell["setting"],
                *values,
                f"{cell['updates']:.1f}",
                f"{cell['samples']:.1f}",
                f"{cell['mixed']:.0%}",
                f"{cell['late']:.1%}",
            ]
        )
    notes = [
        "Seconds are means per step. The trainer waits for its batch and for engines to take "
        "its weights.",
        "Efficiency is ideal / step; the ideal is the longer phase at full use.",
        "late: how much the trainer overslept; above 1% the machine was busy with something "
        "else: discard the cell.",
    ]
    return "\n".join([title(facts), *aligned(rows, text_columns=3), *notes])
