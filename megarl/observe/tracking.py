"""Feeds a tracker from metrics.jsonl, in a process of its own: `python -P -m
megarl.observe.tracking` (launch/tracking.py starts it).

The file is both the record and the queue: no step waits for a tracker, and rows that a tracker
could not take wait in the file. trackers/NAME.json says which rows a tracker has. When a run
resumes, the tracker continues its own run with the rows that it lacks. Trackers cannot remove a
step. So if the run goes back to a step that the tracker already has, or if the tracker's process
was killed, the tracker gets a new run with all rows from step 0.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megarl.base.files import write_whole
from megarl.base.processes import FOR_LAUNCHER
from megarl.config.dialect import read_yaml
from megarl.observe.metrics import (
    METRICS_FILE,
    Row,
    kept_bytes,
    parse_lines,
    parse_row,
    read_metrics,
)
from megarl.observe.samples import SAMPLES_FILE
from megarl.trackers.trackers import Tracker, TrackerSettings, open_tracker

POLL_S = 0.5
SAMPLES_EVERY = 10  # steps between uploads of samples
MOST_SAMPLES = 32
MOST_CHARS = 4000  # most samples of a step; most characters of a text
SAMPLE_COLUMNS = (
    "step",
    "prompt number",
    "prompt",
    "response",
    "reference",
    "reward",
    "tokens",
    "finish_reason",
    "failed",
)
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0  # pauses after a failure


@dataclass
class TrackerState:
    """The state of a tracker (trackers/NAME.json)."""

    run: str = ""  # the tracker's own id of the run
    next_step: int = 0  # the first step that it does not have; valid only if `closed`
    closed: bool = False
    failures: int = 0  # failures since the last start
    problem: str = ""  # message of the first of these failures
    ended: bool = False  # whether it has all rows of the last start

    @classmethod
    def load(cls, folder: Path, name: str) -> TrackerState:
        try:
            return cls(**json.loads(_path(folder, name).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # missing or damaged: the tracker gets a new run
            return cls()

    def save(self, folder: Path, name: str) -> None:
        _path(folder, name).parent.mkdir(exist_ok=True)
        write_whole(_path(folder, name), json.dumps(asdict(self)))


def _path(folder: Path, name: str) -> Path:
    return folder / "trackers" / f"{name}.json"


@dataclass(frozen=True)
class StaleRows:
    """The end of a metrics file from an earlier start, which the writer will cut off."""

    offset: int  # number of bytes that are kept
    length: int
    digest: str

    @classmethod
    def from_step(cls, path: Path, first: int) -> StaleRows:
        """The end of the file from step `first` on. Call this before the run's processes start."""
        data = path.read_bytes() if path.exists() else b""
        offset = kept_bytes(data, first)
        return cls(offset, len(data[offset:]), _digest(data[offset:]))

    def is_there(self, data: bytes) -> bool:
        return self.length > 0 and _digest(data[: self.length]) == self.digest


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class NewRows:
    """All rows of a metrics file that another process writes, without its `stale` end."""

    def __init__(self, path: Path, stale: StaleRows):
        self._path = path
        self._stale = stale
        self._offset = stale.offset
        data = path.read_bytes() if path.exists() else b""
        self.rows: list[Row] = [
            row for end, row in parse_lines(data + b"\n") if row is not None and end <= self._offset
        ]
        self._waits = stale.length > 0

    def poll(self) -> None:
        """Adds new rows to `rows`."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        if self._waits and self._stale.is_there(data):
            return
        self._waits = False
        new = list(parse_lines(data, self._offset))
        self._offset = new[-1][0] if new else self._offset
        self.rows += [row for _, row in new if row is not None]


def follow(
    name: str, settings: TrackerSettings, rows: NewRows, first: int, ended: Callable[[float], bool]
) -> None:
    """Sends rows until `ended(seconds)`, which waits for at most `seconds`, says that no more will
    come.
    """
    folder = settings.folder
    tracked = TrackerState.load(settings.folder, name)
    if tracked.closed and tracked.run and tracked.next_step <= first:
        tracked = TrackerState(tracked.run, tracked.next_step)
    else:
        tracked = TrackerState()
    tracked.save(folder, name)
    tracker: Tracker | None = None
    sent = sum(row["step"] < tracked.next_step for row in rows.rows)
    samples = StepSamples(folder)
    pause_s = POLL_S
    over = False
    while True:
        over = over or ended(pause_s)
        rows.poll()
        try:
            if tracker is None:
                tracker = open_tracker(name, replace(settings, run=tracked.run))
            tracked.run = tracker.run
            while sent < len(rows.rows):
                # samples of a step are written after its row
                _send_samples(tracker, samples, rows.rows[sent - 1] if sent else None)
                send(tracker, rows.rows[sent])
                sent += 1
            if over:
                _send_samples(tracker, samples, rows.rows[-1] if rows.rows else None)
                _complete(tracker, rows, settings.folder)
                tracker.close()
                break
            pause_s = POLL_S
        except Exception as error:
            # whatever a tracker raises, the run goes on, and sending is tried again
            traceback.print_exc()
            tracked.failures += 1
            tracked.problem = tracked.problem or f"{type(error).__name__}: {error}".splitlines()[0]
            tracked.save(folder, name)
            pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            if over:
                time.sleep(pause_s)
    tracked.next_step = rows.rows[-1]["step"] + 1 if rows.rows else 0
    tracked.closed = tracked.ended = True
    tracked.save(folder, name)


def send(tracker: Tracker, row: Row) -> None:
    """Sends a row without values that are not finite, since they have no place in a curve."""
    values: dict[str, float] = {}
    histograms: dict[str, list[int]] = {}
    for key, value in row.items():
        if isinstance(value, list):
            histograms[key] = value
        elif key != "step" and math.isfinite(value):
            values[key] = float(value)
    tracker.log(row["step"], values, histograms)


class StepSamples:
    """Reads the samples of single steps from rollouts/samples.jsonl.

    Ask for steps in ascending order.
    """

    def __init__(self, folder: Path):
        self._path = folder / "rollouts" / SAMPLES_FILE
        self._offset = 0

    def of_step(self, step: int) -> list[list[Any]]:
        """At most MOST_SAMPLES rows of SAMPLE_COLUMNS."""
        rows: list[list[Any]] = []
        if not self._path.exists():
            return rows
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                group = parse_row(line) if line.endswith(b"\n") else None
                if not line.endswith(b"\n") or (group is not None and group["step"] > step):
                    break
                self._offset += len(line)
                if group is not None and group["step"] == step:
                    # a damaged line that is still JSON
                    with contextlib.suppress(KeyError, TypeError):
                        rows += [_sample_row(group, sample) for sample in group["samples"]]
        return rows[:MOST_SAMPLES]


def _sample_row(group: Row, sample: dict[str, Any]) -> list[Any]:
    failed = "; ".join(
        f"{failure['kind']}: {failure['reason']}" for failure in sample.get("failed", ())
    )
    texts = [text[:MOST_CHARS] for text in (group["prompt"], sample["text"], group["answer"])]
    return [
        group["step"],
        group["ordinal"],
        *texts,
        sample["reward"],
        sample["tokens"],
        sample["finish_reason"],
        failed,
    ]


def _send_samples(tracker: Tracker, samples: StepSamples, row: Row | None) -> None:
    """Sends the samples of every SAMPLES_EVERY-th step, if the tracker can show samples.

    `row`: the last row that it has.
    """
    log_samples = getattr(tracker, "samples", None)
    if log_samples is None or row is None or row["step"] % SAMPLES_EVERY:
        return
    sample_rows = samples.of_step(row["step"])
    if sample_rows:
        log_samples(row["step"], SAMPLE_COLUMNS, sample_rows)


def _complete(tracker: Tracker, rows: NewRows, folder: Path) -> None:
    """Sends scores that were added to rows after they were sent (`complete_metrics` in
    megarl.evaluation.scores).
    """
    newest_rows = {row["step"]: row for row in read_metrics(folder / METRICS_FILE)}
    for number, before in enumerate(rows.rows):
        after = newest_rows.get(before["step"], before)
        new_scores = {}
        for key, value in after.items():
            if key.startswith("eval/") and value != before.get(key):
                new_scores[key] = value
        if new_scores:
            send(tracker, {"step": after["step"], **new_scores})
            rows.rows[number] = after


def main() -> None:
    """Follows the file until standard input ends, and then for at most `--deadline` seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("stale", type=json.loads)
    parser.add_argument("--project", default="megarl")
    parser.add_argument("--title", default="")
    parser.add_argument("--entity")
    parser.add_argument("--tags", type=json.loads, default=[])
    parser.add_argument("--deadline", type=float, default=60.0)
    arguments = parser.parse_args()
    # these are for the launcher; this process ends after it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *FOR_LAUNCHER):
        signal.signal(number, signal.SIG_IGN)
    lock = open(_path(arguments.folder, arguments.name).with_suffix(".lock"), "a", encoding="utf-8")
    with contextlib.suppress(OSError):  # the file system has no locks
        # waits for the tracker of a killed launch, which may still be finishing
        fcntl.lockf(lock, fcntl.LOCK_EX)
    rows = NewRows(arguments.folder / METRICS_FILE, StaleRows(**arguments.stale))

    def ended(seconds: float) -> bool:
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return False
        threading.Timer(arguments.deadline, lambda: os._exit(1)).start()
        return True

    config = read_yaml(arguments.config.read_text(encoding="utf-8"))
    title = arguments.title or str(arguments.folder)
    settings = TrackerSettings(
        arguments.folder,
        arguments.project,
        title,
        config,
        entity=arguments.entity,
        tags=arguments.tags,
    )
    follow(arguments.name, settings, rows, arguments.first, ended)
    sys.stdout.flush()
    os._exit(0)  # exit handlers of a library must not delay the end of the run


if __name__ == "__main__":
    main()
