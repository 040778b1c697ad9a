"""Measures of held-out responses beside their scores: the win rate against the references
(eval.win_rate), and an initial model's perplexity (roles.initial).

They are those of Noukhovitch et al. (arXiv:2410.18252, section 3.1): how often a response is better
than the reference, and how far the policy has moved from the model that it began with.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import compress, repeat
from pathlib import Path
from statistics import fmean

import numpy as np

from megarl.base.rollout_types import Failure, Group, Prompt, Sample
from megarl.config.errors import RunError
from megarl.config.schema import RunConfig
from megarl.data.prompts import HeldOutSet
from megarl.data.tokenizer import Tokenizer
from megarl.evaluation.scores import interval, ratio_interval
from megarl.generator.fleet import Fleet
from megarl.plan.resolve import RunPlan
from megarl.rewards.score import Score, parts_in_win_rate, request_of
from megarl.roles.judge import NoVerdict
from megarl.roles.opening import Scorer, open_initial
from megarl.rollouts.rollout import Scoring, open_scoring
from megarl.teachers.engines import ServedTeacher


@dataclass
class Measures:
    """What is measured besides scores; nothing if both are None."""

    config: RunConfig = field(default_factory=RunConfig)
    win_rate: WinRate | None = None
    initial: ServedTeacher | None = None

    async def of(self, held_out: HeldOutSet, groups: Sequence[Group]) -> dict[str, float]:
        """The measures of one set, each with its confidence interval and its number of failures.

        Raises RunError if too many have failed.
        """
        result: dict[str, float] = {}
        if self.win_rate is not None and held_out.references:
            wins = await self.win_rate.of(held_out, groups)
            result |= win_rate_scores(wins, self.config)
        if self.initial is not None:
            logprobs = await asyncio.gather(
                *(self._logprobs(self.initial, group) for group in groups)
            )
            result |= perplexity_scores(logprobs, self.config)
        return result

    async def _logprobs(self, initial: ServedTeacher, group: Group) -> list[Logprobs]:
        samples = group.samples
        return await asyncio.gather(
            *(initial_logprobs(initial, group.prompt, sample) for sample in samples)
        )


async def open_measures(
    plan: RunPlan,
    served: Mapping[str, Fleet],
    scorers: Mapping[str, Scorer],
    tokenizer: Tokenizer,
    resources: AsyncExitStack,
    logs: Path,
) -> Measures:
    """`served`, `scorers`: of the roles on engines. `resources` ends the reward's processes, which
    log to the folder `logs`.
    """
    parts = parts_in_win_rate(plan.config)
    win_rate = None
    if parts:
        scoring = await open_scoring(plan.config, parts, scorers, resources, logs / "win_rate")
        win_rate = WinRate(scoring, tokenizer)
    return Measures(plan.config, win_rate, open_initial(plan, dict(served)))


# how much of a win a response is over the reference, or why that is not known
Win = float | Failure


@dataclass
class WinRate:
    """Compares responses with references: by scores of both, or by a pairwise judge's comparisons
    in both orders.
    """

    scoring: Scoring
    tokenizer: Tokenizer
    # (set, prompt) -> the reference's score, which is the same in every evaluation
    _references: dict[tuple[str, int], Score] = field(default_factory=dict)

    async def of(self, held_out: HeldOutSet, groups: Sequence[Group]) -> list[list[Win]]:
        """[prompts][samples] of the set."""
        work = []
        for prompt, reference, group in zip(
            held_out.prompts, held_out.references, groups, strict=True
        ):
            work.append(self._of_prompt(held_out.name, prompt, reference, group.samples))
        return await asyncio.gather(*work)

    async def _of_prompt(
        self, name: str, prompt: Prompt, reference: str, samples: Sequence[Sample]
    ) -> list[Win]:
        """A sample's response is the policy's text in its last turn."""
        samples = [sample for sample in samples if not sample.branch]
        if self.scoring.comparing:
            return await asyncio.gather(
                *(self._compared(prompt, last_turn(sample), reference) for sample in samples)
            )
        key = name, prompt.ordinal
        if key not in self._references:
            ids = self.tokenizer.encode_response(reference)
            score = await self.scoring.one(request_of(prompt, reference, ids))
            if score.failures:
                return [score.failures[0]] * len(samples)
            self._references[key] = score
        requests = []
        for index, sample in enumerate(samples):
            truncated = sample.finish_reason == "length"
            text = last_turn(sample)
            requests.append(request_of(prompt, text, sample.token_ids, index, truncated))
        scores = await asyncio.gather(*map(self.scoring.one, requests))
        return [_win(score, self._references[key].reward) for score in scores]

    async def _compared(self, prompt: Prompt, response: str, reference: str) -> Win:
        part, judge = self.scoring.comparing[0]
        games = await judge.play(prompt.text, prompt.answer, [response, reference])
        first = games[0, 1]
        second = games[1, 0]
        for game in (first, second):
            if isinstance(game, NoVerdict):
                return Failure(game.kind, str(game), response, part.part)
        assert isinstance(first, float) and isinstance(second, float)
        return (first + 1 - second) / 2


def _win(score: Score, reference: float) -> Win:
    if score.failures:
        return score.failures[0]
    return (score.reward > reference) + (score.reward == reference) / 2


def last_turn(sample: Sample) -> str:
    """The policy's text after the environment's last part."""
    start = sample.environment_spans[-1][1] if sample.environment_spans else 0
    return sample.text[start:]


def win_rate_scores(wins: Sequence[Sequence[Win]], config: RunConfig) -> dict[str, float]:
    """The mean over prompts of their share of wins. Failures are left out.

    Raises RunError if too many comparisons have failed.
    """
    samples = max(map(len, wins))
    flat = [win for prompt_wins in wins for win in prompt_wins]
    failures = [win for win in flat if isinstance(win, Failure)]
    _check_failures(f"eval.win_rate={config.eval.win_rate}", failures, len(flat), config)
    shares = []
    for prompt_wins in wins:
        decided = [win for win in prompt_wins if not isinstance(win, Failure)]
        if decided:
            shares.append(fmean(decided))
    result: dict[str, float] = {"win_rate/failed": len(failures)}
    if shares:
        low, high = interval(shares, samples)
        result["win_rate"] = fmean(shares)
        result["ci95/win_rate/low"] = low
        result["ci95/win_rate/high"] = high
    return result


# the initial model's log-probs of the policy's tokens in a sample [T], or why it gave none
Logprobs = np.ndarray | Failure


async def initial_logprobs(initial: ServedTeacher, prompt: Prompt, sample: Sample) -> Logprobs:
    if not sample.token_ids:  # an episode that sampled nothing
        return np.empty(0)
    scores = await initial.judge(prompt, sample)
    if isinstance(scores, Failure):
        return scores
    mask = list(sample.policy_mask or repeat(1, len(sample.token_ids)))
    return np.array(list(compress(scores.logprobs[:, 0], mask)), np.float64)


def perplexity_scores(
    logprobs: Sequence[Sequence[Logprobs]], config: RunConfig
) -> dict[str, float]:
    """exp of the mean negative log-prob of all tokens. `logprobs`: [prompts][samples].

    Raises RunError if the model has failed on too many samples.
    """
    flat = [entry for of_prompt in logprobs for entry in of_prompt]
    failures = [entry for entry in flat if isinstance(entry, Failure)]
    _check_failures("roles.initial", failures, len(flat), config)
    surprise = []
    tokens = []
    for of_prompt in logprobs:
        known = [entry for entry in of_prompt if not isinstance(entry, Failure)]
        if known:
            surprise.append(-math.fsum(map(math.fsum, known)))
            tokens.append(sum(map(len, known)))
    result: dict[str, float] = {"perplexity/failed": len(failures)}
    if sum(tokens):
        low, high = ratio_interval(surprise, tokens)
        result["perplexity"] = math.exp(sum(surprise) / sum(tokens))
        result["ci95/perplexity/low"] = math.exp(low)
        result["ci95/perplexity/high"] = math.exp(high)
    return result


def _check_failures(
    setting: str, failures: Sequence[Failure], count: int, config: RunConfig
) -> None:
    most = config.reward.max_failed_fraction
    if len(failures) > most * count:
        raise RunError(
            f"{setting}: {len(failures)} of {count} responses failed, more than "
            f"reward.max_failed_fraction={most:g}; for example {failures[0].reason}"
        )
