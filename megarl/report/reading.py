"""Reads the files of a run for the page: columns of metrics, spans of the trace, an index of
samples, and the samples in chunks.

A reader can be asked again while the run goes on, and then returns what is new. It uses only whole
lines. Damaged lines are left out and counted.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import statistics
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, median_high
from typing import Any, Protocol

import msgspec
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.observe.agreement import advisories, scoring_binds
from megarl.observe.metrics import METRICS_FILE, SIMULATED_FILE, Row
from megarl.observe.samples import SAMPLES_FILE, FailuresTail, one_line
from megarl.observe.status import TRACE_FOLDER
from megarl.rewards.score import FAILED_EPISODES, FAILED_FRACTION, failure_label

SETTLED_S = 10.0  # time after which every rank has written its part of a step
CHUNK_BYTES = 400_000  # size of a chunk's JSON before compression
EXCERPT_CHARS = 60  # characters of a response shown in the table
COMPRESSED = 0.3  # approximate size of compressed texts relative to the files
COLUMNS = (
    "step",
    "ordinal",
    "sample",
    "reward",
    "tokens",
    "age",
    "spread",
    "finish",
    "failed",
    "dropped",
    "begins",
    "chunk",
    "place",
)


class Lines(Protocol):
    path: Path
    damaged: int
    unfinished: bool

    def lines(self) -> Iterator[bytes]: ...


class _Sample(msgspec.Struct):
    reward: float | None
    text: str
    tokens: int
    parts: dict[str, float | None] = {}
    turn_rewards: list[tuple[int, float]] = []
    failed: list[dict[str, str]] = []
    finish_reason: str = ""
    turns: int = 1
    versions: list[tuple[int, int]] = []
    environment: list[tuple[int, int]] = []
    numbers: dict[str, Any] | None = None  # from tokens.<rank>.jsonl


class _Group(msgspec.Struct):
    step: int
    ordinal: int
    prompt: str
    answer: str
    samples: list[_Sample]
    prompt_tokens: int = 0
    dropped: bool = False


class _Tokens(msgspec.Struct):
    step: int
    ordinal: int
    sample: int
    ids: list[int]
    positions: list[tuple[int, int]]
    diff: list[float | None]
    mu: list[float | None]
    advantage: float | list[float | None] | None
    pieces: dict[int, str] = {}


_group = msgspec.json.Decoder(_Group).decode
_tokens = msgspec.json.Decoder(_Tokens).decode
_encode = msgspec.json.Encoder().encode


class Samples:
    """The samples of a run: an index with a row for each, and texts in compressed chunks, which the
    page unpacks when they are looked at.
    """

    def __init__(self, run_dir: Path, tail: Callable[[Path], Lines], text_bytes: int):
        self._folder = run_dir / "rollouts"
        self._tail = tail
        self._groups = tail(self._folder / SAMPLES_FILE)
        self._ranks: dict[str, _RankTokens] = {}
        self._incomplete_step: list[_Group] = []
        self._chunks = 0
        files = [self._folder / SAMPLES_FILE, *self._folder.glob("tokens.*.jsonl")]
        size = COMPRESSED * sum(path.stat().st_size for path in files if path.exists())
        self.every = max(1, math.ceil(size / text_bytes))  # only one step in this many has texts

    @property
    def tails(self) -> list[Lines]:
        return [self._groups, *(rank.tail for rank in self._ranks.values())]

    def read(self, follow: bool) -> dict[str, Any]:
        """The new samples.

        `index`: their columns; `chunks`: their texts, gzipped JSON in base64; `every`: k if only
        one step in k has texts.
        """
        for path in sorted(self._folder.glob("tokens.*.jsonl")):
            self._ranks.setdefault(path.name, _RankTokens(self._tail(path)))
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        chunks: list[str] = []
        full: list[bytes] = []
        for group in self._new(follow):
            with_text = group.step % self.every == 0
            self._index(columns, group, len(full) if with_text else -1)
            if with_text:
                full.append(_encode(group))
            if sum(map(len, full)) > CHUNK_BYTES:
                chunks.append(_chunk(full))
                full = []
                self._chunks = self._chunks + 1
        if full:
            chunks.append(_chunk(full))
            self._chunks += 1
        return {"index": columns, "chunks": chunks, "every": self.every}

    def _new(self, follow: bool) -> Iterator[_Group]:
        groups = self._incomplete_step
        self._incomplete_step = []
        newest = groups[-1].step if groups else -1
        for line in self._groups.lines():
            try:
                group = _group(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self._groups.damaged += 1
                continue
            newest = max(newest, group.step)
            groups.append(group)
            if len(groups) > 1 and groups[0].step < newest:
                complete = [group for group in groups if group.step < newest]
                groups = [group for group in groups if group.step >= newest]
                yield from self._with_numbers(complete)
        if follow and not self._settled():
            self._incomplete_step = groups
        else:
            yield from self._with_numbers(groups)

    def _settled(self) -> bool:
        """Whether the newest lines are so old that all ranks have written theirs: the run waits, or
        has ended.
        """
        files = [self._groups.path, *(rank.tail.path for rank in self._ranks.values())]
        return all(
            time.time() - path.stat().st_mtime > SETTLED_S for path in files if path.exists()
        )

    def _with_numbers(self, groups: list[_Group]) -> Iterator[_Group]:
        """The groups of one step, with the per-token numbers that ranks have written."""
        numbers: dict[tuple[int, int], dict[str, Any]] = {}
        for rank in self._ranks.values():
            numbers |= rank.of_step(groups[0].step) if groups else {}
        for group in groups:
            for index, sample in enumerate(group.samples):
                sample.numbers = numbers.get((group.ordinal, index))
            yield group

    def _index(self, columns: dict[str, list[Any]], group: _Group, place: int) -> None:
        rewards = [sample.reward for sample in group.samples if sample.reward is not None]
        spread = statistics.pstdev(rewards) if rewards else None
        for number, sample in enumerate(group.samples):
            age = None
            if sample.versions:
                age = group.step - min(version for version, _ in sample.versions)
            row = {
                "step": group.step,
                "ordinal": group.ordinal,
                "sample": number,
                "reward": sample.reward,
                "tokens": sample.tokens,
                "age": age,
                "spread": spread,
                "finish": sample.finish_reason,
                "failed": int(bool(sample.failed)),
                "dropped": int(group.dropped),
                "begins": " ".join(sample.text[:EXCERPT_CHARS].split()),
                "chunk": self._chunks if place >= 0 else -1,
                "place": place,
            }
            for name in COLUMNS:
                columns[name].append(row[name])


class _RankTokens:
    """The lines of one trainer rank, in ascending order of steps."""

    def __init__(self, tail: Lines):
        self.tail = tail
        self._pieces: dict[int, str] = {}
        self._ahead: deque[_Tokens] = deque()
        self._lines: Iterator[bytes] = iter(())

    def of_step(self, step: int) -> dict[tuple[int, int], dict[str, Any]]:
        samples = {}
        while True:
            line = self._next()
            if line is None:
                return samples
            if line.step > step:
                self._ahead.appendleft(line)
                return samples
            if line.step == step:
                samples[line.ordinal, line.sample] = {
                    "pieces": [self._pieces.get(number, f"<{number}>") for number in line.ids],
                    "positions": line.positions,
                    "diff": line.diff,
                    "mu": line.mu,
                    "advantage": line.advantage,
                }

    def _next(self) -> _Tokens | None:
        if self._ahead:
            return self._ahead.popleft()
        for again in (False, True):
            if again:
                self._lines = self.tail.lines()
            for line in self._lines:
                try:
                    tokens = _tokens(line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    self.tail.damaged += 1
                    continue
                lengths = {len(tokens.ids), len(tokens.diff), len(tokens.mu)}
                lengths.add(sum(count for _, count in tokens.positions))
                if isinstance(tokens.advantage, list):
                    lengths.add(len(tokens.advantage))
                if len(lengths) > 1:
                    self.tail.damaged += 1
                    continue
                self._pieces |= tokens.pieces
                return tokens
        return None


def _chunk(groups: list[bytes]) -> str:
    return base64.b64encode(gzip.compress(b"[" + b",".join(groups) + b"]", 6, mtime=0)).decode()


RECENT = 20  # steps that advice is based on
FEWEST = 10
WAITS = 0.4  # share of a step
TRUNCATED = 0.1
NO_SIGNAL = 0.5
SOLVED = 0.9  # position of the mean reward between a step's lowest and highest reward
GROWTH = 2.0  # length of the queue at the end, relative to that of RECENT steps before
SLOW = 0.7  # share of its peers' tokens
FEWEST_TOKENS = 10_000  # tokens that an engine's peers must have made


def advice(
    rows: Sequence[Row],
    settings: Mapping[str, Any],
    engine_tokens: Mapping[int, int],
    group_of: Mapping[int, int] = {},
) -> list[str]:
    """The page's advice on a run, in addition to `observe.agreement.advisories`. Each piece of
    advice names the numbers behind it.
    """
    recent = rows[-RECENT:]
    if len(recent) < FEWEST:
        return []
    # an engine is compared with engines of its own group
    tokens_by_group: dict[int, dict[int, int]] = defaultdict(dict)
    for index, tokens in engine_tokens.items():
        tokens_by_group[group_of.get(index, 0)][index] = tokens
    rules = (
        _waits(recent, settings),
        _truncated(recent),
        _no_signal(recent),
        _queue(rows),
        *map(_slow_engine, tokens_by_group.values()),
    )
    return [text for text in rules if text]


def _waits(rows: Sequence[Row], settings: Mapping[str, Any]) -> str:
    step = _median(rows, "time/step_s")
    trainer = _median(rows, "time/trainer_wait_s")
    generator = _median(rows, "time/generator_wait_s")
    if not step > 0 or settings.get("async.capacity") == 0:  # a synchronous run must wait
        return ""
    if trainer > WAITS * step and trainer > generator and not scoring_binds(rows):
        return (
            f"the trainer waits {trainer / step:.0%} of a step ({trainer:.3g} of {step:.3g} s, "
            f"median of the last {len(rows)}): "
            "generation is the slower side; use more engines, shorter responses, or a larger "
            "async.capacity if times vary"
        )
    if generator > WAITS * step and generator > trainer:
        return (
            f"the engines wait {generator / step:.0%} of a step for weights ({generator:.3g} of "
            f"{step:.3g} s, median of the last "
            f"{len(rows)}): training is the slower side; use fewer engines, more trainer ranks, "
            "or a larger async.capacity"
        )
    return ""


def _truncated(rows: Sequence[Row]) -> str:
    share = _median(rows, "truncated_fraction")
    if not share > TRUNCATED:
        return ""
    return (
        f"{share:.0%} of the responses end at rollout.max_tokens (median of the last {len(rows)} "
        "steps): their rewards say little"
    )


def _no_signal(rows: Sequence[Row]) -> str:
    share = _median(rows, "zero_advantage_fraction")
    if not NO_SIGNAL < share < 1:
        return ""
    lowest = _median(rows, "reward/min")
    mean = _median(rows, "reward/mean")
    highest = _median(rows, "reward/max")
    height = (mean - lowest) / (highest - lowest) if highest > lowest else math.nan
    if height >= SOLVED:  # rewards are equal because all are right: nothing is left to learn
        return ""
    difficulty = "hard" if height <= 1 - SOLVED else "easy or too hard"
    return (
        f"in {share:.0%} of the groups all rewards are equal (median of the last {len(rows)} "
        f"steps), so they teach nothing: the prompts are too {difficulty}; "
        "rollout.dynamic_sampling replaces them"
    )


def _queue(rows: Sequence[Row]) -> str:
    if len(rows) < 2 * RECENT:
        return ""
    before = _median(rows[-2 * RECENT : -RECENT], "prompts/buffered")
    now = _median(rows[-RECENT:], "prompts/buffered")
    if not (now > GROWTH * before and now > 1):
        return ""
    return (
        f"the queue of finished groups grows: {now:.0f} wait, {before:.0f} waited {RECENT} "
        "steps ago; samples grow older than needed"
    )


def _slow_engine(tokens: Mapping[int, int]) -> str:
    if len(tokens) < 2:
        return ""
    usual = median_high(tokens.values())
    slow = [index for index, count in sorted(tokens.items()) if count < SLOW * usual]
    if usual < FEWEST_TOKENS or not slow:
        return ""
    shares = ", ".join(f"engine {index} {tokens[index] / usual:.0%}" for index in slow[:5])
    return (
        "some engines made far fewer tokens than the median engine, in per cent of its "
        f"tokens: {shares}"
    )


def _median(rows: Sequence[Row], key: str) -> float:
    values = []
    for row in rows:
        value = row.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            values.append(value)
    if values:
        return median(values)
    return math.nan


LAST_STEPS = 5  # the page shows a failure's reason if something failed in this many steps
MOST_RANKS = 64  # trainer ranks whose trace is read
# bytes before the reading position that show whether a resumed run has cut the file
CHECKED_BYTES = 64
NOT_FINITE = "n"  # stands for NaN and infinities, which JSON lacks

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
NUMBER = re.compile(r"\d{1,15}")  # integers that JavaScript represents exactly


class _Event(msgspec.Struct):
    name: str
    track: str
    ts: float
    dur: float
    args: dict[str, Any] = {}


class _Numbers(msgspec.Struct):
    """The numbers in an event's arguments."""

    engine_tokens: list[int] = []
    engine_groups: list[int] = []
    to: list[tuple[int, int]] = []
    bytes: int = 0


