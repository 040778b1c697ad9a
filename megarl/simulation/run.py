"""One simulated run: the generator's own executor, stream and fleet, a trainer's loop, weight
updates, failures and restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import math
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from megarl.algorithms.batches import step_times
from megarl.base.rollout_types import Batch, Group, Ordinal, Prompt, Sample, Version
from megarl.config.schema import MASK, RunConfig
from megarl.data.order import train_mixture
from megarl.estimate.estimate import estimate, generate_model, training_time, with_kv_caches
from megarl.estimate.memory import Workload, dropped_share, kv_room
from megarl.estimate.times import GenerateModel
from megarl.executors.generator import GeneratorExecutor
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import Completion, Sampling
from megarl.generator.engine_state import Engine
from megarl.generator.fleet import Fleet, watch_returns
from megarl.observe.metrics import quantiles
from megarl.plan.resolve import RunPlan
from megarl.plan.topologies import engine_groups, run_ahead
from megarl.rollouts.buffer import Ledger, RolloutBuffer
from megarl.rollouts.channel import Intake, RolloutsSender, batch_of, judged
from megarl.rollouts.rollout import RolloutClock, Rollouts, ScoringClock
from megarl.rollouts.stream import RolloutStream
from megarl.simulation.engines import SimulatedEngine, Speed, Work
from megarl.simulation.lengths import Draw, Lengths
from megarl.simulation.virtual import Deadlock, VirtualLoop, Wire
from megarl.weight_sync.sender import SyncReport

TURNS = 32  # parts of a training step on shared GPUs; engines work, or do not, for a whole part
UNITS = 256  # most units in the longest response, unless others are much shorter
HOUR_S = 3600.0
MAX_FUTILE_RESTARTS = 50  # after this many restarts without a new checkpoint, give up


@dataclass(frozen=True)
class Models:
    """Durations of engines, trainer and transfers, from the planner's model or from a measured
    run.
    """

    speed: Speed
    train_s: Callable[[Batch], float]  # of a step, including everything that overlaps with nothing
    write_s: float  # of an update, while the trainer waits
    # of an update's messages and calls, in addition to write_s, while engines are paused
    control_s: float
    grant_s: float = 0.0  # from the trainer's request until idle engines are paused
    checkpoint_s: float = 0.0  # to write a checkpoint
    # group -> speed, if engines differ; used instead of `speed`
    group_speeds: Mapping[str, Speed] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: RunPlan, unit: int) -> Models:
        """The models from the planner. Batches have lengths in units of `unit` tokens."""
        planned = estimate(plan.config, plan.spec)
        update_s = planned.sync_s if plan.config.weights.delta == "off" else planned.delta_sync_s
        speeds = {
            group.name: speed_of(generate_model(plan.config, plan.spec, group.settings))
            for group in engine_groups(with_kv_caches(plan.config, plan.spec).generator)
        }
        checkpoint_s = plan.config.plan.simulation.checkpoint_s
        if checkpoint_s is None:
            checkpoint_s = planned.checkpoint_s
        return cls(
            speed=next(iter(speeds.values())),
            train_s=partial(_train_s, plan, unit, planned.glue_s),
            write_s=update_s - planned.control_s,
            control_s=planned.control_s,
            checkpoint_s=checkpoint_s,
            group_speeds=speeds if len(speeds) > 1 else {},
        )


def speed_of(model: GenerateModel) -> Speed:
    @functools.cache
    def token_s(running: int, bucket: int) -> float:
        return model.decode_step(running, math.exp(bucket / 50)).total

    tokens = model.generator.kv_cache_tokens or kv_room(
        model.spec, model.generator, model.dtype, model.cluster.gpu
    )
    return Speed(
        # contexts to 1 %
        decode_s=lambda running, context: token_s(running, round(50 * math.log(context))),
        prefill_s=model.prefilled_s,
        cache_tokens=tokens,
        most_running=model.generator.max_concurrency,
    )


@dataclass(frozen=True)
class KnownLengths(Workload):
    """A batch whose lengths are known."""

    squares: float  # E[R^2]

    @functools.cached_property
    def mean_square(self) -> float:
        return self.squares

    @functools.cached_property
    def straggler(self) -> float:
        return self.max_response_tokens

    @classmethod
    def of_batch(cls, batch: Batch, unit: int) -> KnownLengths:
        lengths = unit * np.array([sample.tokens for sample in batch.samples], dtype=np.float64)
        prompt = unit * float(np.mean([group.prompt_tokens for group in batch.groups]))
        mean, longest, squares = map(float, (lengths.mean(), lengths.max(), np.mean(lengths**2)))
        return cls(len(lengths), len(batch.groups), prompt, mean, longest, squares)


def _train_s(plan: RunPlan, unit: int, glue_s: float, batch: Batch) -> float:
    work = KnownLengths.of_batch(batch, unit)
    return training_time(plan.config, plan.spec, plan.config.trainer, work).total + glue_s


@dataclass
class SimulationTotals:
    """Totals of a whole run over all its attempts."""

    rows: list[dict[str, Any]] = field(default_factory=list)  # as in metrics.jsonl
    # for each step: age in versions -> tokens trained on
    ages_of_steps: list[Counter[int]] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)  # of each step's samples, in tokens
    ordinals: list[list[Ordinal]] = field(default_factory=list)  # of each step's prompts
    busy_s: float = 0.0  # summed over all engines
    running_s: float = 0.0  # the same, summed over running requests
    sampled: int = 0  # tokens
    # mean length of responses to the first prompts, as many as the first half of the steps has
    expected_length: float = 1.0
    retracted: int = 0
    lost_s: float = 0.0  # time of work that failures undid, and of restarts
    engine_failures: int = 0
    trainer_failures: int = 0
    end_s: float = 0.0

    @property
    def ages(self) -> Counter[int]:
        return sum(self.ages_of_steps, Counter())

    @property
    def surviving_until_s(self) -> float:
        """The time at which the last step ended that no failure has undone."""
        return self.rows[-1]["wall_s"] if self.rows else 0.0


@dataclass(frozen=True)
class Failures:
    """The failures recorded in a real run, with their times.

    They replace plan.simulation.gpu_mtbf_h.
    """

    # (at_s, engine, seconds until it serves again)
    engines: tuple[tuple[float, int, float], ...] = ()
    trainer: tuple[tuple[float, float], ...] = ()  # (at_s, seconds until the run goes on)


class TrainerFailure(Exception):
    """One of the trainer's GPUs has failed."""

    def __init__(self, restart_s: float):
        super().__init__(restart_s)
        self.restart_s = restart_s


