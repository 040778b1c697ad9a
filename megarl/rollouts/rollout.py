"""Sets up the rollout that rollout.name sets, with the run's engines, verifier and tools, and
checks the samples it returns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from megarl.base.rollout_types import (
    WARNING,
    Failure,
    Group,
    Ordinal,
    Prompt,
    Sample,
    TurnReward,
    any_unanswered,
)
from megarl.config.algorithms import OUTCOME
from megarl.config.limits import is_async
from megarl.config.schema import UNSCORED, RolloutConfig, RunConfig
from megarl.config.tasks import source_of, task_of, tasks_of
from megarl.data.rows import held_out as held_out_datasets
from megarl.data.rows import stops_on_text
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.generator.client import EngineClient
from megarl.generator.completions import Completion, Sampling
from megarl.generator.fleet import Fleet
from megarl.generator.seeds import Seeds, seed_of
from megarl.messaging.rendezvous import ROLLOUTS, Rendezvous
from megarl.models.routing import RoutingFormat
from megarl.plan.resolve import RunPlan
from megarl.rewards import code
from megarl.rewards.credit import ignores_turns
from megarl.rewards.pool import OF_VERIFIERS, RewardInLoop, RewardPool
from megarl.rewards.score import (
    RewardPart,
    Score,
    ScoreRequest,
    WeightedSum,
    bounded,
    failed_episodes,
    parts_in_evaluation,
    parts_of_source,
    weighted_sum,
)
from megarl.roles.judge import Judge
from megarl.roles.opening import Scorer
from megarl.roles.plan import pairwise
from megarl.rollouts.environments import base, loading
from megarl.rollouts.environments.loading import ToolProcesses
from megarl.teachers.engines import ServedTeachers

ScoreOne = Callable[[ScoreRequest], Awaitable[Score]]


@dataclass(frozen=True)
class Scoring:
    """`one` scores a response as soon as it is finished.

    The parts in `comparing` need all responses to a prompt.
    """

    one: ScoreOne
    comparing: Sequence[tuple[RewardPart, Judge]] = ()

    async def compare(self, prompt: Prompt, samples: list[Sample]) -> list[Sample]:
        """The samples with the scores of `comparing` added to their rewards."""
        texts = [sample.text for sample in samples]
        comparisons = []
        for part, judge in self.comparing:
            comparisons.append(judge.compare(part, prompt.text, prompt.answer, texts))
        scores_by_part = await asyncio.gather(*comparisons)
        return [self._add(sample, scores) for sample, *scores in zip(samples, *scores_by_part)]

    def _add(self, sample: Sample, scores: Sequence[Score]) -> Sample:
        comparison = weighted_sum(
            [(part, score) for (part, _), score in zip(self.comparing, scores, strict=True)]
        )
        parts = sample.reward_parts | comparison.parts
        turns = list(sample.turn_rewards)
        if turns:
            turns[-1] = TurnReward(turns[-1].end, turns[-1].reward + comparison.reward)
        return replace(
            sample,
            turn_rewards=turns,
            reward=bounded(sample.reward + comparison.reward, parts),
            reward_parts=parts,
            failures=sample.failures + comparison.failures,
        )


class ScoringClock:
    """Measures how long rollouts have waited for scores while they decoded nothing.

    It integrates, over time, the share of the rollouts in flight that do nothing but wait for a
    score. While all of them do, it runs as fast as the wall clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic):
        self._now_s = now_s
        self._waited_s = 0.0
        self._since = now_s()
        self._rollouts = 0
        self._waiting = 0

    def waited_s(self) -> float:
        now = self._now_s()
        self._waited_s += (now - self._since) * self._waiting / max(1, self._rollouts)
        self._since = now
        return self._waited_s

    def count(self, rollouts: int = 0, waiting: int = 0) -> None:
        """Adds to the numbers of rollouts in flight (`rollouts`) and of waiting rollouts
        (`waiting`).
        """
        self.waited_s()
        self._rollouts += rollouts
        self._waiting += waiting


class RolloutClock:
    """Tells `clock` whether one rollout waits: some of its responses are being scored and none is
    being decoded.
    """

    def __init__(self, clock: ScoringClock):
        self._clock = clock
        self._decoding = 0
        self._scoring = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._clock.count(rollouts=1)
        try:
            yield
        finally:
            self._clock.count(rollouts=-1)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        self._change(decoding=1)
        try:
            yield
        finally:
            self._change(decoding=-1)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        self._change(scoring=1)
        try:
            yield
        finally:
            self._change(scoring=-1)

    def _change(self, decoding: int = 0, scoring: int = 0) -> None:
        before = self._waits
        self._decoding += decoding
        self._scoring += scoring
        self._clock.count(waiting=self._waits - before)

    @property
    def _waits(self) -> bool:
        return self._scoring > 0 and not self._decoding


