"""Writes sampled rollouts as readable text files, in which no text can control the terminal that
shows it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from megarl.base.files import write_whole
from megarl.base.rollout_types import (
    WARNING,
    Failure,
    GroupSummary,
    GroupTexts,
    Ordinal,
    SampleSummary,
    any_unanswered,
)
from megarl.observe.metrics import Row, cut_from, lost_lines, read_metrics
from megarl.rewards.credit import has_own_turns
from megarl.rewards.score import failure_label, of_episode

ORDINALS_FILE = "ordinals.jsonl"
SAMPLES_FILE = "samples.jsonl"
FAILURES_FILE = "failures.jsonl"
FAILURES_S = 5.0  # least time between two written failures of one kind
_STEP = re.compile(rb'\{"step": ?(\d+)')
# Controls, format characters (bidirectional overrides among them), surrogates, private use, line
# and paragraph separators.
UNSAFE_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def escape(text: str) -> str:
    r"""`text` with unprintable characters as \x1b, \u202e, …; newlines stay, backslashes are
    doubled.
    """
    return "".join(map(_escape_character, text))


def _escape_character(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character == "\n" or unicodedata.category(character) not in UNSAFE_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode()


def _quoted(text: str, bar: str = "|") -> str:
    """Puts a bar before every line, so that model output cannot look like lines of the file
    itself.
    """
    return "\n".join(f"  {bar} {line}" for line in escape(text).split("\n"))


def _quoted_turns(text: str, environment_spans: Sequence[tuple[int, int]]) -> str:
    """The text with | before the policy's lines and > before the environment's."""
    parts = []
    end = 0
    for start, stop in environment_spans:
        parts += [_quoted(text[end:start]), _quoted(text[start:stop], ">")]
        end = stop
    return "\n".join([*parts, _quoted(text[end:])])


def format_sample(
    number: int, sample: SampleSummary, text: str, environment_spans: Sequence[tuple[int, int]] = ()
) -> str:
    """A sample as text: reward, why scoring failed if it did, the oldest and newest weight version
    of its tokens, and its text.
    """
    head = f"response {number}: reward {sample.reward:g}"
    if sample.failures:
        head += f" (failed: {', '.join(map(failure_label, sample.failures))})"
    if sample.policy_versions:
        head += f", versions {sample.min_version} to {sample.max_version}"
    else:
        head += ", no version"
    head += f", {sample.tokens} tokens, finish reason {sample.finish_reason}"
    if sample.environment_tokens:
        head += (
            f", {sample.turns} turns, {sample.environment_tokens} tokens by the environment "
            "(behind >)"
        )
    if has_own_turns(sample):
        head += f", rewards of turns {' '.join(f'{turn.reward:g}' for turn in sample.turn_rewards)}"
    for name, value in (sample.reward_parts or {}).items():
        head += f", {escape(name)} {value:g}"
    reason = "".join(_quoted(failure.reason, "!") + "\n" for failure in sample.failures)
    return f"{head}\n{reason}{_quoted_turns(text, environment_spans)}\n"


def format_group(group: GroupSummary, texts: GroupTexts, dropped: bool = False) -> str:
    title = f"prompt {group.ordinal}"
    if dropped and any_unanswered(group.samples):
        title += ", dropped: an episode has sampled nothing"
    elif dropped:
        title += ", dropped: its samples all have the same reward in training"
    parts = [
        f"{title}\n{_quoted(texts.prompt)}\n\nreference answer\n{_quoted(texts.answer)}\n",
    ]
    for number, sample in enumerate(group.samples):
        text, environment_spans = texts.samples[number]
        parts.append(format_sample(number, sample, text, environment_spans))
    return "\n".join(parts)


def write_rollouts(
    run_dir: Path | str,
    step: int,
    groups: Iterable[tuple[GroupSummary, GroupTexts]],
    dropped: Iterable[tuple[GroupSummary, GroupTexts]] = (),
    dropped_prompts: int = 0,
) -> Path | None:
    """Writes groups of a step to `run_dir`/rollouts/step_<step>.txt and returns that path; None if
    there are none.

    `dropped`: some of the `dropped_prompts` groups that were dropped for the step.
    """
    formatted = [format_group(*group) for group in groups]
    formatted += [format_group(*group, dropped=True) for group in dropped]
    if not formatted:
        return None
    folder = Path(run_dir) / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.txt"
    rule = "\n" + "=" * 80 + "\n\n"
    head = f"step {step}" + (f", {dropped_prompts} prompts dropped" if dropped_prompts else "")
    path.write_text(f"{head}\n{rule}" + rule.join(formatted), encoding="utf-8")
    return path


class _Lines:
    """A file in `run_dir`/rollouts to which whole lines are appended."""

    def __init__(self, run_dir: Path | str, name: str):
        folder = Path(run_dir) / "rollouts"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / name, "ab", buffering=0)

    def append(self, *lines: Mapping[str, Any]) -> None:
        if lines:
            self._file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    def sync(self) -> None:
        """Makes the lines survive a power failure; call it before a checkpoint that counts their
        steps as done.
        """
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class SamplesWriter(_Lines):
    """`run_dir`/rollouts/samples.jsonl: the groups that write_rollouts shows to people, for
    programs; docs/run_dir.md has the keys.

    A resumed run passes its first step as `resume_step`: lines of that step and later ones are cut
    off, here and in tokens.<rank>.jsonl.
    """

    def __init__(self, run_dir: Path | str, resume_step: int = 0):
        for path in (Path(run_dir) / "rollouts").glob("*.jsonl"):
            if path.name == SAMPLES_FILE or path.name.startswith("tokens."):
                _cut(path, resume_step)
        super().__init__(run_dir, SAMPLES_FILE)

    def write(
        self, step: int, groups: Iterable[tuple[GroupSummary, GroupTexts]], dropped: bool = False
    ) -> None:
        self.append(*({"step": step, **_group(*group), "dropped": dropped} for group in groups))


def _group(group: GroupSummary, texts: GroupTexts) -> dict[str, Any]:
    samples = []
    for sample, (text, spans) in zip(group.samples, texts.samples, strict=True):
        failures = []
        for failure in sample.failures:
            row = {"kind": failure.kind, "part": failure.part, "reason": failure.reason}
            failures.append(row)
        samples.append(
            {
                "reward": sample.reward,
                "parts": sample.reward_parts,
                "turn_rewards": sample.turn_rewards if has_own_turns(sample) else [],
                "failed": failures,
                "finish_reason": sample.finish_reason,
                "tokens": sample.tokens,
                "turns": sample.turns,
                "versions": sample.policy_versions,
                "text": text,
                "environment": spans,
            }
        )
    return {
        "ordinal": group.ordinal,
        "prompt": texts.prompt,
        "answer": texts.answer,
        "prompt_tokens": group.prompt_tokens,
        "samples": samples,
    }


def _cut(path: Path, step: int) -> None:
    """Like `cut_from`, but does not read the whole file into memory."""
    keep_bytes = 0
    with open(path, "rb") as file:
        for line in file:
            match = _STEP.match(line)
            if not line.endswith(b"\n") or (match and int(match[1]) >= step):
                break
            keep_bytes += len(line)
    os.truncate(path, keep_bytes)


class FailuresWriter(_Lines):
    """`run_dir`/rollouts/failures.jsonl: failures of scores and episodes as they happen, long
    before their step ends; and warnings.

    The first failure of each kind is written at once. Later ones are written at most every
    FAILURES_S, and the last one always: the file is for news and is not a complete record.
    """

    def __init__(self, run_dir: Path | str):
        super().__init__(run_dir, FAILURES_FILE)
        self._written_s: dict[tuple[str, str], float] = {}
        # the newest failure of each kind, if it is not yet written
        self._unwritten: dict[tuple[str, str], dict[str, Any]] = {}
        self._lock = threading.Lock()

    def tell(self, failure: Failure, ordinal: Ordinal) -> None:
        """Reports a failure. `ordinal`: of the prompt; -1 for a warning."""
        name = failure.part, failure.kind
        with self._lock:
            waits_s = self._written_s.get(name, -math.inf) + FAILURES_S - time.monotonic()
            if waits_s > 0 and name not in self._unwritten:
                timer = threading.Timer(waits_s, self._release, [name])
                timer.daemon = True
                timer.start()
            self._unwritten[name] = {
                "time_s": time.time(),
                "ordinal": ordinal,
                **msgspec.structs.asdict(failure),
            }
        if waits_s <= 0:
            self._release(name)

    def close(self) -> None:
        for name in list(self._unwritten):
            self._release(name)
        super().close()

    def _release(self, name: tuple[str, str]) -> None:
        with self._lock:
            line = self._unwritten.pop(name, None)
            if line is not None:
                self._written_s[name] = time.monotonic()
                self.append(line)


class FailureLine(Failure, frozen=True, kw_only=True):
    """A line of failures.jsonl."""

    time_s: float
    ordinal: Ordinal


class FailuresTail:
    """Follows failures.jsonl.

    `last` has the newest failure of an episode (True) and of a score (False).
    """

    def __init__(self, run_dir: Path | str, from_end: bool = False):
        """`from_end`: ignore the lines that are already there."""
        self._path = Path(run_dir) / "rollouts" / FAILURES_FILE
        self._offset = self._path.stat().st_size if from_end and self._path.exists() else 0
        self.last: dict[bool, FailureLine] = {}

    def poll(self) -> list[FailureLine]:
        """The new lines, without damaged ones."""
        if not self._path.exists() or self._path.stat().st_size <= self._offset:
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            complete_lines = file.read().rpartition(b"\n")[0]
        self._offset += len(complete_lines) + bool(complete_lines)
        failures = []
        for line in complete_lines.split(b"\n"):
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                failures.append(msgspec.json.decode(line, type=FailureLine))
        for failure in failures:
            if failure.kind != WARNING:
                self.last[of_episode(failure)] = failure
        return failures

    def reason(self, episodes: bool) -> str:
        """The reason of the last failure, to be put after the number of failures; empty if nothing
        has failed.
        """
        failure = self.last.get(episodes)
        if failure:
            return f"; the last: {one_line(failure.reason)}"
        return ""


def one_line(text: str) -> str:
    return escape(" ".join(text.split()))


class TokenNumbers(Protocol):
    """The numbers of a step for the policy's tokens in one sample; [n] each."""

    @property
    def ids(self) -> np.ndarray: ...
    @property
    def positions(self) -> np.ndarray: ...  # positions in prompt and response together
    @property
    def logprobs(self) -> np.ndarray: ...
    @property
    def mu_logprobs(self) -> np.ndarray: ...
    @property
    def advantages(self) -> np.ndarray: ...


