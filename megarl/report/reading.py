"""The files of a run, as the page wants them: columns of metrics, spans of the trace, an index of samples, and the samples in chunks.

A reader may be asked again while the run goes on, and then returns what is new. Whole lines count; damaged ones are left out and counted.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.observe.advisories import advisories
from megarl.observe.metrics import METRICS_FILE, Row
from megarl.observe.rollouts import FailuresTail, one_line
from megarl.observe.trace import TRACE_FOLDER
from megarl.report.advice import advice
from megarl.report.samples import Samples
from megarl.rewards.failures import FAILED_EPISODES, FAILED_FRACTION
from megarl.rewards.failures import told as failure_told

LAST_STEPS = 5  # in which something must have failed for its reason to be told
MOST_RANKS = 64  # trainer ranks whose trace is read
CHECKED_BYTES = 64  # before the place where reading goes on: unchanged unless a resumed run has cut the file
NOT_FINITE = "n"  # in the place of NaN and infinities, which JSON lacks

KINDS = {
    "train step": "train",
    "wait for batch": "wait for a batch",
    "wait for engines": "wait for engines",
    "wait for evaluation engines": "evaluation weights",
    "write weights": "write weights",
    "write evaluation weights": "evaluation weights",
    "evaluation weights": "evaluation weights",
    "checkpoint": "save",
    "complete": "save",
    "export": "save",
    "generate batch": "generate",
    "pause for weights": "pause",
    "evaluate": "evaluate",
    "probe": "probe",
    "compare weights": "compare",
    "away": "away",
}
ENGINE_MARKS = ("lost", "joins", "left")
NUMBER = re.compile(r"\d{1,15}")  # which JavaScript has exactly


class _Event(msgspec.Struct):
    name: str
    track: str
    ts: float
    dur: float
    args: dict[str, Any] = {}


class _Numbers(msgspec.Struct):
    """Those in an event's arguments."""

    engine_tokens: list[int] = []
    to: list[tuple[int, int]] = []
    bytes: int = 0


_event = msgspec.json.Decoder(_Event).decode


class FileChanged(Exception):
    """What was read of a file is no longer there: a resumed run has cut it."""


class Tail:
    """The whole lines of a file, as they come."""

    def __init__(self, path: Path):
        self.path, self.damaged, self.unfinished = path, 0, False
        self._end, self._last = 0, b""

    def lines(self) -> Iterator[bytes]:
        if not self.path.is_file():
            if self._end:
                raise FileChanged
            return
        with open(self.path, "rb") as file:
            start = self._end - len(self._last)
            file.seek(start)
            if file.read(len(self._last)) != self._last:
                raise FileChanged
            self.unfinished = False
            for line in file:
                if not line.endswith(b"\n"):
                    self.unfinished = True
                    return
                self._end += len(line)
                self._last = line[-CHECKED_BYTES:]
                yield line

    def objects(self) -> Iterator[Row]:
        for line in self.lines():
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict):
                yield found
            else:
                self.damaged += 1


