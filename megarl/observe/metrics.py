"""metrics.jsonl: one JSON object a step, whole lines only; the numbers also go to TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends rows to `run_dir`/metrics.jsonl, and mirrors them to `run_dir`/tb/. One process of a run holds one.

    A resumed run passes the first step it will write as `resume_step`: that step's line and all later ones, left by the
    run it continues, are cut off, and with them a line that was being written when it died.
    """

    def __init__(self, run_dir: Path | str, tensorboard: bool, resume_step: int = 0):
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        cut_from(path, resume_step)
        self._file = open(path, "ab", buffering=0)  # one write a line: a reader never waits for half of it
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tb"), purge_step=resume_step)

    def write(self, step: int, values: Mapping[str, float | int | bool | None]) -> None:
        """Appends one line. A None is a key without a value on this step, and is left out; NaN and infinities become null."""
        known = {key: value for key, value in values.items() if value is not None}
        row = {"step": step} | {key: _finite_or_none(value) for key, value in known.items()}
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        if self._board is not None:
            for key, value in known.items():
                self._board.add_scalar(key, float(value), step)
            self._board.flush()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _finite_or_none(value: float | int | bool) -> float | int | bool | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut_from(path: Path, step: int) -> None:
    """Truncates a metrics file before the first line of `step` or later, and before a torn last line."""
    if not path.exists():
        return
    keep_bytes = 0
    for end, row in parse_lines(path.read_bytes(), path):
        if row["step"] >= step:
            break
        keep_bytes = end
    os.truncate(path, keep_bytes)


def parse_lines(data: bytes, path: Path, offset: int = 0) -> Iterator[tuple[int, Row]]:
    """(offset of its end, row) of each whole line; what follows the last newline is still being written.

    Raises ValueError, naming file and offset, on a whole line that is not a JSON object with a step.
    """
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        try:
            row = json.loads(line)
            row["step"] += 0
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: not a line of metrics at byte {offset}: {line[:80]!r}") from error
        offset += len(line)
        yield offset, {key: math.nan if value is None else value for key, value in row.items()}


def read_metrics(path: Path | str) -> list[Row]:
    """All whole lines of a metrics.jsonl, none where there is no file yet; values that were not finite come back as NaN."""
    path = Path(path)
    return [row for _, row in parse_lines(path.read_bytes(), path)] if path.exists() else []


class MetricsTail:
    """Follows a metrics file that another process writes, also across its truncation by a resumed run."""

    def __init__(self, path: Path):
        self.path = path
        self._ends: list[int] = []
        self.rows: list[Row] = []

    def poll(self) -> int:
        """Brings `rows` up to date; returns how many of its last rows are new."""
        size = self.path.stat().st_size if self.path.exists() else 0
        while self._ends and self._ends[-1] > size:
            self._ends.pop()
            self.rows.pop()
        offset = self._ends[-1] if self._ends else 0
        if size == offset:
            return 0
        with open(self.path, "rb") as file:
            file.seek(offset)
            new = list(parse_lines(file.read(), self.path, offset))
        self._ends += [end for end, _ in new]
        self.rows += [row for _, row in new]
        return len(new)
