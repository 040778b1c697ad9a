"""Tries what scores responses on a few rows, before anything starts. A dry run shows the scores; a run is refused for what would end it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config.errors import ConfigError, RunError
from megarl.config.rollout import OF_HUBS
from megarl.config.schema import RunConfig
from megarl.data.check import Checked
from megarl.data.rows import Row
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.rewards.parts import Part, parts_in_evaluation, parts_of
from megarl.rewards.pool import RewardMistake
from megarl.rewards.score import Score, ScoreRequest
from megarl.rollouts.agents.program import PROGRAM

ABSURD = "}{ \\boxed{\u2603 </think> -1e999 \ufffd\n" * 40
TEXTS = {"the reference answer": None, "an empty text": "", "an absurd text": ABSURD}
_OF_ANSWERS = ("math", "last_number", "choice")  # rules of ours that find the reference answer right


@dataclass(frozen=True)
class Tried:
    """The scores that one part of the reward has given to a dataset's first rows."""

    part: Part
    key: str  # of the dataset
    scores: Mapping[str, Sequence[Score]]  # by name in TEXTS, of each row

    def __str__(self) -> str:
        told = "; ".join(f"{name} {', '.join(map(_shown, scores))}" for name, scores in self.scores.items())
        rows = len(next(iter(self.scores.values())))
        same = len({score.reward for scores in self.scores.values() for score in scores}) == 1
        of_rows = f"{self.part.setting}, {rows} row{'s' * (rows > 1)} of {self.key}"
        return "; ".join([f"{of_rows}: {told}", *self.remarks, *(["all of these score the same"] * same)])

    @property
    def remarks(self) -> Iterator[str]:
        """What is doubtful, though it ends no run."""
        named = reversed([(name, score) for name, scores in self.scores.items() for score in scores])
        failures = {failure.reason: name for name, score in named for failure in score.failures}
        yield from (f"scoring {name} failed: {reason}" for reason, name in failures.items())
        means = {name: sum(score.reward for score in scores) / len(scores) for name, scores in self.scores.items()}
        first, *others = means
        if not failures and any(means[first] < means[name] for name in others):
            yield "the reference answer scores less than an empty or absurd text"


def _shown(score: Score) -> str:
    return "failed" if score.failures else f"{score.reward:g}"


def try_rewards(config: RunConfig, datasets: Sequence[Checked], thorough: bool) -> list[Tried]:
    """Scores three texts for the first row of each dataset by the user's own functions; if `thorough` for several rows, and by rules of
    ours too. Raises ConfigError for all mistakes that would end the run, those of each function once."""
    if config.rollout.name in OF_HUBS or (config.rollout.name == PROGRAM and config.rollout.args.get("reward") == PROGRAM):
        return []  # there the environment or the program says the reward
    wanted: dict[Part, list[tuple[Checked, list[Row]]]] = {}
    for checked in datasets:
        suite = checked.key.removeprefix("eval.suites.")
        rows = [row for row in checked.first if isinstance(row, Row)][: None if thorough else 1]
        for part in parts_of(config.reward) if checked.key.startswith("data.train") else parts_in_evaluation(config, suite):
            if rows and (":" in part.name or (thorough and part.name in _OF_ANSWERS)):
                wanted.setdefault(part, []).append((checked, rows))
    if not wanted:
        return []
    tokenizer = load_tokenizer(config.model) if Path(config.model.tokenizer or config.model.path).is_dir() else None
    with tempfile.TemporaryDirectory(prefix="megarl-trial-") as logs:
        return asyncio.run(_try_all(replace(config, reward=replace(config.reward, workers=1)), wanted, tokenizer, Path(logs)))


async def _try_all(
    config: RunConfig, wanted: Mapping[Part, Sequence[tuple[Checked, Sequence[Row]]]], tokenizer: Tokenizer | None, logs: Path
) -> list[Tried]:
    from megarl.rollouts.scoring import open_part  # not at the top: it imports aiohttp

    found: list[Tried] = []
    problems: list[str] = []
    async with AsyncExitStack() as resources:
        for part, sets in wanted.items():
            score, told = await open_part(config, part, {}, resources, logs), ""
            try:
                for checked, rows in sets:
                    given: dict[str, list[Score]] = {}
                    for name, text in TEXTS.items():
                        requests = [_request(row, checked.key, text, tokenizer) for row in rows]
                        told = f"it was given {name} to {rows[0].where or checked.source}"
                        given[name] = [await score(request) for request in requests]
                    found.append(Tried(part, checked.key, given))
            except RewardMistake as mistake:
                problems.append(f"{'; '.join(mistake.told.split(chr(10)))}; {told}")
            except RunError as error:  # no worker could be started
                problems.append(f"{part.setting}: {error}")
    if problems:
        raise ConfigError(problems)
    return found


def _request(row: Row, key: str, text: str | None, tokenizer: Tokenizer | None) -> ScoreRequest:
    response = row.answer if text is None else text
    return ScoreRequest(
        response=response,
        answer=row.answer,
        prompt=row.prompt,
        row=row.record,
        prompt_token_ids=tokenizer.encode_prompt(row.prompt) if tokenizer else [],
        token_ids=tokenizer.encode_text(response) if tokenizer else [],
        version=0,
        source=key.rpartition(".")[2] if ".sources." in key or key.startswith("eval.suites.") else "",
    )