_event = msgspec.json.Decoder(_Event).decode


@dataclass
class _Chart:
    """What new events add to the page's picture of time."""

    lanes: dict[str, list[list[Any]]] = field(default_factory=dict)  # lane -> its spans
    marks: list[dict[str, Any]] = field(default_factory=list)
    pairs: dict[str, list[Any]] = field(default_factory=dict)  # sender -> receivers and bytes
    pauses: list[dict[str, Any]] = field(default_factory=list)


class FileChanged(Exception):
    """A resumed run has cut a part of a file that was already read."""


class Tail:
    """The whole lines of a file, as they are written."""

    def __init__(self, path: Path):
        self.path = path
        self.damaged = 0
        self.unfinished = False
        self._end = 0
        self._last = b""

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
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row
            else:
                self.damaged += 1


class RunReader:
    """`text_bytes`: approximate limit for the samples' texts.

    Beyond it, whole steps are left without texts.
    """

    def __init__(self, run_dir: Path, text_bytes: int):
        self.run_dir = run_dir
        self._text_bytes = text_bytes
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
        self._peers: Counter[int] = Counter()  # the engines' tokens while no engine was lost
        self._group_of: dict[int, int] = {}  # engine -> its group, if there are groups
        self._lost: set[str] = set()
        self._batch = -1
        self._expected: dict[str, Any] = {}
        self._settings = _settings(self.run_dir)

    @property
    def _name(self) -> str:
        """The name of the run. It marks a run that megarl plan has simulated."""
        return (
            self.run_dir.resolve().name + " (simulated)" * (self.run_dir / SIMULATED_FILE).exists()
        )

    def read(self, follow: bool = False) -> dict[str, Any]:
        """Everything that is new since the last call.

        The first call returns everything, with `afresh`. So does a call after a resumed run has cut
        a file. With `follow`, the newest step's samples are kept back until all ranks must have
        written theirs: when the next step's samples are there, or nothing was written for a while.
        """
        afresh = not self._metrics._end and not self._traces
        try:
            news = self._read(follow)
        except FileChanged:
            self._begin()
            news = self._read(follow)
            afresh = True
        return {"name": self._name, "path": str(self.run_dir), "afresh": afresh, **news}

    def _read(self, follow: bool) -> dict[str, Any]:
        columns = self._columns()
        trace = self._spans()
        samples = self._samples.read(follow)
        advisory_texts = advisories(self._rows) if self._rows else []
        advisory_texts += self._reasons()
        advisory_texts += advice(self._rows, self._settings, self._peers, self._group_of)
        skipped: dict[str, int] = {}
        for tail in (self._metrics, *self._traces.values(), *self._samples.tails):
            count = tail.damaged + (tail.unfinished and not follow)
            if count:
                skipped[str(tail.path.relative_to(self.run_dir))] = count
        return {
            "settings": self._settings,
            **columns,
            **trace,
            "samples": samples,
            "advisories": advisory_texts,
            "expected": self._expected,
            "engine_tokens": [
                self._engine_tokens[index]
                for index in range(max(self._engine_tokens, default=-1) + 1)
            ],
            "skipped": skipped,
            "out_of_order": self._out_of_order,
        }

    def _reasons(self) -> list[str]:
        """The newest failures, if anything has failed in the last steps."""
        self._failures.poll()
        texts = []
        for episodes, key, subject in (
            (True, FAILED_EPISODES, "episode"),
            (False, FAILED_FRACTION, "score"),
        ):
            last = self._failures.last.get(episodes)
            if last and any(row.get(key) for row in self._rows[-LAST_STEPS:]):
                texts.append(
                    f"the last {subject} that failed, of prompt {last.ordinal} "
                    f"({failure_label(last)}): {one_line(last.reason)}"
                )
        return texts

    def _columns(self) -> dict[str, Any]:
        rows: list[Row] = []
        for row in self._metrics.objects():
            step = row.get("step")
            last = (rows or self._rows or [{"step": -math.inf}])[-1]["step"]
            if not isinstance(step, int) or isinstance(step, bool):
                self._metrics.damaged += 1
            elif step <= last:
                self._out_of_order += 1
            else:
                rows.append(
                    {
                        key: math.nan if value is None else value
                        for key, value in row.items()
                        if isinstance(value, int | float | None)
                    }
                )
        self._rows += rows
        keys = dict.fromkeys(key for row in rows for key in row if key != "step")
        return {
            "steps": [row["step"] for row in rows],
            "metrics": {key: [_number(row.get(key)) for row in rows] for key in keys},
        }

    def _spans(self) -> dict[str, Any]:
        folder = self.run_dir / TRACE_FOLDER
        names = sorted((path.stem for path in folder.glob("*.jsonl")), key=_by_rank)
        trainers = [name for name in names if name.startswith("trainer.")]
        for name in names:
            if name not in trainers[MOST_RANKS:]:
                self._traces.setdefault(name, Tail(folder / f"{name}.jsonl"))
        chart = _Chart()
        for process, tail in self._traces.items():
            for line in tail.lines():
                try:
                    event = _event(line)
                    msgspec.convert(event.args, _Numbers)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    tail.damaged += 1
                    continue
                self._add_event(event, process, chart)
        return {
            "epoch_s": self._epoch_us and self._epoch_us / 1e6,
            "lanes": {
                name: sorted(spans, key=lambda span: span[1])
                for name, spans in sorted(chart.lanes.items(), key=lambda lane: _by_rank(lane[0]))
            },
            "marks": sorted(chart.marks, key=lambda mark: mark["at"]),
            "pauses": chart.pauses,
            "pairs": chart.pairs,
            "ranks": [min(len(trainers), MOST_RANKS), len(trainers)],
        }

    def _add_event(self, event: _Event, process: str, chart: _Chart) -> None:
        self._epoch_us = event.ts if self._epoch_us is None else self._epoch_us
        at_s = (event.ts - self._epoch_us) / 1e6
        duration_s = event.dur / 1e6
        name = event.name
        track = event.track
        arguments = event.args
        kind = next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), None)
        match = NUMBER.search(name)
        number = int(match[0]) if match else None
        if name == "weights map":
            chart.pairs[process] = arguments.get("to", [])
        elif duration_s == 0 and (process.startswith("launcher.") or name in ENGINE_MARKS):
            self._expected = arguments.pop("expected", self._expected)
            if name == "left":
                self._lost.discard(track)
            elif name in ENGINE_MARKS:
                self._lost.add(track)
            subject = track if track != "main" else process
            chart.marks.append({**arguments, "at": at_s, "who": subject, "what": name})
        elif kind is not None:
            lane = track
            if track == "main":
                lane = process
            elif track == "weights":
                lane = f"{process} weights"
            span = [kind, round(at_s, 6), round(duration_s, 6), number]
            if kind == "write weights" and "bytes" in arguments:
                span.append(arguments["bytes"])
            chart.lanes.setdefault(lane, []).append(span)
            self._count(kind, track, number, arguments)
            if kind == "pause":
                chart.pauses.append(
                    {**arguments, "version": number, "at": at_s, "pause_s": duration_s}
                )

    def _count(self, kind: str, track: str, number: int | None, arguments: dict[str, Any]) -> None:
        """Counts each engine's tokens. Engines are compared only while none is lost."""
        tokens = dict(enumerate(arguments.get("engine_tokens", ())))
        self._engine_tokens.update(tokens)
        if kind == "away":
            self._lost.discard(track)
        elif kind == "generate" and number is not None:
            if number <= self._batch:  # from an earlier start
                self._lost.clear()
            self._batch = number
            self._peers.update(tokens)
            self._group_of = dict(enumerate(arguments.get("engine_groups", ())))
        if self._lost or kind == "away":
            self._peers.clear()