async def open_scoring(
    config: RunConfig,
    parts: Sequence[RewardPart],
    scorers: Mapping[str, Scorer],
    resources: AsyncExitStack,
    logs: Path,
) -> Scoring:
    """The scoring of responses by `parts`, without a rollout.

    `scorers`: the scorers of roles on engines. `resources` ends the worker processes, which log to
    the folder `logs`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    opening = partial(open_part, config, scorers=scorers, resources=resources, logs=logs)
    return await _scoring(config, parts, scorers, opening)


async def _scoring(
    config: RunConfig,
    parts: Sequence[RewardPart],
    scorers: Mapping[str, Scorer],
    opening: Callable[[RewardPart], Awaitable[ScoreOne]],
) -> Scoring:
    """`opening`: gives the function that computes a part."""
    comparing: list[tuple[RewardPart, Judge]] = []
    scored_parts: list[tuple[RewardPart, ScoreOne]] = []
    for part in parts:
        if not pairwise(config, part):
            scored_parts.append((part, await opening(part)))
            continue
        scorer = scorers[part.role or ""]
        if isinstance(scorer, Judge):
            comparing.append((part, scorer))
    # without reward.parts, one score is the whole reward
    single_score = next((score for part, score in scored_parts if not part.part), None)
    return Scoring(single_score or WeightedSum(scored_parts).score, comparing)


async def _unscored(request: ScoreRequest) -> Score:
    return Score(0.0)


async def open_part(
    config: RunConfig,
    part: RewardPart,
    scorers: Mapping[str, Scorer],
    resources: AsyncExitStack,
    logs: Path,
    warn: Callable[[str], None] = lambda text: None,
) -> ScoreOne:
    """The function that computes one part of the reward of a response."""
    if part.name == UNSCORED:
        return _unscored
    if part.role is not None:
        return partial(scorers[part.role].score, part)
    reward = loading.load_reward(part)
    if reward is not None and is_async(reward.function):
        in_loop = RewardInLoop(config.reward, reward.function, reward.parameters, part, warn)
        return in_loop.score
    if part.name == code.NAME:
        return (await resources.enter_async_context(code.CodeReward(config.reward, part))).score
    parameters = reward.parameters if reward else OF_VERIFIERS
    pool = RewardPool(config.reward, parameters, logs, part)
    return (await resources.enter_async_context(pool)).score


Compare = Callable[[Prompt, list[Sample]], Awaitable[list[Sample]]]


class Rollout(Protocol):
    async def __call__(self, prompt: Prompt, sampling: Sampling, n: int) -> Group: ...


Tell = Callable[[Failure, Ordinal], None]  # takes what has failed, and the prompt's ordinal


def _untold(failure: Failure, ordinal: Ordinal) -> None: ...


@dataclass(frozen=True)
class CheckedRollout:
    """Calls a rollout under a deadline, and checks its samples before any of them is trained on."""

    name: str
    rollout: base.Rollout
    context: base.RolloutContext
    timeout_s: float
    vocab_size: int
    # whether samples need the kept sets that their tokens were drawn from
    replays_mask: bool = False
    # adds to rewards the scores of a prompt's samples against each other
    compare: Compare | None = None
    judge: Compare | None = None  # adds the teachers' log-probs to the samples
    clock: ScoringClock = field(default_factory=ScoringClock)
    tell: Tell = _untold  # called at once with each failure
    ignores_turns: bool = False  # whether training uses the rewards of responses alone
    # makes the `generate` of one call; None: that of `context`
    keeping: Callable[[], base.Generate] | None = None
    _warnings: list[str] = field(default_factory=list)  # those that have been made

    async def __call__(self, prompt: Prompt, sampling: Sampling, n: int) -> Group:
        """`sampling.seed` is the run's. From it, the prompt gets a seed of its own.

        Raises: TimeoutError past the deadline, RuntimeError for malformed samples, and whatever the
        rollout raises.
        """
        description = f"rollout {self.name}, prompt {prompt.ordinal}"
        deadline = asyncio.timeout(self.timeout_s)
        clock = RolloutClock(self.clock)
        if sampling.seed is not None:
            sampling = replace(sampling, seed=seed_of(sampling.seed, prompt.ordinal))
        try:
            async with deadline:
                with clock.running():
                    result = await self.rollout(
                        self._watched(clock, prompt.ordinal, sampling.seed), prompt, sampling, n
                    )
                    if isinstance(result, Group):
                        prompt = result.prompt
                        samples = result.samples
                    else:
                        samples = result
                    for add in (self.compare, self.judge):
                        if add is not None and not any_unanswered(samples):
                            self._check(samples, n, sampling, description)
                            with clock.scoring():
                                samples = await add(prompt, samples)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise TimeoutError(
                f"{description}: not finished within timeouts.samples_s={self.timeout_s:g}"
            ) from error
        except Exception as error:
            error.add_note(f"in {description}")
            raise
        self._check(samples, n, sampling, description)
        for failure in failed_episodes(samples):
            self.tell(failure, prompt.ordinal)
        if self.ignores_turns and not self._warnings and any(map(ignores_turns, samples)):
            self._warnings.append(
                f"{description}: its rewards at turns are ignored: algorithm.credit={OUTCOME} "
                "learns from the reward of the response alone; returns or process would use them"
            )
            self.tell(Failure(WARNING, self._warnings[0]), -1)
        return Group(prompt=replace(prompt, row={}), samples=samples)

    def _watched(
        self, clock: RolloutClock, ordinal: Ordinal, seed: int | None
    ) -> base.RolloutContext:
        """The context of one call.

        It counts decoding and scoring on `clock`, and reports failed scores to `tell`. Requests
        with the prompt's `seed`, or without any, get seeds of their own: a rollout need not know
        about seeds.
        """
        seeds = None if seed is None else Seeds(seed)
        generate_in_call = self.keeping() if self.keeping else self.context.generate

        async def generate(prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
            if seeds is not None and sampling.seed in (None, seed):
                sampling = replace(sampling, seed=seeds.next(prompt_ids))
            with clock.decoding():
                return await generate_in_call(prompt_ids, sampling, n)

        async def score(request: ScoreRequest) -> Score:
            with clock.scoring():
                result = await self.context.score(request)
            for failure in result.failures:
                self.tell(failure, ordinal)
            return result

        return dataclasses.replace(self.context, generate=generate, score=score)

    def _check(self, samples: list[Sample], n: int, sampling: Sampling, description: str) -> None:
        problems = base.sample_problems(
            samples,
            n,
            sampling.max_tokens,
            self.vocab_size,
            self.replays_mask and sampling.truncated,
        )
        if problems:
            raise RuntimeError(f"{description}: {'; '.join(problems)}")


async def open_fleet(
    plan: RunPlan,
    rendezvous: Rendezvous,
    resources: AsyncExitStack,
    elastic: bool = False,
    name: str = ROLLOUTS.prefix,
) -> Fleet:
    """Opens clients of all engines of `name`, and waits until each takes requests.

    `resources` closes them. An `elastic` fleet can lose engines.
    """
    config = plan.config
    engines = [engine_client(plan, rendezvous, url) for url in rendezvous.engine_urls(name)]
    chunk_tokens = config.async_.chunk_tokens or max(1, config.rollout.max_tokens // 4)
    mode = config.async_.partial_rollout
    decode = load_tokenizer(config.model).decode_all if stops_on_text(config) else None
    fleet = Fleet(
        engines,
        mode,
        chunk_tokens if mode == "resume" else None,
        elastic,
        decode,
        name=name,
        groups=plan.groups,
    )
    resources.push_async_callback(fleet.close)
    await asyncio.gather(
        *(engine.wait_ready(config.generator.startup_timeout_s) for engine in engines)
    )
    return fleet


def engine_client(plan: RunPlan, rendezvous: Rendezvous, url: str) -> EngineClient:
    """The client of one engine of the policy. Construct it inside the event loop."""
    config = plan.config
    routing = RoutingFormat.of(plan.spec) if config.trainer.routing_replay else None
    kept_of = plan.spec.vocab_size if config.rollout.replays_mask else None
    return EngineClient(
        url,
        rendezvous.engine_key,
        rendezvous.engine_admin_key,
        config.timeouts.request_s,
        routing,
        kept_of,
        plan.sent_adapters is not None,
    )


@dataclass(frozen=True)
class RolloutBySource:
    """Plays each prompt by the rollout of its source: a name in data.train.sources or eval.suites,
    or empty, which is also for sources that have none.
    """

    rollouts: Mapping[str, CheckedRollout]

    async def __call__(self, prompt: Prompt, sampling: Sampling, n: int) -> Group:
        rollout = self.rollouts.get(prompt.source) or self.rollouts[""]
        return await rollout(prompt, sampling, n)


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of training prompts and of held-out prompts, which eval.reward may score in
    another way.
    """

    training: Rollout
    held_out: Rollout
    # how long rollouts of `training` have waited for scores
    clock: ScoringClock = field(default_factory=ScoringClock)


