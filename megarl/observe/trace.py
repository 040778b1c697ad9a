"""Traces of a run for Perfetto (ui.perfetto.dev): each process writes its spans, which are merged into trace.json.

Format: Chrome trace events, complete events ("ph": "X"), times in microseconds.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRACE_FOLDER = "trace"


class TraceWriter:
    """One process's spans in `run_dir`/trace/<process_name>.jsonl, one event per line, appended when a span ends."""

    def __init__(self, run_dir: Path | str, process_name: str):
        folder = Path(run_dir) / TRACE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"{process_name}.jsonl", "ab", buffering=0)
        self._lock = threading.Lock()
        # Spans are timed by the monotonic clock and placed by the wall clock, which processes and hosts share.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    @contextlib.contextmanager
    def span(self, name: str, track: str = "main", **arguments: Any) -> Iterator[dict[str, Any]]:
        """Times the body, which may add to the arguments. Spans of one track must nest; concurrent spans need separate tracks."""
        began = time.perf_counter()
        try:
            yield arguments
        finally:
            self.add(name, began, time.perf_counter(), track, **arguments)

    def add(self, name: str, began: float, ended: float, track: str = "main", **arguments: Any) -> None:
        """Adds a finished span; `began` and `ended` are readings of time.perf_counter."""
        event = {"name": name, "track": track, "ts": self._epoch_ns / 1e3 + began * 1e6, "dur": (ended - began) * 1e6}
        event |= {"args": arguments} if arguments else {}
        with self._lock:
            self._file.write(json.dumps(event).encode() + b"\n")

    def mark(self, name: str, track: str = "main", **arguments: Any) -> None:
        """Adds an event without length, now."""
        now = time.perf_counter()
        self.add(name, now, now, track, **arguments)

    def close(self) -> None:
        self._file.close()


def merge_traces(run_dir: Path | str) -> Path:
    """Writes `run_dir`/trace.json, with a group of tracks per process. Works after a crash too: damaged lines are left out."""
    run_dir = Path(run_dir)
    events: list[dict[str, Any]] = []
    for number, path in enumerate(sorted((run_dir / TRACE_FOLDER).glob("*.jsonl")), start=1):
        events += _process_events(number, path)
    target = run_dir / "trace.json"
    target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return target


def _process_events(number: int, path: Path) -> list[dict[str, Any]]:
    """One process's events; `number` replaces its pid, since pids of different hosts may be equal."""
    spans = [span for line in path.read_bytes().splitlines(keepends=True) if (span := _parse(line)) is not None]
    threads = {track: thread for thread, track in enumerate(dict.fromkeys(span["track"] for span in spans), start=1)}
    events = [_name("process_name", number, 0, path.stem)]
    events += [_name("thread_name", number, thread, track) for track, thread in threads.items()]
    for span in spans:
        events.append({"ph": "X", "cat": "megarl", "pid": number, "tid": threads[span.pop("track")], **span})
    return events


def _parse(line: bytes) -> dict[str, Any] | None:
    """The event; None if the line is torn or damaged, which leaves a gap in the trace."""
    try:
        span = json.loads(line) if line.endswith(b"\n") else {}
        return span if {"name", "track", "ts", "dur"} <= span.keys() else None
    except (ValueError, AttributeError, RecursionError):
        return None


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
