"""metrics.jsonl has one line per step, a JSON object.

Trackers follow the file (megarl.observe.tracking).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megarl.base.files import write_whole

Row = dict[str, Any]
METRICS_FILE = "metrics.jsonl"
SIMULATED_FILE = "simulated.json"  # marks the folder of a simulated run
QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}


class Histogram(NamedTuple):
    edges: Sequence[float]  # [n]
    counts: Sequence[int]  # [n + 1] numbers of values below, between and above the edges


class MetricsWriter:
    """Appends rows to `run_dir`/metrics.jsonl. Only one process of a run may have a writer.

    A resumed run passes the first step it will write as `resume_step`. Lines of that step and later
    ones are cut off, and so is an incomplete line.
    """

    def __init__(self, run_dir: Path | str, resume_step: int = 0):
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        cut_from(path, resume_step)
        # unbuffered: a line is one write, so readers see it whole
        self._file = open(path, "ab", buffering=0)

    def write(
        self,
        step: int,
        values: Mapping[str, float | int | bool | None],
        distributions: Mapping[str, Sequence[float]] = {},
        histograms: Mapping[str, Histogram] = {},
    ) -> None:
        """Appends one line. Keys whose value is None are left out. NaN and infinities become null.

        The line also has the quantiles of `distributions` and the counts of `histograms`.
        """
        row: Row = {key: value for key, value in values.items() if value is not None}
        for key, sample in distributions.items():
            row |= quantiles(key, sample)
        for key, histogram in histograms.items():
            row[key] = histogram.counts
        self._file.write(_line(step, row))

    def sync(self) -> None:
        """Makes the lines survive a power failure; call it before a checkpoint that counts their
        steps as done.
        """
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def quantiles(key: str, sample: Sequence[float]) -> dict[str, float]:
    """`key`/min, p10, p50, p90 and max of a sample; empty for an empty one."""
    if not len(sample):
        return {}
    values = np.quantile(sample, list(QUANTILES.values())).tolist()
    return {f"{key}/{name}": value for name, value in zip(QUANTILES, values, strict=True)}


def change_rows(run_dir: Path | str, rows: Mapping[int, Row]) -> None:
    """Replaces rows by `rows` (step -> row). No other process may write to the file."""
    path = Path(run_dir) / METRICS_FILE
    data = path.read_bytes()
    begin = 0
    lines = []
    for end, row in parse_lines(data):
        if row is not None and row["step"] in rows:
            values = dict(rows[row["step"]])
            lines.append(_line(values.pop("step"), values))
        else:
            lines.append(data[begin:end])
        begin = end
    write_whole(path, b"".join([*lines, data[begin:]]).decode(errors="replace"))


def _line(step: int, values: Mapping[str, float | int | bool | Sequence[int]]) -> bytes:
    row = {"step": step} | {key: _finite_or_none(value) for key, value in values.items()}
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def cut_from(path: Path, step: int) -> None:
    """Truncates a metrics file before the first line of `step` or later, and before an incomplete
    last line. Keeps a last line that lacks only its newline.
    """
    if not path.exists():
        return
    data = path.read_bytes()
    keep = kept_bytes(data, step)
    if keep > len(data):
        with open(path, "ab") as file:
            file.write(b"\n")
    else:
        os.truncate(path, keep)


def kept_bytes(data: bytes, step: int) -> int:
    """The number of bytes that `cut_from` keeps.

    It is one more than the file has if the last line lacks only its newline.
    """
    keep = 0
    for end, row in parse_lines(data if data.endswith(b"\n") else data + b"\n"):
        if row is None:
            continue
        if row["step"] >= step:
            break
        keep = end
    return keep


def parse_lines(data: bytes, offset: int = 0) -> Iterator[tuple[int, Row | None]]:
    """(offset of its end, row) of each whole line.

    The row of a damaged line is None. Text after the last newline is incomplete.
    """
    # splits only at newlines: a damaged line may contain a carriage return
    for line in data.split(b"\n")[:-1]:
        offset += len(line) + 1
        yield offset, parse_row(line)


def parse_row(line: bytes) -> Row | None:
    """The row of a line; None if it is not a JSON object with a step number."""
    try:
        row = json.loads(line)
        row["step"] += 0
        return {key: math.nan if value is None else value for key, value in row.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def read_metrics(path: Path | str) -> list[Row]:
    """The rows of the whole lines of a metrics.jsonl; empty if there is no file.

    Values that were not finite become NaN. Damaged lines are left out: see `damaged_lines`.
    """
    return [row for _, row in _lines(Path(path)) if row is not None]


def damaged_lines(path: Path | str) -> list[int]:
    """The numbers of damaged whole lines, from 1."""
    return [number for number, (_, row) in enumerate(_lines(Path(path)), start=1) if row is None]


def check_lines(path: Path | str, step: int) -> str:
    """A sentence about the steps before `step` that a metrics.jsonl lacks; empty if it lacks
    none.
    """
    recorded = {row["step"] for row in read_metrics(path)}
    missing = [number for number in range(step) if number not in recorded]
    if missing:
        return lost_lines(path, missing)
    return ""


def lost_lines(path: Path | str, steps: Sequence[int]) -> str:
    """A sentence about the missing `steps`, at least one, in ascending order."""
    steps_text = f"step {steps[0]}"
    if len(steps) > 1:
        steps_text = f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    return f"{path}: the record of {steps_text} was torn or lost"


def _lines(path: Path) -> Iterator[tuple[int, Row | None]]:
    if path.exists():
        return parse_lines(path.read_bytes())
    return iter(())


class MetricsTail:
    """Follows a metrics file that another process writes, even if a resumed run truncates it."""

    def __init__(self, path: Path):
        self.path = path
        # offset of the line's end, and whether the line is in `rows`
        self._lines: list[tuple[int, bool]] = []
        self.rows: list[Row] = []  # the rows of all undamaged lines

    def poll(self) -> int:
        """Brings `rows` up to date; returns how many of its last rows are new."""
        size = self.path.stat().st_size if self.path.exists() else 0
        while self._lines and self._lines[-1][0] > size:
            _, is_row = self._lines.pop()
            if is_row:
                self.rows.pop()
        offset = self._lines[-1][0] if self._lines else 0
        if size == offset:
            return 0
        with open(self.path, "rb") as file:
            file.seek(offset)
            new = list(parse_lines(file.read(), offset))
        rows = [row for _, row in new if row is not None]
        self._lines += [(end, row is not None) for end, row in new]
        self.rows += rows
        return len(rows)