class BrokenGuarantee(RuntimeError):
    """The run's own code has broken one of its guarantees."""


class _Prompts:
    def __init__(self, config: RunConfig, units: int):
        self.sources = SimpleNamespace(mixture=train_mixture(config))
        self._units = units

    def __getitem__(self, ordinal: Ordinal) -> Prompt:
        return Prompt(ordinal, [ordinal] * self._units, "", "")


@dataclass
class SimulatedGenerator(GeneratorExecutor):
    """The generator's executor with simulated engines, environments and scores.

    Each of its tokens is a unit of several.
    """

    models: Models = field(kw_only=True)
    lengths: Draw = field(kw_only=True)
    unit: int = field(kw_only=True)

    def open(self) -> None:
        config = self.plan.config
        mode = self.plan.config.async_.partial_rollout
        self.settings = config.plan.simulation
        self.prompts: Any = _Prompts(config, math.ceil(config.plan.mean_prompt_tokens / self.unit))
        self.held_out = []
        self.sampling = Sampling(self._units(config.rollout.max_tokens))
        self.work: dict[int, Work] = {}
        self.engines = []
        for group in self.plan.groups:
            speed = self.models.group_speeds.get(group.name, self.models.speed)
            for number in group.numbers:
                self.engines.append(
                    SimulatedEngine(f"simulated.{number}", speed, self.unit, self.work)
                )
        chunk = None
        if mode == "resume":
            chunk = self._units(
                config.async_.chunk_tokens or max(1, config.rollout.max_tokens // 4)
            )
        clients: list[Any] = list(self.engines)
        self.fleet = Fleet(clients, mode, chunk, elastic=True, groups=self.plan.groups)
        self.clock = ScoringClock(self.loop.time)
        self.rollouts_of = Rollouts(self._generate, self._generate, self.clock)
        judge = partial(judged, config=config)
        self.stream = RolloutStream(
            self._admission(),
            self._roll_out,
            self.rollouts,
            self.background,
            self.pulse,
            judge,
            self.clock.waited_s,
            self.loop.time,
        )
        self.start(self.stream.run(config.timeouts.rendezvous_s), "rollout stream")
        self.start(self._follow_fleet(), "places for prompts in flight")
        forever = replace(config.generator, on_failure="restart", startup_timeout_s=math.inf)
        self.start(watch_returns(self.fleet, config.run_dir, forever), "lost engines")

    def _units(self, tokens: float) -> int:
        return max(1, round(tokens / self.unit))

    async def _generate(self, prompt: Prompt, sampling: Sampling, n: int) -> Group:
        drawn = in_units(self.lengths, prompt.ordinal, n, self.unit).tolist()
        clock = RolloutClock(self.clock)
        with clock.running():
            if self.settings.turns == 1:
                with clock.decoding():
                    completions = await self._response(
                        prompt.ordinal, prompt.token_ids, sampling, drawn, len(prompt.token_ids)
                    )
                samples = [
                    (completion.token_ids, completion.finish_reason) for completion in completions
                ]
            else:
                episodes = (
                    self._episode(prompt, sampling, prompt.ordinal * n + index, total, clock)
                    for index, total in enumerate(drawn)
                )
                samples = await asyncio.gather(*episodes)
            if self.settings.score_s:
                with clock.scoring():
                    await asyncio.sleep(
                        self._rng(prompt.ordinal, 1).exponential(self.settings.score_s, n).max()
                    )
        share = dropped_share(self.plan.config)
        dropped = bool(share) and self._rng(prompt.ordinal, 2).random() < share
        rewards = [float(not dropped and index % 2) for index in range(n)]
        # A token's id is the version that sampled it.
        group = Group(prompt, [])
        for (tokens, reason), reward in zip(samples, rewards):
            logprobs = array("f", bytes(4 * len(tokens)))
            group.samples.append(Sample(tokens, logprobs, tokens, "", reward, reason))
        return group

    def _rng(self, number: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng((self.plan.config.seed, number, purpose))

    async def _response(
        self, key: int, tokens: list[int], sampling: Sampling, totals: list[int], unread: int
    ) -> list[Completion]:
        self.work[key] = Work(len(tokens), totals, unread, sampling.max_tokens)
        try:
            return await self.fleet.generate(tokens, sampling, len(totals))
        finally:
            del self.work[key]

    async def _episode(
        self, prompt: Prompt, sampling: Sampling, key: int, total: int, clock: RolloutClock
    ) -> tuple[array[int], str]:
        """A response of several turns.

        Earlier turns are prefilled again only if the weights have changed.
        """
        rng = self._rng(key, 3)
        tokens = [key] * len(prompt.token_ids)
        sampled = array("i")
        read_under: Version | None = None
        turns = min(self.settings.turns, total)
        for turn in range(turns):
            part = total * (turn + 1) // turns - total * turn // turns
            turn_sampling = msgspec.structs.replace(sampling, max_tokens=part)
            unread = 0 if read_under == self.fleet.version else len(tokens)
            read_under = self.fleet.version
            with clock.decoding():
                [completion] = await self._response(key, tokens, turn_sampling, [part], unread)
            tokens = [*tokens, *completion.token_ids]
            sampled = sampled + completion.token_ids
            if turn + 1 < turns:
                await asyncio.sleep(rng.exponential(self.settings.tool_s))
        return sampled, "length" if total == sampling.max_tokens else "stop"


@dataclass
class Attempt:
    """The run from one start to its end or interruption."""

    plan: RunPlan
    models: Models
    lengths: Draw
    unit: int
    loop: VirtualLoop
    totals: SimulationTotals
    start: int
    ledger: Ledger
    rng: np.random.Generator
    tell: Tell
    follow: Follow
    failures: Failures | None

    def __post_init__(self) -> None:
        config = self.plan.config
        wire = Wire()
        nobody: Any = None  # an executor needs a launcher's addresses, which do not exist here
        link: Any = wire.generator  # takes the place of a Hub
        self.generator = SimulatedGenerator(
            self.plan,
            nobody,
            RolloutsSender(link),
            loop=self.loop,
            models=self.models,
            lengths=self.lengths,
            unit=self.unit,
        )
        self.generator.open()
        self.fleet = self.generator.fleet
        self.engines = self.generator.engines
        buffer = RolloutBuffer(
            config.rollout.prompts_per_step,
            config.async_.max_staleness,
            self.ledger,
            partial(judged, config=config),
            train_mixture(config),
            masks=config.async_.too_old == MASK,
        )
        self.intake = Intake(wire.trainer, buffer)
        self.wire = wire
        self.saved = self.start, self.ledger  # the last complete checkpoint
        self.trained = set(chain.from_iterable(self.totals.ordinals))
        self._finishing: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[tuple[int, Ledger]] | None = None
        self._pause_s = 0.0
        self._save_s = 0.0
        # engine -> time of its failure, while it does not serve again
        self._failed_at: dict[int, float] = {}

    def run(self) -> None:
        """Raises TrainerFailure, Deadlock, BrokenGuarantee."""
        self.generator.start(self._invite(), "engines that came back")
        self.generator.start(self._lose_engines(), "failures of engines")
        self.generator.start(self._lose_trainer(), "failures of trainer ranks")
        try:
            self.generator.run(self._train())
        except Deadlock as stuck:
            raise Deadlock(f"{stuck}: {self.generator.stream}; {self.intake.buffer}") from None
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.generator.close()
            self.loop.run_until_complete(self.fleet.close())
            self._tell_returns(sorted(self._failed_at))  # so that the timeline shows them
            for engine in self.engines:
                self.totals.busy_s += engine.busy_s
                self.totals.running_s += engine.running_s
                self.totals.retracted += engine.retracted
                if engine.sampled > engine.could_sample + 1:
                    raise BrokenGuarantee(
                        f"{engine.url} has sampled {engine.sampled} units, and had the time for "
                        f"{engine.could_sample:.1f}"
                    )
            self.totals.sampled += sum(self.fleet.sampled) * self.unit

    async def _train(self) -> None:
        config = self.plan.config
        sync = await self._update(self.start)
        ended = self.loop.time()
        for step in range(self.start, config.max_steps):
            request_s = self.loop.time()
            batch = await self._batch(step)
            start_s = self.loop.time()
            self._check(batch, step)
            await self._compute(self.models.train_s(batch))
            train_s = self.loop.time() - start_s
            await self._settled()
            self.tell("trainer.0", f"train step {step}", start_s, self.loop.time())
            self.tell("trainer.0", f"wait for batch {step}", request_s, start_s)
            now = self.loop.time()
            self._note(batch, now - ended, train_s, start_s - request_s, sync)
            self.follow(step + 1, config.max_steps)
            ended = now
            sync = await self._update(step + 1)
            await self._save(step + 1)
        await self._settled()

    async def _compute(self, alone_s: float) -> None:
        """Trains for as long as it takes alone.

        On shared GPUs it takes turns with engines while they work, so both need twice the time.
        """
        if not self.plan.config.cluster.share_gpus:
            await asyncio.sleep(alone_s)
            return
        for engine in self.engines:
            engine.slow_down(2.0)
        for _ in range(TURNS):
            await asyncio.sleep(
                alone_s / TURNS * (2 if any(engine.works for engine in self.engines) else 1)
            )
        for engine in self.engines:
            engine.slow_down(1.0)

    async def _batch(self, step: int) -> Batch:
        timeout_s = self.plan.config.timeouts.rollouts_s
        trainer = self.wire.trainer
        try:
            async with asyncio.timeout(timeout_s):
                batch = self.intake.look(step, self.loop.time())
                while batch is None:
                    known_messages = trainer.count
                    await trainer.arrived.until(
                        lambda: trainer.count != known_messages or bool(self.fleet.without_weights)
                    )
                    if self.fleet.without_weights:
                        await self._catch_up(step)
                    batch = self.intake.look(step, self.loop.time())
        except TimeoutError:
            raise Deadlock(
                f"trainer.0 waited {timeout_s:.0f} s for batch {step}; {self.intake.buffer}"
            ) from None
        return batch_of(batch[0])

    async def _update(self, version: Version) -> SyncReport:
        """Like a real update: engines pause as async.partial_rollout says, the trainer writes and
        goes on, then the engines go on.
        """
        await self._settled()
        request_s = self.loop.time()
        await asyncio.sleep(self.models.grant_s)
        if self.fleet.version is not None:
            await self.generator.hold()
        await self.fleet.pulse.until(lambda: bool(self.fleet.members))
        grant_s = self.loop.time()
        members = self.fleet.members
        for member in members:
            self.engines[member.number].pause()
        await asyncio.sleep(self.models.write_s)
        self.tell("trainer.0", f"wait for engines to take weights {version}", request_s, grant_s)
        self.tell("trainer.0", f"write weights {version}", grant_s, self.loop.time())
        self._finishing = asyncio.ensure_future(self._finish(version, grant_s, members))
        return SyncReport(grant_s - request_s, self.models.write_s)

    async def _settled(self) -> None:
        """Waits until the engines go on after the last update."""
        if self._finishing is not None:
            await self._finishing

    async def _finish(self, version: Version, grant_s: float, members: Sequence[Engine]) -> None:
        await asyncio.sleep(self.models.control_s)
        self._serve(version, members)
        self.generator.release(version)
        self._pause_s = self.loop.time() - grant_s
        self.tell(
            "generator.0", f"pause for weights {version}", grant_s, self.loop.time(), "weights"
        )

    def _serve(self, version: Version, members: Sequence[Engine]) -> None:
        up = []
        for member in members:
            engine = self.engines[member.number]
            if engine.up:
                engine.resume(
                    version, recompute=self.plan.config.async_.partial_rollout == "retract"
                )
                up.append(member)
            else:
                self.fleet.lose(EngineUnreachable(engine.url, f"engine {engine.url} has failed"))
        self.fleet.take_back(up, version)
        self._tell_returns([member.number for member in up])

    def _tell_returns(self, engines: list[int]) -> None:
        for index in engines:
            failed_at = self._failed_at.pop(index, None)
            if failed_at is not None:
                self.tell("generator.0", "away", failed_at, self.loop.time(), f"engine.{index}")

    async def _catch_up(self, version: Version) -> None:
        """Gives restarted engines the served weights while the trainer waits for a batch."""
        await self._settled()
        members = self.fleet.without_weights
        await asyncio.sleep(self.models.write_s + self.models.control_s)
        self._serve(version, members)

    async def _invite(self) -> None:
        while True:
            await self.fleet.pulse.until(lambda: bool(self.fleet.without_weights))
            self.wire.trainer.arrived.beat()
            await self.fleet.pulse.until(lambda: not self.fleet.without_weights)

    async def _save(self, step: int) -> None:
        """Like a real run (executors.saving): one checkpoint is written at a time, and counts from
        the end of a step on.
        """
        config = self.plan.config.checkpoint
        start_s = self.loop.time()
        if self._writing is not None and self._writing.done():
            self.saved = self._writing.result()
            self._writing = None
        if config.every and step % config.every == 0:
            if self._writing is not None:
                self.saved = await self._writing
            self.intake.take_in()
            self._writing = asyncio.ensure_future(
                self._write_checkpoint(step, self.intake.buffer.ledger())
            )
            if not config.beside:
                self.saved = await self._writing
                self._writing = None
        self._save_s = self.loop.time() - start_s

    async def _write_checkpoint(self, step: int, ledger: Ledger) -> tuple[int, Ledger]:
        await asyncio.sleep(self.models.checkpoint_s)
        return step, ledger

    async def _lose_engines(self) -> None:
        async for index, down_s in self._engine_failures():
            if self.engines[index].up:
                self.totals.engine_failures += 1
                self.engines[index].fail(down_s)
                now = self.loop.time()
                self._failed_at[index] = now
                self.tell(
                    "generator.0", "lost", now, now, f"engine.{index}", why="simulated failure"
                )

    async def _engine_failures(self) -> AsyncIterator[tuple[int, float]]:
        """Yields (engine, seconds until it serves again) when each failure happens."""
        settings = self.plan.config.plan.simulation
        sizes = np.array([topology.tp for topology in self.plan.topologies])
        if self.failures is not None:
            for at_s, index, down_s in self.failures.engines:
                if at_s >= self.loop.time():
                    await asyncio.sleep(at_s - self.loop.time())
                    yield index, down_s
            return
        while settings.gpu_mtbf_h is not None:
            await asyncio.sleep(self.rng.exponential(settings.gpu_mtbf_h * HOUR_S / sum(sizes)))
            if len(set(sizes)) == 1:
                engine = self.rng.integers(len(sizes))
            else:
                engine = self.rng.choice(len(sizes), p=np.array(sizes) / sum(sizes))
            yield int(engine), settings.engine_restart_s

    async def _lose_trainer(self) -> None:
        settings = self.plan.config.plan.simulation
        now = self.loop.time()
        if self.failures is not None:
            for at_s, restart_s in self.failures.trainer:
                if at_s > now:
                    await asyncio.sleep(at_s - now)
                    raise TrainerFailure(restart_s)
        elif settings.gpu_mtbf_h is not None:
            await asyncio.sleep(
                self.rng.exponential(
                    settings.gpu_mtbf_h * HOUR_S / self.plan.trainer_topology.world_size
                )
            )
            raise TrainerFailure(settings.restart_s)

    def _check(self, batch: Batch, step: int) -> None:
        """Checks the guarantees of a run: nothing is lost, repeated or too old.

        Raises BrokenGuarantee.
        """
        config = self.plan.config
        ordinals = [group.ordinal for group in batch.groups]
        group_sizes = {len(group.samples) for group in batch.groups}
        if len(ordinals) != config.rollout.prompts_per_step or group_sizes != {config.rollout.n}:
            raise BrokenGuarantee(f"step {step}: a batch of {len(ordinals)} groups")
        repeated = self.trained.intersection(ordinals)
        repeated = repeated or {ordinal for ordinal, n in Counter(ordinals).items() if n > 1}
        if repeated:
            raise BrokenGuarantee(
                f"step {step}: prompt {min(repeated)} is trained on a second time"
            )
        self.trained.update(ordinals)
        self.totals.ordinals.append(ordinals)
        versions = [version for sample in batch.samples for version, _ in sample.policy_versions]
        oldest = min(versions)
        most = config.async_.max_staleness
        if max(versions) > step or (most is not None and oldest < step - most):
            raise BrokenGuarantee(
                f"step {step}: has tokens of versions {oldest} to {max(versions)}; "
                f"async.max_staleness={most}"
            )
        admission = self.generator.stream.admission
        ahead = run_ahead(config.async_)
        version = max(self.start, self.generator.version)
        if (
            ahead is not None
            and admission.begun > (version + ahead + 1) * config.rollout.prompts_per_step
        ):
            raise BrokenGuarantee(
                f"step {step}: {admission.begun} prompts have begun under version {version}"
            )

    def _note(
        self, batch: Batch, step_s: float, train_s: float, batch_wait_s: float, sync: SyncReport
    ) -> None:
        totals = self.totals
        samples = batch.samples
        step = batch.step
        lengths = self.unit * np.array([sample.tokens for sample in samples])
        ages: Counter[int] = Counter()
        for sample in samples:
            for version, tokens in sample.policy_versions:
                ages[step - version] += tokens * self.unit
        totals.ages_of_steps.append(ages)
        totals.lengths.append(lengths)
        totals.rows.append(
            {
                "step": step,
                "wall_s": self.loop.time(),
                **step_times(
                    batch, step_s, train_s, batch_wait_s, sync.wait_s, sync.sync_s, self._pause_s
                ),
                "time/save_s": self._save_s,
                "tokens_per_s": float(lengths.sum()) / step_s,
                "samples_per_s": len(samples) / step_s,
                "response_tokens/mean": float(lengths.mean()),
                **quantiles("response_tokens", lengths.tolist()),
                "truncated_fraction": sum(sample.finish_reason == "length" for sample in samples)
                / len(samples),
                "staleness/mean": sum(age * tokens for age, tokens in ages.items()) / ages.total(),
                "staleness/max": float(max(ages)),
                "staleness/rejected": batch.rejected,
                "prompts/buffered": batch.buffered,
                "prompts/dropped": len(batch.dropped),
                "prompts/first": batch.groups[0].ordinal,
                "prompts/last": batch.groups[-1].ordinal,
                "weights/version": step + 1,
                "weights/engines": len(self.fleet.serving),
            }
        )


# (process, activity, began_s, ended_s, track, **details): an activity of a process, or an event
Tell = Callable[..., None]
Follow = Callable[[int, int], None]  # (steps done, steps in all)


def ignore(*event: Any, **details: Any) -> None:
    """Ignores the timeline or progress of a run."""


def simulate(
    plan: RunPlan,
    models: Callable[[RunPlan, int], Models] = Models.of,
    tell: Tell = ignore,
    lengths: Draw | None = None,
    follow: Follow = ignore,
    failures: Failures | None = None,
) -> SimulationTotals:
    """Simulates the run.

    `models`: called with the plan and the tokens of a unit. `lengths` and `failures`: None stands
    for what plan.simulation says.

    Raises Deadlock or BrokenGuarantee if the run's own code deadlocks or breaks a guarantee.
    """
    plan = with_simulation(plan)
    config = plan.config
    settings = plan.config.plan.simulation
    lengths = lengths or Lengths.of(
        Workload.of(config), settings, config.rollout.prompts_per_step, config.seed
    )
    unit = unit_of(config, lengths)
    durations = models(plan, unit)
    loop = VirtualLoop()
    totals = SimulationTotals()
    start = 0
    ledger = Ledger()
    futile_restarts = 0
    rng = np.random.default_rng((config.seed, 4))
    # hides the fleet's messages about engines
    with contextlib.redirect_stdout(io.StringIO()), contextlib.closing(loop):
        while True:
            attempt = Attempt(
                plan=plan,
                models=durations,
                lengths=lengths,
                unit=unit,
                loop=loop,
                totals=totals,
                start=start,
                ledger=ledger,
                rng=rng,
                tell=tell,
                follow=follow,
                failures=failures,
            )
            began_s = loop.time()
            try:
                attempt.run()
                break
            except TrainerFailure as interrupted:
                futile_restarts = futile_restarts + 1 if attempt.saved[0] == start else 0
                if futile_restarts == MAX_FUTILE_RESTARTS:
                    raise Deadlock(
                        f"{futile_restarts} restarts in a row got no further than the checkpoint "
                        f"of step {start}"
                    ) from None
                start, ledger = attempt.saved
                totals.trainer_failures += 1
                for records in (totals.rows, totals.lengths, totals.ages_of_steps, totals.ordinals):
                    del records[start:]
                totals.lost_s += (
                    loop.time() - max(began_s, totals.surviving_until_s) + interrupted.restart_s
                )
                now = loop.time()
                tell("launcher.0", "end", now, now, how="simulated failure of a trainer rank")
                loop.run_until_complete(asyncio.sleep(interrupted.restart_s))
                now = loop.time()
                tell("launcher.0", "start", now, now, step=start, max_steps=config.max_steps)
    totals.end_s = loop.time()
    totals.expected_length = _mean_length(lengths, config, unit)
    _check_all(plan, attempt)
    return totals


def unit_of(config: RunConfig, lengths: Draw) -> int:
    """The tokens in a unit.

    It is small enough that a turn of a mean response has 16 units, and a prompt or a chunk of a
    response 4.
    """
    rollout = config.rollout
    plan = config.plan
    means = []
    for ordinal in range(32):
        means.append(np.minimum(lengths(ordinal, rollout.n), lengths.longest).mean())
    mean = float(np.mean(means))
    finest = [
        rollout.max_tokens / UNITS,
        mean / plan.simulation.turns / 16,
        plan.mean_prompt_tokens / 4,
    ]
    if config.async_.partial_rollout == "resume" and config.async_.chunk_tokens:
        finest.append(config.async_.chunk_tokens / 4)
    return max(1, int(min(finest)))


def in_units(lengths: Draw, ordinal: Ordinal, n: int, unit: int) -> np.ndarray:
    """[n] lengths of a prompt's responses after the cut, rounded to units."""
    tokens = np.minimum(np.asarray(lengths(ordinal, n)), lengths.longest)
    return np.maximum(1, np.rint(tokens / unit)).astype(np.int64)


def _mean_length(lengths: Draw, config: RunConfig, unit: int) -> float:
    prompts = range(max(1, config.max_steps // 2) * config.rollout.prompts_per_step)
    return unit * float(
        np.mean([in_units(lengths, ordinal, config.rollout.n, unit).mean() for ordinal in prompts])
    )


def with_simulation(plan: RunPlan) -> RunPlan:
    """The plan with the settings of a simulated run."""
    config = plan.config
    steps = min(config.plan.simulation.steps, config.max_steps)
    data = replace(config.data, curriculum=None)
    return replace(plan, config=replace(config, max_steps=steps, data=data), steps=steps)


def _check_all(plan: RunPlan, attempt: Attempt) -> None:
    """Checks that every prompt of the run was trained on or dropped exactly once.

    Raises BrokenGuarantee.
    """
    attempt.intake.take_in()
    ledger = attempt.intake.buffer.ledger()
    prompts = plan.config.max_steps * plan.config.rollout.prompts_per_step
    trained = len(ledger.trained())
    if (
        trained != prompts
        or len(attempt.trained) != prompts
        or ledger.groups
        or ledger.consumed_beyond
    ):
        raise BrokenGuarantee(
            f"{trained} prompts were trained on, of {prompts}; {len(ledger.groups)} are left"
        )