def _settings(run_dir: Path) -> dict[str, Any]:
    """The settings that the page mentions; empty without a readable config.yaml."""
    try:
        config = OmegaConf.load(run_dir / "config.yaml")
        keys = (
            "model.path",
            "algorithm.name",
            "async.capacity",
            "async.max_staleness",
            "rollout.prompts_per_step",
            "rollout.n",
        )
        keys += (
            "rollout.max_tokens",
            "generator.engines",
            "trainer.optimizer.lr",
            "max_steps",
            "seed",
            "observe.rollouts_per_step",
        )
        settings = {key: OmegaConf.select(config, key) for key in keys}
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException, AttributeError):
        return {}
    return {
        key: value if isinstance(value, str) else _number(value) for key, value in settings.items()
    }


def _number(value: Any) -> float | int | str | None:
    if not isinstance(value, bool | int | float):
        return None
    if isinstance(value, bool):
        return int(value)
    if abs(value) <= sys.float_info.max:
        return value
    return NOT_FINITE


def _by_rank(name: str) -> tuple[str, int, str]:
    """The order of tracks: trainers, generators, engines, engines that only evaluate, the rest;
    ranks by number.
    """
    role, _, suffix = name.partition(".")
    number = NUMBER.match(suffix)
    order = {
        "launcher": "0",
        "trainer": "1",
        "generator": "2",
        "engine": "3",
        "eval_engine": "4",
    }.get(role, f"5{role}")
    return order, int(number[0]) if number else 0, suffix