async def open_rollouts(
    plan: RunPlan,
    fleet: Fleet,
    scorers: Mapping[str, Scorer],
    tokenizer: Tokenizer,
    resources: AsyncExitStack,
    *,
    teachers: ServedTeachers | None = None,
    training: bool = True,
    logs: Path | None = None,
    tell: Tell = _untold,
) -> Rollouts:
    """The rollouts of a run, with their reward workers and tool processes.

    `resources` ends these processes. They log to the folder `logs`; None: the run's folder.
    `scorers`, `teachers`: the roles on engines. Without `training`, opens only what held-out
    prompts need.
    """
    config = plan.config
    logs = logs or Path(config.run_dir) / "logs"
    opener = RolloutOpener(plan, fleet, scorers, tokenizer, resources, logs, tell)
    trained: dict[str, CheckedRollout] = {}
    clock = ScoringClock()
    for source, task in tasks_of(config).items() if training else ():
        rollout = await opener.open(task, parts_of_source(config, source), source)
        judge = teachers.judged if teachers else None
        trained[source] = dataclasses.replace(
            rollout,
            judge=judge,
            clock=clock,
            ignores_turns=config.algorithm.credit == OUTCOME,
            keeping=fleet.keeping if config.async_.keep_kv_cache else None,
        )
    held_out: dict[str, CheckedRollout] = {}
    for suite, *_ in held_out_datasets(config):
        task = task_of(config, source_of(config, f"eval.suites.{suite}"))
        parts = parts_in_evaluation(config, suite)
        held_out[suite] = await opener.open(task, parts, f"eval/{suite}")
    return Rollouts(RolloutBySource(trained), RolloutBySource(held_out), clock)


