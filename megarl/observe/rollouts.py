"""Sampled rollouts as text files that a person can read, and that cannot play tricks on the terminal that shows them."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from megarl.files import write_whole
from megarl.observe.metrics import cut_from, lost_lines, read_metrics
from megarl.types import Group, Ordinal, Sample

ORDINALS_FILE = "ordinals.jsonl"
# Controls, format characters (bidirectional overrides among them), surrogates, private use, line and paragraph separators.
UNSAFE_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def escape(text: str) -> str:
    r"""`text` with every character that does not simply print written as \x1b, \u202e, …; newlines stay, a backslash is doubled."""
    return "".join(_escape_character(character) for character in text)


def _escape_character(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character == "\n" or unicodedata.category(character) not in UNSAFE_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode()


def _quoted(text: str, bar: str = "|") -> str:
    """Every line behind a bar, so that no model output can pass for the file's own lines."""
    return "\n".join(f"  {bar} {line}" for line in escape(text).split("\n"))


def _quoted_turns(sample: Sample) -> str:
    """The policy's text behind |, the environment's behind >, each on lines of its own."""
    parts, end = [], 0
    for start, stop in sample.environment_spans:
        parts += [_quoted(sample.text[end:start]), _quoted(sample.text[start:stop], ">")]
        end = stop
    return "\n".join([*parts, _quoted(sample.text[end:])])


def format_sample(number: int, sample: Sample) -> str:
    """Reward, and why it is none of its own; the oldest and newest weight version among its tokens; and the text."""
    versions = f"versions {sample.min_version} to {sample.max_version}" if sample.versions else "no version"
    failed = f" (failed: {sample.failure.kind})" if sample.failure else ""
    head = f"response {number}: reward {sample.reward:g}{failed}, {versions}, {len(sample.token_ids)} tokens"
    head += f", finish reason {sample.finish_reason}"
    if sample.policy_mask:
        head += f", {sample.turns} turns, {len(sample.token_ids) - sample.policy_tokens} tokens by the environment (behind >)"
    if sample.reward_parts:
        head += "".join(f", {escape(name)} {value:g}" for name, value in sample.reward_parts.items())
    reason = _quoted(sample.failure.reason, "!") + "\n" if sample.failure else ""
    return f"{head}\n{reason}{_quoted_turns(sample)}\n"


def format_group(group: Group) -> str:
    prompt = group.prompt
    head = f"prompt {prompt.ordinal}\n{_quoted(prompt.text)}\n\nreference answer\n{_quoted(prompt.answer)}\n"
    return "\n".join([head, *(format_sample(number, sample) for number, sample in enumerate(group.samples))])


def write_rollouts(run_dir: Path | str, step: int, groups: Sequence[Group], limit: int) -> Path | None:
    """Writes the first `limit` groups of a step to `run_dir`/rollouts/step_<step>.txt; nothing, and None, where limit is 0."""
    if limit <= 0:
        return None
    folder = Path(run_dir) / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.txt"
    rule = "\n" + "=" * 80 + "\n\n"
    path.write_text(f"step {step}\n{rule}" + rule.join(format_group(group) for group in groups[:limit]), encoding="utf-8")
    return path


class OrdinalsWriter:
    """`run_dir`/rollouts/ordinals.jsonl: which prompts each step was trained on, one line a step. Exactly once is checked by it.

    A resumed run passes its first step as `resume_step`: lines of that step and later ones are cut off, as in the metrics.
    """

    def __init__(self, run_dir: Path | str, resume_step: int = 0):
        path = Path(run_dir) / "rollouts" / ORDINALS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_from(path, resume_step)
        self._file = open(path, "ab", buffering=0)

    def write(self, step: int, ordinals: Sequence[int]) -> None:
        self._file.write(json.dumps({"step": step, "ordinals": ordinals}).encode() + b"\n")

    def sync(self) -> None:
        """The lines outlive the host's power: before a checkpoint that counts their steps as done."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def recover_ordinals(run_dir: Path | str, step: int, consumed: Iterable[Ordinal]) -> str:
    """Writes the line that ordinals.jsonl lacks of the steps before `step`, from `consumed`, all prompts that those were trained on.

    Returns a sentence about it, empty where nothing is missing. Where several lines are missing it can only say so: which prompts belong to
    which of them is not known.
    """
    path = Path(run_dir) / "rollouts" / ORDINALS_FILE
    cut_from(path, step)
    rows = {row["step"]: row for row in read_metrics(path) if isinstance(row.get("ordinals"), list)}
    missing = [number for number in range(step) if number not in rows]
    if not missing:
        return ""
    lost = lost_lines(path, missing)
    if len(missing) > 1:
        return f"{lost}; which prompts these steps were trained on cannot be said any more (the checkpoint knows that they were)"
    known = {ordinal for row in rows.values() for ordinal in row["ordinals"]}
    rows[missing[0]] = {"step": missing[0], "ordinals": sorted(set(consumed) - known)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(rows[number]) + "\n" for number in sorted(rows)))
    return f"{lost}; it is written again, from the checkpoint's ledger"
