"""The driver of `megarl label`: samples responses from the policy's engines and scores them."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from megarl.base.rollout_types import Ordinal, Prompt, Sample
from megarl.config.errors import RunError
from megarl.config.schema import UNSCORED, DataConfig, EvalConfig, RewardConfig, RunConfig
from megarl.data.datasets import conversation_of, responses_in, tools_of
from megarl.data.prompts import PromptStream, label_data, labelled_prompts, reference_of
from megarl.data.rows import Row
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.generator.completions import Sampling
from megarl.labels.pairs import (
    REFERENCE,
    SAMPLE,
    Response,
    ScoredFile,
    ScoredPrompt,
    read_scored,
)
from megarl.messaging.rendezvous import Rendezvous
from megarl.observe.status import StatusBoard, work
from megarl.plan.resolve import RunPlan
from megarl.rewards.score import Score, parts_in_labels, request_of
from megarl.roles.judge import Games, comparisons_of, win_shares
from megarl.roles.opening import open_scorers, open_served
from megarl.rollouts.rollout import (
    Rollout,
    Scoring,
    open_fleet,
    open_rollouts,
    open_scoring,
    train_sampling,
)

JUDGED_SAMPLES = 64  # the share of failed scores is taken of at least this many


def given_sample(text: str, tokenizer: Tokenizer) -> Sample:
    """A response that no engine has sampled."""
    token_ids = tokenizer.encode_response(text)
    return Sample(
        token_ids=array("i", token_ids),
        logprobs=array("f", [0.0]) * len(token_ids),
        versions=array("i", [0]) * len(token_ids),
        text=text,
        reward=0.0,
        finish_reason="stop",
    )


async def score_each(scoring: Scoring, prompt: Prompt, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with scores of their own, without those of comparisons."""
    requests = []
    for index, sample in enumerate(samples):
        truncated = sample.finish_reason == "length"
        requests.append(request_of(prompt, sample.text, sample.token_ids, index, truncated))
    return with_scores(samples, await asyncio.gather(*map(scoring.one, requests)))


def with_scores(samples: Sequence[Sample], scores: Sequence[Score]) -> list[Sample]:
    return [
        replace(sample, reward=score.reward, reward_parts=score.parts, failures=score.failures)
        for sample, score in zip(samples, scores, strict=True)
    ]


@dataclass
class Labeller:
    """Labels one prompt after the other, and counts failed scores."""

    config: RunConfig
    context_tokens: int
    tokenizer: Tokenizer
    rollout: Rollout  # without scores
    sampling: Sampling
    scoring: Scoring
    scored: int = 0
    failed: int = 0

    async def label(self, prompt: Prompt, row: Row) -> ScoredPrompt:
        """Raises what the rollout raises, and RunError if too many scores have failed."""
        candidates: dict[str, tuple[str, Sample]] = {}  # by text, which has its origin
        unusable = 0
        truncated = 0
        for origin, sample in await self._responses(prompt, row):
            truncated += sample.finish_reason == "length"
            if self._fits(prompt, sample):
                candidates.setdefault(sample.text, (origin, sample))
            else:
                unusable += 1
        samples, games = await self._score(prompt, [sample for _, sample in candidates.values()])
        responses = []
        for (origin, _), sample in zip(candidates.values(), samples, strict=True):
            score = None if sample.failures else sample.reward
            responses.append(Response(sample.text, origin, score))
        self._count(samples)
        dataset, key = label_data(self.config, prompt.source)
        return ScoredPrompt(
            ordinal=prompt.ordinal,
            prompt=conversation_of(row.record, dataset, key) if row.rendered else prompt.text,
            responses=responses,
            comparisons=None if games is None else comparisons_of(games),
            tools=tools_of(row.record) if row.rendered else None,
            unusable=unusable,
            truncated=truncated,
        )

    async def _responses(self, prompt: Prompt, row: Row) -> list[tuple[str, Sample]]:
        """All responses to the prompt, each with its origin."""
        settings = self.config.label
        responses: list[tuple[str, Sample]] = []
        if settings.n:
            group = await self.rollout(prompt, self.sampling, settings.n)
            responses += [(SAMPLE, sample) for sample in group.samples]
        texts = responses_in(row.record, settings.columns)
        if settings.reference:
            texts.append((REFERENCE, reference_of(row)))
        for origin, text in texts:
            responses.append((origin, given_sample(text, self.tokenizer)))
        return responses

    def _fits(self, prompt: Prompt, sample: Sample) -> bool:
        """Whether megarl reward-model takes the response, tokenised anew."""
        tokens = len(prompt.token_ids) + len(self.tokenizer.encode_response(sample.text))
        return bool(sample.text.strip()) and tokens <= self.context_tokens

    async def _score(
        self, prompt: Prompt, samples: list[Sample]
    ) -> tuple[list[Sample], Games | None]:
        """The samples with scores, and the games of a judge that is the whole reward."""
        comparing = self.scoring.comparing
        if comparing and len(samples) < 2:
            return samples, {}
        if comparing and not comparing[0][0].part:
            part, judge = comparing[0]
            texts = [sample.text for sample in samples]
            games = await judge.play(prompt.text, prompt.answer, texts)
            shares = win_shares(part, prompt.answer, texts, games)
            return with_scores(samples, shares), games
        samples = await score_each(self.scoring, prompt, samples)
        if comparing:
            samples = await self.scoring.compare(prompt, samples)
        return samples, None

    def _count(self, samples: Sequence[Sample]) -> None:
        """Raises RunError if too many scores have failed."""
        self.scored += len(samples)
        self.failed += sum(bool(sample.failures) for sample in samples)
        most = self.config.reward.max_failed_fraction
        if self.failed > most * max(self.scored, JUDGED_SAMPLES):
            failures = [failure for sample in samples for failure in sample.failures]
            example = f"; the last: {failures[-1].reason}" if failures else ""
            raise RunError(
                f"{parts_in_labels(self.config)[0].setting}: {self.failed} of {self.scored} scores "
                f"failed, more than reward.max_failed_fraction={most:g}{example}"
            )