@dataclass
class RolloutOpener:
    """Opens rollouts. Equal ones share an object, and equal parts of rewards the processes that
    score them.
    """

    plan: RunPlan
    fleet: Fleet
    scorers: Mapping[str, Scorer]  # of roles on engines
    tokenizer: Tokenizer
    resources: AsyncExitStack  # ends the processes
    logs: Path  # folder
    tell: Tell
    _tools: ToolProcesses | None = None
    _rollouts: list[tuple[RolloutConfig, base.Rollout]] = field(default_factory=list)
    _scores: dict[RewardPart, ScoreOne] = field(default_factory=dict)

    async def open(
        self, task: RunConfig, parts: Sequence[RewardPart], folder: str
    ) -> CheckedRollout:
        """The rollout of `task`, scored by `parts`, whose new processes log to `folder`."""
        config = self.plan.config
        if self._tools is None:
            self._tools = ToolProcesses(config.rollout, self.logs)
            self.resources.push_async_callback(self._tools.close)
        scoring = await _scoring(config, parts, self.scorers, partial(self._score, folder=folder))
        context = base.RolloutContext(
            self.tokenizer,
            self.fleet.generate,
            scoring.one,
            self._tools.run,
            config.rollout.tool_timeout_s,
        )
        rollout = self._rollout(task)
        return CheckedRollout(
            task.rollout.name,
            rollout,
            context,
            timeout_s=config.timeouts.samples_s,
            vocab_size=self.plan.spec.vocab_size,
            replays_mask=config.rollout.replays_mask,
            compare=scoring.compare if scoring.comparing else None,
            tell=self.tell,
        )

    def _rollout(self, task: RunConfig) -> base.Rollout:
        for settings, rollout in self._rollouts:
            if (settings.name, settings.args) == (task.rollout.name, task.rollout.args):
                return rollout
        rollout = loading.load_rollout(task, self.tokenizer)
        self._rollouts.append((task.rollout, rollout))
        close = getattr(rollout, "close", None)
        if close is not None:
            self.resources.push_async_callback(close)
        return rollout

    async def _score(self, part: RewardPart, folder: str) -> ScoreOne:
        kind = dataclasses.replace(part, key="", weight=1.0)
        if kind not in self._scores:
            logs = self.logs if part.key.startswith("reward.") else self.logs / folder
            logs.mkdir(parents=True, exist_ok=True)
            self._scores[kind] = await open_part(
                self.plan.config, part, self.scorers, self.resources, logs, self._warn
            )
        return self._scores[kind]

    def _warn(self, text: str) -> None:
        self.tell(Failure(WARNING, text), -1)


def train_sampling(config: RunConfig, tokenizer: Tokenizer) -> Sampling:
    """How the prompts of a task are sampled."""
    rollout = config.rollout
    filters = {"top_p": rollout.top_p, "top_k": rollout.top_k, "min_p": rollout.min_p}
    return Sampling(
        rollout.max_tokens,
        rollout.temperature,
        **filters,
        stop_token_ids=tokenizer.eos_ids,
        stop=tuple(rollout.stop),
        seed=config.seed,
    )
