"""The generator executor: prompts in, scored groups out, from a fleet of SGLang engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megarl.base.rollout_types import Group, Ordinal, Version
from megarl.data.order import Curriculum
from megarl.data.prompts import held_out_sets, train_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.evaluation.evaluate import evaluate_sets
from megarl.evaluation.scores import is_due, write_result
from megarl.generator.engine_state import PRESENT, Engine, EngineState
from megarl.generator.fleet import Fleet, watch_returns
from megarl.generator.seeds import seed_of
from megarl.messaging.link import Hub
from megarl.messaging.messages import EngineRow, FleetAnswer, FleetCall, ProbeReady
from megarl.messaging.rendezvous import Rendezvous, note_departure
from megarl.messaging.waiting import Background, Pulse
from megarl.observe.samples import FailuresWriter
from megarl.observe.status import StatusBoard, TraceWriter
from megarl.plan.resolve import RunPlan
from megarl.plan.topologies import at_once, run_ahead
from megarl.roles.opening import open_scorers, open_served, open_teachers
from megarl.rollouts.channel import RolloutsSender, judged
from megarl.rollouts.rollout import engine_client, open_fleet, open_rollouts, train_sampling
from megarl.rollouts.stream import Admission, RolloutStream

EVERY_S = 0.5
LOOK_S = 0.5
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
    fixed: Callable[[], str] = str  # returns why engines can neither join nor leave
    curr_step: int = 0
    # never set: the trainer's checkpoint has everything, so the launcher may kill this process
    stopped: bool = False
    background: Background = field(default_factory=Background)
    # beats when the version or the number of sent groups has changed
    pulse: Pulse = field(default_factory=Pulse)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _resources: AsyncExitStack = field(default_factory=AsyncExitStack)
    # by engine: tokens sampled up to the last batch
    _tokens: list[int] = field(default_factory=list)

    def init(self) -> None:
        config = self.plan.config
        self.status = StatusBoard(Path(config.run_dir), "generator.0").for_work()
        self.trace = TraceWriter(Path(config.run_dir), "generator.0")
        self.tokenizer = load_tokenizer(config.model)
        self.prompts = train_prompts(config, self.tokenizer, self.plan.spec)
        self.held_out = held_out_sets(config, self.tokenizer, self.plan.spec)
        self.sampling = train_sampling(self.plan, self.tokenizer)
        self.curr_step = self.rendezvous.start_step
        elastic = config.generator.on_failure != "fail"
        with self.status.waiting("the engines", "start-up"):
            self.fleet = self.run(open_fleet(self.plan, self.rendezvous, self._resources, elastic))
            served_fleets = self.run(
                open_served(self.plan, self.rendezvous, self._resources, elastic)
            )
        logs = Path(config.run_dir) / "logs"
        restarted = config.generator.on_failure == "restart"
        for fleet in (self.fleet, *served_fleets.values()):
            self.start(
                watch_returns(fleet, logs, restarted, config.generator.startup_timeout_s),
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
        groups = self.plan.groups
        places = config.async_.max_in_flight or config.rollout.prompts_per_step
        return max(1, ceil(places * at_once(groups, self.fleet.sizes) / at_once(groups)))

    async def _follow_fleet(self) -> None:
        while True:
            places = self._places()
            self.stream.put_places(places)
            await self.fleet.pulse.until(lambda: self._places() != places)

    async def _roll_out(self, ordinal: Ordinal) -> Group:
        return await self.rollouts_of.training(
            self.prompts[ordinal], self.sampling, self.plan.config.rollout.n
        )

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
        groups = []
        for number, serving in enumerate(self.fleet.counts(self.fleet.serving)):
            if serving:
                groups.append(number)
        sampling = msgspec.structs.replace(
            sampling, seed=seed_of(self.plan.config.seed, "probe", self.version)
        )
        requests = []
        for group in groups:
            for ordinal in range(PROBE_PROMPTS):
                requests.append((group, self.prompts[ordinal]))
        prompts = [prompt for _, prompt in requests]
        answers = asyncio.gather(
            *(
                self.fleet.generate(prompt.token_ids, sampling.of_sample(prompt.ordinal), 1, group)
                for group, prompt in requests
            )
        )
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
        if config.eval.engines or not (self.held_out and is_due(config, version)):
            return
        with self.trace.span(f"evaluate version {version}", track="weights"):
            result = await evaluate_sets(
                self.plan,
                self.rollouts_of.held_out,
                self.held_out,
                self.tokenizer,
                self.fleet.sizes,
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


async def show_engines(fleet: Fleet, run_dir: Path, trace: TraceWriter) -> None:
    """Updates the engines' lines in the live display and in the trace, until its task is cancelled.
    The generator does it, since engines know nothing about the run.

    Within half a second, an engine's track shows that it is lost, joins or leaves. When it serves
    again, the track shows how long it was away.
    """
    boards: dict[str, StatusBoard] = {}  # track -> its line
    away_since: dict[str, float] = {}
    gone_engines: set[str] = set()
    while True:
        for engine in fleet.engines:
            track = f"{fleet.name}.{engine.number}"
            if track not in boards:
                boards[track] = StatusBoard(run_dir, track)
            text = fleet.describe(engine)
            if text != boards[track].text:
                boards[track].set(text)
            now = time.perf_counter()
            if engine.is_down and track not in away_since:
                away_since[track] = now
                joins = engine.state is EngineState.STARTING
                trace.mark("joins" if joins else "lost", track, why=engine.reason)
            elif engine.is_serving and track in away_since:
                trace.add("away", away_since.pop(track), now, track)
            elif engine.state is EngineState.LEFT and track not in gone_engines:
                gone_engines.add(track)
                away_since.pop(track, None)
                trace.mark("left", track, why=engine.reason)
        await asyncio.sleep(EVERY_S)


class CallRefused(ValueError):
    """The request cannot be granted."""


@dataclass
class FleetCalls:
    """Answers calls of `megarl engines`, by which engines join a running run and leave it.

    `fixed` returns the reason why engines can neither join nor leave; empty if they can.
    """

    plan: RunPlan
    rendezvous: Rendezvous
    link: Hub
    fleet: Fleet
    background: Background
    fixed: Callable[[], str]
    # engine that joined -> last sign of life of its launcher
    _last_calls: dict[int, float] = field(default_factory=dict)

    async def serve(self) -> None:
        """Runs until its task is cancelled."""
        while True:
            sender, call = await self.link.arrival(FleetCall, None, "calls of megarl engines")
            self.background.start(self._answer(sender, call), f"{call.do} for {sender}")

    async def _answer(self, sender: str, call: FleetCall) -> None:
        try:
            answer = FleetAnswer(call.do, self._rows(await self._done(call)))
        except CallRefused as refused:
            answer = FleetAnswer(call.do, error=str(refused))
        try:
            self.link.send(sender, answer)
        except RuntimeError as error:
            print(f"megarl engines has ended before it was answered: {error}", flush=True)

    async def _done(self, call: FleetCall) -> Iterable[int]:
        """Carries out the call.

        Returns the numbers of the engines concerned. Raises CallRefused.
        """
        if call.do == "list":
            return range(len(self.fleet.engines))
        if call.do == "here":
            self._last_calls |= dict.fromkeys(call.engines, time.monotonic())
            return call.engines
        if not self.fleet.elastic:
            raise CallRefused(
                "generator.on_failure=fail: must be restart or drop for engines to join and leave"
            )
        fixed = self.fixed()
        if fixed:
            raise CallRefused(f"{fixed}: engines can neither join nor leave")
        if call.do == "join":
            names = [group.name for group in self.fleet.groups]
            if call.group not in names:
                raise CallRefused(
                    f"{call.group or 'no group'}: must be one of the run's generator.groups, "
                    f"{', '.join(names)}"
                )
            group = names.index(call.group)
            numbers = []
            for url in call.urls:
                client = engine_client(self.plan, self.rendezvous, url)
                numbers.append(self.fleet.add(client, group).number)
            self._last_calls |= dict.fromkeys(numbers, time.monotonic())
            return numbers
        return await self._let_go(call)

    async def _let_go(self, call: FleetCall) -> list[int]:
        present = sorted(engine.number for engine in self.fleet.engines_in(*PRESENT))
        leaving = call.engines or present[::-1][: call.count]
        if not call.ends and (missing := sorted(set(leaving) - set(present))):
            raise CallRefused(
                f"engine {missing[0]}: there is none; there are {', '.join(map(str, present))}"
            )
        serving = {engine.number for engine in self.fleet.serving} or set(present)
        if serving <= set(leaving):
            raise CallRefused(
                "one engine at least must go on serving, and engine "
                f"{', '.join(map(str, sorted(serving)))} would be gone"
            )
        reason = "its launcher ends" if call.ends else "by command"
        timeout_s = self.plan.config.timeouts.weights_s
        engines = [self.fleet.engines[number] for number in leaving]
        await asyncio.gather(*(self.fleet.leave(engine, reason, timeout_s) for engine in engines))
        return list(leaving)

    def _rows(self, numbers: Iterable[int]) -> list[EngineRow]:
        rows = []
        for number in numbers:
            engine = self.fleet.engines[number]
            row = EngineRow(
                number=number,
                url=engine.url,
                text=self.fleet.describe(engine),
                serving=engine.is_serving,
                gone=engine.state is EngineState.LEFT,
                group=self.fleet.groups[engine.group].name,
            )
            rows.append(row)
        return rows

    async def watch(self) -> None:
        """Tells launchers which engines have left, and gives up lost engines that will not be
        restarted. Runs until cancelled.
        """
        noted_departures: set[Engine] = set()
        while True:
            for engine in self.fleet.down:
                reason = self._reason_to_give_up(engine)
                if reason:
                    await self.fleet.leave(engine, reason, 0)
            for engine in self.fleet.engines_in(EngineState.LEFT):
                if engine not in noted_departures:
                    folder = Path(self.rendezvous.key_file).parent
                    note_departure(folder, f"{self.fleet.name}.{engine.number}")
                    noted_departures.add(engine)
            await asyncio.sleep(LOOK_S)

    def _reason_to_give_up(self, engine: Engine) -> str:
        """Empty if the engine may still run again, or if it is of the run's own launchers."""
        last_call = self._last_calls.get(engine.number)
        if last_call is None:
            return ""
        if engine.state is EngineState.LOST and self.plan.config.generator.on_failure == "drop":
            return "it was lost"
        silence_s = self.plan.config.timeouts.silence_s
        if time.monotonic() - last_call > silence_s:
            return f"its launcher has given no sign of life for {silence_s:.0f} s"
        return ""
