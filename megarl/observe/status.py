"""One line for each process that says what it is doing, for the live display and error messages."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD_BYTES = 256
_CHECKSUM_BYTES = 10
STATUS_FOLDER = "status"
WORK_EVERY_S = 0.5  # interval at which the progress of long work is published
_READS = 5  # attempts to read a record that is being overwritten; after that it is left out


@dataclass(frozen=True)
class Status:
    name: str  # "<role>.<rank>"
    text: str
    sequence: int
    since_s: float  # seconds since the epoch: other hosts read run directories too

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.since_s)

    def __str__(self) -> str:
        return f"{self.name}: {self.text} ({self.age_s:.0f} s)"


class StatusBoard:
    """This process's line: `run_dir`/status/<name>, one record of 256 bytes that is overwritten in
    place.

    The record is text: sequence number, time, line, and their checksum. A reader that finds a wrong
    checksum has read during a write, and reads again.
    """

    def __init__(self, run_dir: Path | str, name: str):
        self.folder = Path(run_dir) / STATUS_FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT, 0o644)
        self._lock = threading.Lock()
        self._sequence = 0
        self.text = ""
        self.set("starting")

    def set(self, text: str) -> None:
        """Publishes `text` as what this process is doing."""
        with self._lock:
            self._sequence += 1
            self.text = text
            os.pwrite(self._file, _encode(self._sequence, time.time(), text), 0)

    @contextlib.contextmanager
    def waiting(self, for_whom: str, for_what: str) -> Iterator[None]:
        """Publishes the wait while the body runs, then the previous line again."""
        before = self.text
        if for_whom in for_what:
            self.set(f"waiting for {for_what}")
        else:
            self.set(f"waiting for {for_what} from {for_whom}")
        try:
            yield
        finally:
            self.set(before)

    def for_work(self) -> StatusBoard:
        """Makes `work` show this process's progress on this board. Returns the board."""
        global _work_board
        _work_board = self
        return self

    def close(self) -> None:
        os.close(self._file)


_work_board: StatusBoard | None = None


@contextlib.contextmanager
def work(
    subject: str, total: float, *, line: str = "", show: Callable[[float], str] = "{:.0f}".format
) -> Iterator[Callable[[float], None]]:
    """Publishes the progress of long work, and the remaining time.

    Call the function that this yields with each amount that is done.

    The progress is on this process's line, which returns to its earlier text at the end. Work that
    runs beside other work has its own line, `line`.<rank>, which is removed at the end. Without a
    board in this process, nothing is published.
    """
    board = _work_board
    if board is None or not total:
        yield lambda amount: None
        return
    earlier_text = board.text
    if line:
        board = StatusBoard(board.folder.parent, f"{line}.{board.name.rpartition('.')[2]}")
    progress = 0.0
    start_s = time.monotonic()
    next_s = start_s + WORK_EVERY_S

    def advance(amount: float) -> None:
        nonlocal progress, next_s
        progress += amount
        now = time.monotonic()
        if now >= next_s and progress:
            next_s = now + WORK_EVERY_S
            remaining = duration((now - start_s) / progress * max(0.0, total - progress))
            board.set(f"{subject}: {show(progress)} of {show(total)}, {remaining} to go")

    try:
        yield advance
    finally:
        if line:
            board.close()
            with contextlib.suppress(FileNotFoundError):
                (board.folder / board.name).unlink()
        else:
            board.set(earlier_text)


def counted[T](
    items: Sequence[T],
    subject: str,
    size: Callable[[T], float] = lambda item: 1,
    *,
    line: str = "",
    show: Callable[[float], str] = "{:.0f}".format,
) -> Iterator[T]:
    """Yields the items, and shows how many the caller has handled as progress (`work`)."""
    with work(subject, sum(map(size, items)), line=line, show=show) as advance:
        for item in items:
            yield item
            advance(size(item))


def mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds:02d}"
    return f"{minutes}:{seconds:02d}"


def _encode(sequence: int, since_s: float, text: str) -> bytes:
    head = f"{sequence:012d} {since_s:017.6f} ".encode()
    room = RECORD_BYTES - len(head) - _CHECKSUM_BYTES
    # no half characters
    line = " ".join(text.split()).encode(errors="replace")[:room].decode(errors="ignore").encode()
    content = head + line.ljust(room)
    return content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    return f" {zlib.crc32(content):08x}\n".encode()