async def open_labeller(
    plan: RunPlan, rendezvous: Rendezvous, tokenizer: Tokenizer, resources: AsyncExitStack
) -> Labeller:
    config = plan.config
    logs = Path(config.label.output) / "logs"
    fleet = await open_fleet(plan, rendezvous, resources)
    scorers = open_scorers(plan, await open_served(plan, rendezvous, resources), tokenizer)
    unscored_config = dataclasses.replace(
        config, reward=RewardConfig(name=UNSCORED), data=DataConfig(eval=None), eval=EvalConfig()
    )
    unscored = dataclasses.replace(plan, config=unscored_config)
    rollouts = await open_rollouts(unscored, fleet, {}, tokenizer, resources, logs=logs)
    return Labeller(
        config=config,
        context_tokens=plan.spec.max_position_embeddings,
        tokenizer=tokenizer,
        rollout=rollouts.training,
        sampling=train_sampling(config, tokenizer),
        scoring=await open_scoring(config, parts_in_labels(config), scorers, resources, logs),
    )


def prompts_of(config: RunConfig, prompts: PromptStream) -> int:
    """How many prompts are labelled: `label.prompts`, but no row of a single source twice."""
    rows = sum(map(len, prompts.sources.rows))
    return min(config.label.prompts or rows, rows)


async def label_engines(plan: RunPlan, rendezvous: Rendezvous) -> int:
    """Labels all prompts that scored.jsonl lacks. Returns how many there are in all."""
    config = plan.config
    folder = Path(config.label.output)
    tokenizer = load_tokenizer(config.model)
    status = StatusBoard(folder, "label.0").for_work()
    status.set("waiting for start-up from the engines")
    prompts = labelled_prompts(config, tokenizer, plan.spec)
    total = prompts_of(config, prompts)
    done = {scored.ordinal for scored in read_scored(folder)}
    due = [ordinal for ordinal in range(total) if ordinal not in done]
    async with AsyncExitStack() as resources:
        labeller = await open_labeller(plan, rendezvous, tokenizer, resources)
        file = resources.enter_context(closing(ScoredFile(folder)))
        status.set("labelling")
        # twice as many prompts as the engines hold: half of them may wait for scores
        at_once = max(1, 2 * plan.places // max(1, config.label.n))
        with work("prompts to label", len(due), line="labels") as labelled:
            await _label_all(labeller, prompts, due, at_once, file, labelled)
    return total


async def _label_all(
    labeller: Labeller,
    prompts: PromptStream,
    due: Sequence[Ordinal],
    at_once: int,
    file: ScoredFile,
    labelled: Callable[[float], None],
) -> None:
    waiting = iter(due)

    async def work_off(ordinals: Iterator[Ordinal]) -> None:
        for ordinal in ordinals:
            row = prompts.sources[ordinal]
            file.append(await labeller.label(prompts[ordinal], row))
            labelled(1)

    await asyncio.gather(*(work_off(waiting) for _ in range(min(at_once, len(due)))))