class TokensWriter(_Lines):
    """`run_dir`/rollouts/tokens.<rank>.jsonl: per-token numbers of the samples in samples.jsonl
    that a trainer rank has trained on.

    `piece` gives the text of a token. The first line that has a token also has its text.
    """

    def __init__(self, run_dir: Path | str, rank: int, piece: Callable[[int], str]):
        super().__init__(run_dir, f"tokens.{rank}.jsonl")
        self._piece = piece
        self._written_ids = set[int]()

    def write(self, step: int, ordinal: Ordinal, sample: int, row: TokenNumbers) -> None:
        ids: list[int] = row.ids.tolist()
        new = sorted(set(ids) - self._written_ids)
        self._written_ids.update(new)
        numbers = {
            "diff": row.logprobs - row.mu_logprobs,
            "mu": row.mu_logprobs,
            "advantage": row.advantages,
        }
        line = {
            "step": step,
            "ordinal": ordinal,
            "sample": sample,
            "ids": ids,
            "positions": _runs(row.positions),
        }
        line |= {name: _rounded(values) for name, values in numbers.items()}
        if len(set(line["advantage"])) == 1:
            line["advantage"] = line["advantage"][0]
        if new:
            line["pieces"] = {str(number): self._piece(number) for number in new}
        self.append(line)