def _decode(name: str, record: bytes) -> Status | None:
    content = record[:-_CHECKSUM_BYTES]
    if len(record) != RECORD_BYTES or record != content + _checksum(content):
        return None
    sequence, since_s, text = content.decode(errors="replace").split(" ", 2)
    try:
        return Status(name, text.rstrip(), int(sequence), float(since_s))
    except ValueError:  # not a record, or a damaged one
        return None


def _read(path: Path) -> Status | None:
    for _ in range(_READS):
        with contextlib.suppress(OSError):  # removed meanwhile
            status = _decode(path.name, path.read_bytes())
            if status is not None:
                return status
    return None


def read_statuses(run_dir: Path | str) -> list[Status]:
    """The current lines of all processes of a run that have published one, sorted by name."""
    folder = Path(run_dir) / STATUS_FOLDER
    paths = sorted(folder.iterdir(), key=_by_rank) if folder.is_dir() else []
    return [status for status in map(_read, paths) if status is not None]


def clear_statuses(run_dir: Path | str) -> None:
    """Removes the lines of ended processes. Call it before a run's processes start."""
    folder = Path(run_dir) / STATUS_FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        path.unlink()


def _by_rank(path: Path) -> tuple[str, int]:
    role, _, rank = path.name.rpartition(".")
    return role, int(rank) if rank.isdigit() else 0


TRACE_FOLDER = "trace"


class TraceWriter:
    """One process's spans in `run_dir`/trace/<process_name>.jsonl, one event per line, appended
    when a span ends; `merge_traces` merges those of all processes, for Perfetto
    (ui.perfetto.dev).

    Format: Chrome trace events, complete events ("ph": "X"), times in microseconds.
    """

    def __init__(self, run_dir: Path | str, process_name: str):
        folder = Path(run_dir) / TRACE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"{process_name}.jsonl", "ab", buffering=0)
        self._lock = threading.Lock()
        # Spans are timed by the monotonic clock and placed by the wall clock, which processes and
        # hosts share.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    @contextlib.contextmanager
    def span(self, name: str, track: str = "main", **arguments: Any) -> Iterator[dict[str, Any]]:
        """Times the block, which may add to the yielded arguments.

        Spans of one track must nest; concurrent spans need separate tracks.
        """
        begin_s = time.perf_counter()
        try:
            yield arguments
        finally:
            self.add(name, begin_s, time.perf_counter(), track, **arguments)

    def add(
        self, name: str, begin_s: float, end_s: float, track: str = "main", **arguments: Any
    ) -> None:
        """Adds a finished span. `begin_s` and `end_s` are values of time.perf_counter."""
        event = {
            "name": name,
            "track": track,
            "ts": self._epoch_ns / 1e3 + begin_s * 1e6,
            "dur": (end_s - begin_s) * 1e6,
        }
        event |= {"args": arguments} if arguments else {}
        with self._lock:
            self._file.write(json.dumps(event).encode() + b"\n")

    def mark(self, name: str, track: str = "main", **arguments: Any) -> None:
        """Adds an event without duration, now."""
        now = time.perf_counter()
        self.add(name, now, now, track, **arguments)

    def close(self) -> None:
        self._file.close()


def merge_traces(run_dir: Path | str) -> Path:
    """Writes `run_dir`/trace.json, with a group of tracks per process.

    Also works after a crash: damaged lines are left out.
    """
    run_dir = Path(run_dir)
    events: list[dict[str, Any]] = []
    for number, path in enumerate(sorted((run_dir / TRACE_FOLDER).glob("*.jsonl")), start=1):
        events += _process_events(number, path)
    target = run_dir / "trace.json"
    target.write_text(
        json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8"
    )
    return target


def _process_events(number: int, path: Path) -> list[dict[str, Any]]:
    """The events of one process.

    `number` replaces its pid, since pids on different hosts may be equal.
    """
    names = [_name("process_name", number, 0, path.stem)]
    spans: list[dict[str, Any]] = []
    threads: dict[str, int] = {}  # track -> number of its thread
    for line in path.read_bytes().splitlines(keepends=True):
        span = _parse(line)
        if span is None:
            continue
        track = span.pop("track")
        if track not in threads:
            threads[track] = len(threads) + 1
            names.append(_name("thread_name", number, threads[track], track))
        spans.append({"ph": "X", "cat": "megarl", "pid": number, "tid": threads[track], **span})
    return [*names, *spans]


def _parse(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None if it is incomplete or damaged."""
    try:
        span = json.loads(line) if line.endswith(b"\n") else {}
        if {"name", "track", "ts", "dur"} <= span.keys():
            return span
        return None
    except (ValueError, AttributeError, RecursionError):
        return None


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
