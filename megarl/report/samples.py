"""The samples of a run: an index with a row for each, and the texts in compressed chunks that the page opens when they are looked at."""

from __future__ import annotations

import base64
import gzip
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from megarl.observe.rollouts import SAMPLES_FILE

SETTLED_S = 10.0  # after which no rank still writes its part of a step: all do so right after it
CHUNK_BYTES = 400_000  # of JSON, before it is compressed
EXCERPT_CHARS = 60  # of a response, in the table
COMPRESSED = 0.3  # about this much of the files' bytes becomes the page's
COLUMNS = ("step", "ordinal", "sample", "reward", "tokens", "age", "spread", "finish", "failed", "dropped", "begins", "chunk", "place")


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


_group, _tokens, _encode = msgspec.json.Decoder(_Group).decode, msgspec.json.Decoder(_Tokens).decode, msgspec.json.Encoder().encode


class Samples:
    def __init__(self, run_dir: Path, tail: Callable[[Path], Lines], text_bytes: int):
        self._folder, self._tail = run_dir / "rollouts", tail
        self._groups = tail(self._folder / SAMPLES_FILE)
        self._ranks: dict[str, _OfRank] = {}
        self._held: list[_Group] = []
        self._chunks = 0
        files = [self._folder / SAMPLES_FILE, *self._folder.glob("tokens.*.jsonl")]
        size = COMPRESSED * sum(path.stat().st_size for path in files if path.exists())
        self.every = max(1, math.ceil(size / text_bytes))  # one in so many steps has texts

    @property
    def tails(self) -> list[Lines]:
        return [self._groups, *(rank.tail for rank in self._ranks.values())]

    def read(self, follow: bool) -> dict[str, Any]:
        """`index`: the new samples' columns; `chunks`: their texts, each gzipped JSON in base64; `every`."""
        for path in sorted(self._folder.glob("tokens.*.jsonl")):
            self._ranks.setdefault(path.name, _OfRank(self._tail(path)))
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
                full, self._chunks = [], self._chunks + 1
        if full:
            chunks.append(_chunk(full))
            self._chunks += 1
        return {"index": columns, "chunks": chunks, "every": self.every}

    def _new(self, follow: bool) -> Iterator[_Group]:
        groups, self._held = self._held, []
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
                yield from self._with_numbers([each for each in groups if each.step < newest])
                groups = [each for each in groups if each.step >= newest]
        if follow and not self._settled():
            self._held = groups
        else:
            yield from self._with_numbers(groups)

    def _settled(self) -> bool:
        """Whether the newest step's lines are so old that all ranks have written theirs: the run waits, or has ended."""
        files = [self._groups.path, *(rank.tail.path for rank in self._ranks.values())]
        return all(time.time() - path.stat().st_mtime > SETTLED_S for path in files if path.exists())

    def _with_numbers(self, groups: list[_Group]) -> Iterator[_Group]:
        """The groups of one step, with what ranks wrote about their tokens."""
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
            age = group.step - min(version for version, _ in sample.versions) if sample.versions else None
            chunk = self._chunks if place >= 0 else -1
            row = (group.step, group.ordinal, number, sample.reward, sample.tokens, age, spread, sample.finish_reason)
            row = (*row, int(bool(sample.failed)), int(group.dropped), " ".join(sample.text[:EXCERPT_CHARS].split()), chunk, place)
            for name, value in zip(COLUMNS, row, strict=True):
                columns[name].append(value)


class _OfRank:
    """The lines of one trainer rank, which are in the order of their steps."""

    def __init__(self, tail: Lines):
        self.tail = tail
        self._pieces: dict[int, str] = {}
        self._ahead: deque[_Tokens] = deque()
        self._lines: Iterator[bytes] = iter(())

    def of_step(self, step: int) -> dict[tuple[int, int], dict[str, Any]]:
        found = {}
        while (line := self._next()) is not None:
            if line.step > step:
                self._ahead.appendleft(line)
                break
            if line.step == step:
                pieces = [self._pieces.get(number, f"<{number}>") for number in line.ids]
                numbers = {"positions": line.positions, "diff": line.diff, "mu": line.mu, "advantage": line.advantage}
                found[line.ordinal, line.sample] = {"pieces": pieces, **numbers}
        return found

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
                rows = [tokens.diff, tokens.mu, *([tokens.advantage] if isinstance(tokens.advantage, list) else [])]
                if {len(tokens.ids)} != {sum(count for _, count in tokens.positions), *map(len, rows)}:
                    self.tail.damaged += 1
                    continue
                self._pieces |= tokens.pieces
                return tokens
        return None


def _chunk(groups: list[bytes]) -> str:
    return base64.b64encode(gzip.compress(b"[" + b",".join(groups) + b"]", 6, mtime=0)).decode()