def _runs(positions: np.ndarray) -> list[list[int]]:
    """Runs of consecutive numbers as [first, length]. `positions`: ascending."""
    begins = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    return np.column_stack([positions[begins], np.diff(begins, append=len(positions))]).tolist()


def _rounded(values: np.ndarray) -> list[float]:
    """Rounds to 4 digits, which is enough for a colour."""
    exact = values.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (3 - np.floor(np.log10(np.abs(exact))))
        rounded = np.where(
            (exact == 0) | ~np.isfinite(exact), exact, np.round(exact * scale) / scale
        )
    return rounded.tolist()


class OrdinalsWriter(_Lines):
    """`run_dir`/rollouts/ordinals.jsonl: for each step, the prompts it was trained on and those
    dropped for it. They allow to check that each prompt is used exactly once. A resumed run passes
    its first step as `resume_step`, as above.
    """

    def __init__(self, run_dir: Path | str, resume_step: int = 0):
        cut_from(Path(run_dir) / "rollouts" / ORDINALS_FILE, resume_step)
        super().__init__(run_dir, ORDINALS_FILE)

    def write(self, step: int, ordinals: Sequence[int], dropped: Sequence[int] = ()) -> None:
        self.append(_line(step, ordinals, dropped))


def _line(step: int, ordinals: Sequence[Ordinal], dropped: Sequence[Ordinal]) -> Row:
    line: Row = {"step": step, "ordinals": ordinals}
    if dropped:
        line["dropped"] = dropped
    return line


def recover_ordinals(
    run_dir: Path | str, step: int, trained: Set[Ordinal], dropped: Set[Ordinal] = frozenset()
) -> str:
    """Restores a line that ordinals.jsonl lacks.

    `trained`, `dropped`: all prompts that were trained on in the steps before `step`, and dropped
    for them.

    Returns a sentence about it; empty if no line is missing. If several lines are missing they
    cannot be restored, since it is unknown which prompts belong to which step. The sentence then
    says so.
    """
    path = Path(run_dir) / "rollouts" / ORDINALS_FILE
    cut_from(path, step)
    rows = {row["step"]: row for row in read_metrics(path) if isinstance(row.get("ordinals"), list)}
    missing = [number for number in range(step) if number not in rows]
    if not missing:
        return ""
    lost = lost_lines(path, missing)
    if len(missing) > 1:
        return (
            f"{lost}; it is no longer known which of these steps trained on which prompts (the "
            "checkpoint knows the prompts)"
        )
    recorded: set[Ordinal] = set()
    for row in rows.values():
        recorded.update(row["ordinals"], row.get("dropped", ()))
    rows[missing[0]] = _line(missing[0], sorted(trained - recorded), sorted(dropped - recorded))
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode(rows[number]).decode() + "\n" for number in sorted(rows)]
    write_whole(path, "".join(lines))
    return f"{lost}; it has been restored from the checkpoint's ledger"
