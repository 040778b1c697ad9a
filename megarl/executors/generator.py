"""The generator executor: prompts in, scored groups out, from a fleet of SGLang engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megarl.base.rollout_types import Group, Ordinal, Prompt, Version
from megarl.config.schema import MASK
from megarl.config.tasks import tasks_of
from megarl.data.order import Curriculum
from megarl.data.prompts import held_out_sets, train_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.evaluation.evaluate import evaluate_sets
from megarl.evaluation.measures import open_measures
from megarl.evaluation.scores import is_due, write_result
from megarl.executors.engine_calls import FleetCalls, show_engines
from megarl.generator.completions import Sampling
from megarl.generator.fleet import watch_returns
from megarl.generator.seeds import seed_of
from megarl.messaging.messages import ProbeReady
from megarl.messaging.rendezvous import Rendezvous
from megarl.messaging.waiting import Background, Pulse
from megarl.observe.samples import FailuresWriter
from megarl.observe.status import StatusBoard, TraceWriter
from megarl.plan.resolve import RunPlan
from megarl.plan.topologies import run_ahead
from megarl.roles.opening import open_scorers, open_served, open_teachers
from megarl.rollouts.channel import RolloutsSender, judged
from megarl.rollouts.idle import FurtherSamples
from megarl.rollouts.rollout import open_fleet, open_rollouts, train_sampling
from megarl.rollouts.stream import Admission, RolloutStream

T = TypeVar("T")
PROBE_PROMPTS = 8
PROBE_TOKENS = 32


@dataclass
class GeneratorExecutor:
    """The process that drives all engines over HTTP. Only tokens and log-probs pass through it.

    Background tasks do its work even while the controller's loop waits: the rollout stream
    (`stream`), and the receiving end of the weights channel. A step means that the groups of one
    batch have been sent.
    """

    plan: RunPlan
    rendezvous: Rendezvous
    rollouts: RolloutsSender
    fixed: Callable[[], str] = str  # returns why the set of engines cannot change
    curr_step: int = 0
    # never set: the trainer's checkpoint has everything, so the launcher may kill this process
    stopped: bool = False
    background: Background = field(default_factory=Background)
    # beats when the version or the number of sent groups has changed
    pulse: Pulse = field(default_factory=Pulse)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _resources: AsyncExitStack = field(default_factory=AsyncExitStack)
    samplings: dict[str, Sampling] = field(default_factory=dict)  # of the sources
    # by engine: tokens sampled up to the last batch
    _tokens: list[int] = field(default_factory=list)

    def init(self) -> None:
        config = self.plan.config
        self.status = StatusBoard(Path(config.run_dir), "generator.0").for_work()
        self.trace = TraceWriter(Path(config.run_dir), "generator.0")
        self.tokenizer = load_tokenizer(config.model)
        self.prompts = train_prompts(config, self.tokenizer, self.plan.spec)
        self.held_out = []
        if not config.eval.engines:
            self.held_out = held_out_sets(config, self.tokenizer, self.plan.spec)
        self.sampling = train_sampling(config, self.tokenizer)
        for source, task in tasks_of(config).items():
            self.samplings[source] = train_sampling(task, self.tokenizer)
        self.curr_step = self.rendezvous.start_step
        elastic = config.generator.on_failure != "fail"
        with self.status.waiting("the engines", "start-up"):
            self.fleet = self.run(open_fleet(self.plan, self.rendezvous, self._resources, elastic))
            served_fleets = self.run(
                open_served(self.plan, self.rendezvous, self._resources, elastic)
            )
        for fleet in (self.fleet, *served_fleets.values()):
            self.start(
                watch_returns(fleet, config.run_dir, config.generator),
                f"lost engines of {fleet.name}",
            )
            self.start(
                show_engines(fleet, Path(config.run_dir), self.trace),
                f"status of the engines of {fleet.name}",
            )
        calls = FleetCalls(
            self.plan, self.rendezvous, self.rollouts.link, self.fleet, self.background, self.fixed
        )
        self.start(calls.serve(), "calls of megarl engines")
        self.start(calls.watch(), "watch over engines that joined")
        scorers = open_scorers(self.plan, served_fleets, self.tokenizer)
        teachers = open_teachers(self.plan, served_fleets)
        failures = FailuresWriter(config.run_dir)
        self._resources.callback(failures.close)
        rollouts = open_rollouts(
            self.plan,
            self.fleet,
            scorers,
            self.tokenizer,
            self._resources,
            teachers=teachers,
            tell=failures.tell,
        )
        self.rollouts_of = self.run(rollouts)
        if self.held_out:
            logs = Path(config.run_dir) / "logs"
            measures = open_measures(
                self.plan, served_fleets, scorers, self.tokenizer, self._resources, logs
            )
            self.measures = self.run(measures)
        judge = partial(judged, config=config)
        clock = self.rollouts_of.clock
        self.stream = RolloutStream(
            self._admission(),
            self._roll_out,
            self.rollouts,
            self.background,
            self.pulse,
            judge,
            clock.waited_s,
            further=self._further(),
            # with async.too_old=mask, no batch waits for a prompt in flight
            max_staleness=None if config.async_.too_old == MASK else config.async_.max_staleness,
        )
        self.start(self.stream.run(config.timeouts.rendezvous_s), "rollout stream")
        self.start(self._follow_fleet(), "places for prompts in flight")

    def _admission(self) -> Admission:
        config = self.plan.config
        per_step = config.rollout.prompts_per_step
        sources = self.prompts.sources
        return Admission(
            per_step,
            run_ahead(config.async_),
            self._places(),
            end=per_step * config.max_steps,
            mixture=sources.mixture,
            curriculum=Curriculum(sources.place, config.data.curriculum.rest_epochs)
            if config.data.curriculum
            else None,
        )

    def _places(self) -> int:
        """The number of prompts that may be in flight.

        The setting is for the engines of the plan; here it is scaled to the current ones.
        """
        config = self.plan.config
        places = config.async_.max_in_flight or config.rollout.prompts_per_step
        return max(1, ceil(places * self.fleet.places(self.fleet.counted) / self.plan.places))

    async def _follow_fleet(self) -> None:
        while True:
            places = self._places()
            self.stream.put_places(places)
            await self.fleet.pulse.until(lambda: self._places() != places)

    async def _roll_out(self, ordinal: Ordinal) -> Group:
        prompt = self.prompts[ordinal]
        n = self.plan.config.rollout.n
        return await self.rollouts_of.training(prompt, self._sampling_of(prompt), n)

    def _sampling_of(self, prompt: Prompt) -> Sampling:
        return self.samplings.get(prompt.source, self.sampling)

    def _further(self) -> FurtherSamples | None:
        config = self.plan.config
        if config.async_.idle != "samples":
            return None
        n = config.rollout.n
        return FurtherSamples(self._roll_out_further, n, config.async_.max_samples or 2 * n)

    async def _roll_out_further(self, ordinal: Ordinal, number: int) -> Group:
        """One more episode of a prompt, with a seed that no other has."""
        prompt = self.prompts[ordinal]
        sampling = self._sampling_of(prompt)
        if sampling.seed is not None:
            seed = seed_of(sampling.seed, "further", number)
            sampling = msgspec.structs.replace(sampling, seed=seed)
        return await self.rollouts_of.training(prompt, sampling, 1)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs one coroutine to its end beside the background tasks.

        If a background task fails, raises its error at once.
        """
        return self.loop.run_until_complete(self.background.beside(coroutine))

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Starts a background task, which runs whenever the executor waits."""
        self.loop.call_soon(self.background.start, coroutine, name)

    def wait_until(self, holds: Callable[[], bool], awaited: str) -> None:
        """Runs the background tasks until `holds()`.

        Raises TimeoutError if nothing has happened for `timeouts.rollouts_s`.
        """
        self.run(self._until(holds, awaited))

    async def _until(self, holds: Callable[[], bool], awaited: str) -> None:
        timeout_s = self.plan.config.timeouts.rollouts_s
        while not holds():
            progress = self.version, self.stream.sent
            try:
                async with asyncio.timeout(timeout_s):
                    await self.pulse.until(
                        lambda: holds() or progress != (self.version, self.stream.sent)
                    )
            except TimeoutError:
                raise TimeoutError(
                    f"generator.0 waited {timeout_s:.0f} s for {awaited}; {self.stream}"
                ) from None

    def set_step(self, step: int) -> None:
        self.status.set(f"batch {step}")

    def step(self) -> None:
        """Waits until enough groups for one more batch have been sent.

        The trainer composes its batches itself.
        """
        with self.trace.span(f"generate batch {self.curr_step}") as span_values:
            target = (self.curr_step + 1) * self.plan.config.rollout.prompts_per_step
            self.wait_until(
                lambda: self.stream.finished >= target, f"batch {self.curr_step} from the engines"
            )
            sampled_tokens = [engine.tokens for engine in self.fleet.engines]
            tokens_before = zip_longest(sampled_tokens, self._tokens, fillvalue=0)
            span_values["engine_tokens"] = [now - before for now, before in tokens_before]
            if len(self.fleet.groups) > 1:
                span_values["engine_groups"] = [engine.group for engine in self.fleet.engines]
            self._tokens = sampled_tokens
        self.curr_step += 1

    @property
    def version(self) -> Version:
        """The version of the weights in the engines; -1 until the trainer has sent the first."""
        return self.stream.version

    async def hold(self) -> None:
        """Brings running requests into the state that `async.partial_rollout` requires for a weight
        update.
        """
        config = self.plan.config
        if config.async_.partial_rollout == "block":
            # If all engines are lost, no request can finish. Requests then continue after the
            # update, on engines that have come back.
            await self.fleet.while_serving(asyncio.ensure_future(self.stream.drain()))
        await self.fleet.hold(config.timeouts.weights_s)
        self.stream.stand_still()

    def release(self, version: Version) -> None:
        """Continues after an update. The engines serve `version`."""
        self.fleet.release(version)
        self.stream.put_version(version)

    async def probe(self) -> ProbeReady:
        """Samples a few responses of each group of engines with their log-probs, for the trainer to
        score under the same weights. Empty if no engine is left.

        Without rollout.replay_mask, they are drawn from the whole distribution: truncation would
        raise their log-probs by the mass that is cut off.
        """
        tokens = min(PROBE_TOKENS, self.sampling.max_tokens)
        sampling = msgspec.structs.replace(self.sampling, max_tokens=tokens)
        if not self.plan.config.rollout.replay_mask:
            sampling = msgspec.structs.replace(sampling, top_p=1.0, top_k=-1, min_p=0.0)
        groups = sorted({engine.group for engine in self.fleet.serving})
        sampling = msgspec.structs.replace(
            sampling, seed=seed_of(self.plan.config.seed, "probe", self.version)
        )
        requests = []
        for group in groups:
            for ordinal in range(PROBE_PROMPTS):
                requests.append((group, self.prompts[ordinal]))
        prompts = [prompt for _, prompt in requests]
        generations = []
        for group, prompt in requests:
            seeded = sampling.of_sample(prompt.ordinal)
            generations.append(self.fleet.generate(prompt.token_ids, seeded, 1, group))
        answers = asyncio.gather(*generations)
        if not groups or not await self.fleet.while_serving(answers):
            return ProbeReady(self.version, [], [], [], [], [])
        completions = [completion for (completion,) in answers.result()]
        names = [self.fleet.groups[group].name for group, _ in requests]
        return ProbeReady(
            version=self.version,
            token_ids=[
                prompt.token_ids + completion.token_ids.tolist()
                for prompt, completion in zip(prompts, completions)
            ],
            prompt_lengths=[len(prompt.token_ids) for prompt in prompts],
            logprobs=[completion.logprobs.tolist() for completion in completions],
            routing=[completion.routing for completion in completions],
            kept=[completion.kept for completion in completions],
            groups=names if any(names) else [],
        )

    async def evaluate(self) -> None:
        """Evaluates the version that the engines have just taken, if it is due and there are no
        engines that only evaluate.
        """
        config = self.plan.config
        version = self.version
        if not (self.held_out and is_due(config, version)):
            return
        with self.trace.span(f"evaluate version {version}", track="weights"):
            result = await evaluate_sets(
                self.plan,
                self.rollouts_of.held_out,
                self.held_out,
                self.tokenizer,
                self.fleet.places(self.fleet.counted),
                self.measures,
            )
        write_result(config.run_dir, version, result)

    def save_checkpoint(self) -> None:
        """Saves nothing.

        The trainer's checkpoint has everything, and unfinished prompts are generated again by their
        ordinals.
        """

    def shutdown(self) -> None:
        self.status.set("done")
        self.close()
        self.trace.close()

    def close(self) -> None:
        """Ends everything that this executor has started, even if the run has failed.

        Tasks left in the event loop would print warnings.
        """
        self.loop.run_until_complete(self.background.close())
        self.loop.run_until_complete(self._resources.aclose())