class RunReader:
    """`text_bytes`: about how large the samples' texts may become; if there are more, whole steps are left without."""

    def __init__(self, run_dir: Path, text_bytes: int):
        self.run_dir, self._text_bytes = run_dir, text_bytes
        self._begin()

    def _begin(self) -> None:
        self._metrics = Tail(self.run_dir / METRICS_FILE)
        self._traces: dict[str, Tail] = {}
        self._failures = FailuresTail(self.run_dir)
        self._samples = Samples(self.run_dir, Tail, self._text_bytes)
        self._rows: list[Row] = []
        self._out_of_order = 0
        self._epoch_us: float | None = None
        self._engine_tokens: Counter[int] = Counter()
        self._peers: Counter[int] = Counter()  # the same, since all engines are there
        self._lost: set[str] = set()
        self._batch = -1
        self._expected: dict[str, Any] = {}
        self._settings = _settings(self.run_dir)

    def read(self, follow: bool = False) -> dict[str, Any]:
        """What is new since the last call; everything, with `afresh`, at the first, and when a resumed run has cut a file.
        With `follow` the newest step's samples are kept back until all ranks must have written theirs: until the next step's are
        there, or nothing has been written for a while."""
        afresh = not self._metrics._end and not self._traces
        try:
            found = self._read(follow)
        except FileChanged:
            self._begin()
            found, afresh = self._read(follow), True
        return {"name": self.run_dir.resolve().name, "path": str(self.run_dir), "afresh": afresh, **found}

    def _read(self, follow: bool) -> dict[str, Any]:
        columns, trace, samples = self._columns(), self._spans(), self._samples.read(follow)
        told = advisories(self._rows) if self._rows else []
        tails = [self._metrics, *self._traces.values(), *self._samples.tails]
        return {
            "settings": self._settings,
            **columns,
            **trace,
            "samples": samples,
            "advisories": [*told, *self._reasons(), *advice(self._rows, self._settings, self._peers)],
            "expected": self._expected,
            "engine_tokens": [self._engine_tokens[index] for index in range(max(self._engine_tokens, default=-1) + 1)],
            "skipped": {
                str(tail.path.relative_to(self.run_dir)): tail.damaged + (tail.unfinished and not follow)
                for tail in tails
                if tail.damaged or (tail.unfinished and not follow)
            },
            "out_of_order": self._out_of_order,
        }

    def _reasons(self) -> list[str]:
        """What failed last, if something has failed in the last steps."""
        self._failures.poll()
        found = []
        for episodes, key, what in ((True, FAILED_EPISODES, "episode"), (False, FAILED_FRACTION, "score")):
            if (last := self._failures.last.get(episodes)) and any(row.get(key) for row in self._rows[-LAST_STEPS:]):
                found.append(f"the last {what} that failed, of prompt {last.ordinal} ({failure_told(last)}): {one_line(last.reason)}")
        return found

    def _columns(self) -> dict[str, Any]:
        rows: list[Row] = []
        for row in self._metrics.objects():
            step, last = row.get("step"), (rows or self._rows or [{"step": -math.inf}])[-1]["step"]
            if not isinstance(step, int) or isinstance(step, bool):
                self._metrics.damaged += 1
            elif step <= last:
                self._out_of_order += 1
            else:
                rows.append(
                    {key: math.nan if value is None else value for key, value in row.items() if isinstance(value, int | float | None)}
                )
        self._rows += rows
        keys = dict.fromkeys(key for row in rows for key in row if key != "step")
        return {"steps": [row["step"] for row in rows], "metrics": {key: [_number(row.get(key)) for row in rows] for key in keys}}

    def _spans(self) -> dict[str, Any]:
        folder = self.run_dir / TRACE_FOLDER
        names = sorted((path.stem for path in folder.glob("*.jsonl")), key=_by_rank)
        trainers = [name for name in names if name.startswith("trainer.")]
        for name in names:
            if name not in trainers[MOST_RANKS:]:
                self._traces.setdefault(name, Tail(folder / f"{name}.jsonl"))
        lanes: dict[str, list[list[Any]]] = {}
        marks, pairs, pauses = [], {}, []
        for process, tail in self._traces.items():
            for line in tail.lines():
                try:
                    event = _event(line)
                    msgspec.convert(event.args, _Numbers)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    tail.damaged += 1
                    continue
                self._epoch_us = event.ts if self._epoch_us is None else self._epoch_us
                at_s, dur_s = (event.ts - self._epoch_us) / 1e6, event.dur / 1e6
                name, track, told = event.name, event.track, event.args
                kind = next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), None)
                number = int(found[0]) if (found := NUMBER.search(name)) else None
                if name == "weights map":
                    pairs[process] = told.get("to", [])
                elif dur_s == 0 and (process.startswith("launcher.") or name in ENGINE_MARKS):
                    self._expected = told.pop("expected", self._expected)
                    if name == "left":
                        self._lost.discard(track)
                    elif name in ENGINE_MARKS:
                        self._lost.add(track)
                    marks.append({**told, "at": at_s, "who": track if track != "main" else process, "what": name})
                elif kind is not None:
                    lane = process if track == "main" else track if track != "weights" else f"{process} weights"
                    lanes.setdefault(lane, []).append([kind, round(at_s, 6), round(dur_s, 6), number])
                    self._count(kind, track, number, told)
                    if kind == "pause":
                        pauses.append({**told, "version": number, "at": at_s, "pause_s": dur_s})
                    elif kind == "write weights" and "bytes" in told:
                        lanes[lane][-1].append(told["bytes"])
        return {
            "epoch_s": self._epoch_us and self._epoch_us / 1e6,
            "lanes": {
                name: sorted(spans, key=lambda span: span[1]) for name, spans in sorted(lanes.items(), key=lambda lane: _by_rank(lane[0]))
            },
            "marks": sorted(marks, key=lambda mark: mark["at"]),
            "pauses": pauses,
            "pairs": pairs,
            "ranks": [min(len(trainers), MOST_RANKS), len(trainers)],
        }

    def _count(self, kind: str, track: str, number: int | None, told: dict[str, Any]) -> None:
        """Counts the engines' tokens. Beside each other they are compared only while none is lost."""
        tokens = dict(enumerate(told.get("engine_tokens", ())))
        self._engine_tokens.update(tokens)
        if kind == "away":
            self._lost.discard(track)
        elif kind == "generate" and number is not None:
            if number <= self._batch:  # of another start
                self._lost.clear()
            self._batch = number
            self._peers.update(tokens)
        if self._lost or kind == "away":
            self._peers.clear()


def _settings(run_dir: Path) -> dict[str, Any]:
    """The settings that the page speaks of; empty without a readable config.yaml."""
    try:
        config = OmegaConf.load(run_dir / "config.yaml")
        keys = ("model.path", "algorithm.name", "async.capacity", "async.max_staleness", "rollout.prompts_per_step", "rollout.n")
        keys += ("rollout.max_tokens", "generator.engines", "trainer.optimizer.lr", "max_steps", "seed", "observe.rollouts_per_step")
        found = {key: OmegaConf.select(config, key) for key in keys}
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException, AttributeError):
        return {}
    return {key: value if isinstance(value, str) else _number(value) for key, value in found.items()}


def _number(value: Any) -> float | int | str | None:
    if not isinstance(value, bool | int | float):
        return None
    return (int(value) if isinstance(value, bool) else value) if abs(value) <= sys.float_info.max else NOT_FINITE


def _by_rank(name: str) -> tuple[str, int, str]:
    """Trainers before generators before engines before those that only evaluate before the rest; ranks by number."""
    role, _, rest = name.partition(".")
    number = NUMBER.match(rest)
    order = {"launcher": "0", "trainer": "1", "generator": "2", "engine": "3", "eval_engine": "4"}.get(role, f"5{role}")
    return order, int(number[0]) if number else 0, rest
