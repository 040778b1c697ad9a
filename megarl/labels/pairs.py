"""Preference pairs: the scored responses to each prompt, their file, and the pairs made of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from megarl.base.files import write_whole
from megarl.base.rollout_types import Ordinal
from megarl.config.errors import ConfigError
from megarl.config.schema import BEST_WORST, LabelConfig

PAIRS_FILE = "pairs.jsonl"  # in label.output
HELD_OUT_FILE = "held_out.jsonl"  # with label.held_out
SCORED_FILE = "scored.jsonl"
SAMPLE = "sample"  # origin of a response: the policy,
REFERENCE = "reference"  # the row's reference answer, or else the name of a column


class Response(msgspec.Struct, frozen=True):
    text: str
    origin: str
    score: float | None  # None: scoring failed


class ScoredPrompt(msgspec.Struct, frozen=True):
    """A line of scored.jsonl."""

    ordinal: Ordinal
    prompt: str | list[dict[str, Any]]  # a text, or a conversation
    responses: list[Response]  # different texts that can stand in a pair
    # of a pairwise judge: (first, second, how much of a win both orders are for the first)
    comparisons: list[tuple[int, int, float]] | None = None
    tools: Any = None  # that the row offers
    unusable: int = 0  # responses that cannot stand in a pair: blank, or too long
    truncated: int = 0  # sampled responses that were cut at the maximum length

    @property
    def failed(self) -> int:
        return sum(response.score is None for response in self.responses)


def preferences(scored: ScoredPrompt, settings: LabelConfig) -> Iterator[tuple[int, int, float]]:
    """(chosen, rejected, margin) of each pair of a prompt's responses.

    Of several best or worst responses the first counts. A failed score makes no pair.
    """
    scores: dict[int, float] = {}
    for index, response in enumerate(scored.responses):
        if response.score is not None:
            scores[index] = response.score
    differences: list[tuple[int, int, float]] = []
    if settings.pairs == BEST_WORST and scores:
        best = max(scores, key=scores.__getitem__)
        worst = min(scores, key=scores.__getitem__)
        differences.append((best, worst, scores[best] - scores[worst]))
    elif scored.comparisons is not None:
        for first, second, win in scored.comparisons:
            differences.append((first, second, 2 * win - 1))
    else:
        for first, second in combinations(scores, 2):
            differences.append((first, second, scores[first] - scores[second]))
    for first, second, difference in differences:
        if not difference or abs(difference) < settings.min_margin:
            continue
        if difference > 0:
            yield first, second, difference
        else:
            yield second, first, -difference


def pair_rows(scored: ScoredPrompt, settings: LabelConfig) -> Iterator[dict[str, Any]]:
    """The rows of pairs.jsonl that a prompt gives.

    A conversation's responses are messages, as in TRL's format.
    """
    for chosen, rejected, margin in preferences(scored, settings):
        row: dict[str, Any] = {"prompt": scored.prompt}
        if scored.tools is not None:
            row["tools"] = scored.tools
        for name, index in (("chosen", chosen), ("rejected", rejected)):
            response = scored.responses[index]
            row[name] = response.text
            if not isinstance(scored.prompt, str):
                row[name] = [{"role": "assistant", "content": response.text}]
            row[f"score_{name}"] = response.score
            row[f"{name}_from"] = response.origin
        yield {**row, "margin": margin, "ordinal": scored.ordinal}


class ScoredFile:
    """scored.jsonl, to which a whole line is appended for each prompt. Its lines are the state of
    `megarl label`: the same command goes on with the other prompts.
    """

    def __init__(self, folder: Path):
        """Cuts off a last line that was not written completely."""
        self._path = folder / SCORED_FILE
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "ab", buffering=0)
        whole_bytes = self._path.read_bytes().rfind(b"\n") + 1
        os.truncate(self._path, whole_bytes)

    def append(self, scored: ScoredPrompt) -> None:
        self._file.write(msgspec.json.encode(scored) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_scored(folder: Path, prompts: int | None = None) -> list[ScoredPrompt]:
    """The prompts that are scored so far, in order; only those below `prompts`.

    Raises ConfigError for a damaged line.
    """
    path = folder / SCORED_FILE
    if not path.exists():
        return []
    by_ordinal: dict[Ordinal, ScoredPrompt] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # the command was interrupted
            try:
                scored = msgspec.json.decode(line, type=ScoredPrompt)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{path}, line {number}: is damaged ({error}); remove the line, and its prompt "
                    "is labelled again"
                ) from error
            if prompts is None or scored.ordinal < prompts:
                by_ordinal[scored.ordinal] = scored
    return [by_ordinal[ordinal] for ordinal in sorted(by_ordinal)]


def write_pairs(folder: Path, scored: Iterable[ScoredPrompt], settings: LabelConfig) -> int:
    """Writes pairs.jsonl and held_out.jsonl anew. Returns the number of pairs in both.

    A prompt that comes again after label.held_out has its pairs in held_out.jsonl too.
    """
    lines: dict[str, list[bytes]] = {PAIRS_FILE: []}
    if settings.held_out:
        lines[HELD_OUT_FILE] = []
    else:
        (folder / HELD_OUT_FILE).unlink(missing_ok=True)  # its pairs are in pairs.jsonl now
    held_out = set()
    for prompt in sorted(scored, key=lambda prompt: prompt.ordinal):
        text = msgspec.json.encode((prompt.prompt, prompt.tools))
        if prompt.ordinal < settings.held_out:
            held_out.add(text)
        name = HELD_OUT_FILE if text in held_out else PAIRS_FILE
        lines[name] += [msgspec.json.encode(row) + b"\n" for row in pair_rows(prompt, settings)]
    for name, of_file in lines.items():
        write_whole(folder / name, b"".join(of_file).decode())
    return sum(map(len, lines.values()))


def summary(scored: Sequence[ScoredPrompt], pairs: int) -> str:
    """What was labelled, for people."""
    responses = [response for prompt in scored for response in prompt.responses]
    lines = [f"{pairs:,} pairs of {len(responses):,} responses to {len(scored):,} prompts"]
    for origin in dict.fromkeys(response.origin for response in responses):
        scores = []
        for response in responses:
            if response.origin == origin and response.score is not None:
                scores.append(response.score)
        if scores:
            lines.append(f"  mean score of {len(scores):,} from {origin}: {fmean(scores):.3f}")
    for text, count in (
        ("failed scores, which are in no pair", sum(prompt.failed for prompt in scored)),
        ("blank or too long responses, left out", sum(prompt.unusable for prompt in scored)),
        ("samples cut at the maximum length", sum(prompt.truncated for prompt in scored)),
    ):
        if count:
            lines.append(f"  {count:,} {text}")
    return "\n".join(lines)
