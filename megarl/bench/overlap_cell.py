"""One cell of `megarl bench overlap`, run by two processes in which engines and trainer are
emulated by sleeps.

Real: the controller's loop, admission, rollout stream, fleet, buffer, both channels with their
messages over the run's link, and the generator executor. Emulated: the computations of engines and
trainer, and the writing of weights.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megarl.algorithms.batches import idle_samples_metrics, step_times
from megarl.base.geometry import TrainerTopology
from megarl.base.rollout_types import Batch, Group, Ordinal, Prompt, Sample, Version
from megarl.bench.emulated import PREFILL_SPEEDUP, PROMPT_TOKENS, EmulatedEngine, EmulatedLengths
from megarl.bench.gpu.measure import llama
from megarl.config.schema import (
    AsyncConfig,
    EvalConfig,
    ObserveConfig,
    RolloutConfig,
    RunConfig,
    TimeoutConfig,
)
from megarl.controller import Controller
from megarl.data.order import train_mixture
from megarl.executors.generator import GeneratorExecutor
from megarl.executors.idle_updates import IdleUpdates
from megarl.generator.completions import Completion, Sampling
from megarl.generator.fleet import Fleet
from megarl.messaging.link import Hub, Peer, RunKey
from megarl.messaging.messages import (
    ProbeReady,
    WeightsApplied,
    WeightsGrant,
    WeightsOffer,
    WeightsWritten,
)
from megarl.observe.status import StatusBoard, TraceWriter
from megarl.plan.resolve import RunPlan
from megarl.plan.weights import WeightsSource
from megarl.reshard.layout import Layout, trainer_layout
from megarl.rollouts.buffer import RolloutBuffer
from megarl.rollouts.channel import RolloutsReceiver, RolloutsSender
from megarl.rollouts.rollout import Rollouts
from megarl.rollouts.stream import RolloutStream
from megarl.weight_sync.receiver import InitialWeights, OfferedVersion, UpdateCost, WeightsReceiver
from megarl.weight_sync.sender import SyncReport, WeightsSender
from megarl.weight_sync.updates import Writes

FURTHER = 1_000_000  # more than the prompts of a cell


@dataclass(frozen=True)
class Cell:
    """Phase times and settings of one run.

    At full use, the engines decode the tokens of a mean step in `generate_s`.
    """

    name: str
    train_s: float
    generate_s: float
    write_s: float  # duration of a weight update, while the engines are paused
    lengths: EmulatedLengths
    async_: AsyncConfig
    steps: int
    run_dir: str
    engines: int
    slots: int = 8  # sequences that an engine decodes at a time
    prompts_per_step: int = 16
    n: int = 4
    timeout_s: float = 60.0

    @property
    def token_s(self) -> float:
        """Seconds per token of one sequence.

        An engine decodes as many sequences at a time as it has slots.
        """
        return (
            self.generate_s
            * self.engines
            * self.slots
            / (self.prompts_per_step * self.n * self.lengths.mean)
        )

    def plan(self) -> RunPlan:
        config = RunConfig(
            async_=self.async_,
            rollout=RolloutConfig(
                prompts_per_step=self.prompts_per_step, n=self.n, max_tokens=self.lengths.longest
            ),
            eval=EvalConfig(every=0),
            observe=ObserveConfig(probe_every=0),
            timeouts=TimeoutConfig(
                **dict.fromkeys(
                    ("rendezvous_s", "rollouts_s", "weights_s", "samples_s"), self.timeout_s
                )
            ),
            max_steps=self.steps,
            run_dir=self.run_dir,
        )
        return RunPlan(
            config,
            llama("toy"),  # any model: the channels need some map
            TrainerTopology(),
            self.steps,
            self.prompts_per_step * self.n,
            WeightsSource(""),
        )


@dataclass
class EmulatedPrompts:
    sources: Any  # an object with the mixture of sources

    def __getitem__(self, ordinal: Ordinal) -> Prompt:
        return Prompt(ordinal, [ordinal] * PROMPT_TOKENS, "", "")


@dataclass
class EmulatedGenerator(GeneratorExecutor):
    """The generator executor with emulated engines, and without tokenizer or rewards."""

    cell: Cell = field(kw_only=True)

    def init(self) -> None:
        cell = self.cell
        config = self.plan.config
        self.status = StatusBoard(Path(config.run_dir), "generator.0")
        self.trace = TraceWriter(Path(config.run_dir), "generator.0")
        self.prompts = EmulatedPrompts(SimpleNamespace(mixture=train_mixture(config)))
        self.held_out = []
        self.sampling = Sampling(config.rollout.max_tokens)
        prefill_s = cell.token_s / PREFILL_SPEEDUP
        names = [f"emulated.{index}" for index in range(cell.engines)]
        engines: list[Any] = [
            EmulatedEngine(name, cell.slots, cell.token_s, prefill_s, cell.lengths)
            for name in names
        ]
        mode = config.async_.partial_rollout
        self.engines = engines
        self.fleet = Fleet(engines, mode, config.async_.chunk_tokens if mode == "resume" else None)
        self.rollouts_of = Rollouts(self._generate, self._generate)
        self.stream = RolloutStream(
            self._admission(),
            self._roll_out,
            self.rollouts,
            self.background,
            self.pulse,
            further=self._further(),
        )
        self.start(self.stream.run(config.timeouts.rendezvous_s), "rollout stream")

    async def _generate(self, prompt: Prompt, sampling: Sampling, n: int) -> Group:
        return Group(
            prompt,
            list(map(_sample, await self.fleet.generate(prompt.token_ids, sampling, n))),
        )

    async def _roll_out_further(self, ordinal: Ordinal, number: int) -> Group:
        prompt = self.prompts[ordinal]
        # engines know a prompt's responses by its tokens
        tokens = [ordinal + FURTHER * (number + 1)] * PROMPT_TOKENS
        completions = await self.fleet.generate(tokens, self.sampling, 1)
        return Group(prompt, list(map(_sample, completions)))


def _sample(completion: Completion) -> Sample:
    return Sample(
        completion.token_ids,
        completion.logprobs,
        completion.versions,
        "",
        0.0,
        completion.finish_reason,
    )


@dataclass
class EmulatedTrainer:
    """A trainer of one rank that sleeps. `rows` has one entry per step."""

    plan: RunPlan
    cell: Cell
    rank: int = 0
    curr_step: int = 0
    device: torch.device = torch.device("cpu")
    rows: list[dict[str, Any]] = field(default_factory=list)
    stopped: bool = False
    idle: IdleUpdates | None = None

    def init(self) -> None:
        self.status = StatusBoard(self.cell.run_dir, "trainer.0")
        self.trace = TraceWriter(self.cell.run_dir, "trainer.0")
        self._step_ended = time.monotonic()

    @property
    def version(self) -> Version:
        return self.curr_step

    def set_step(self, step: int) -> None:
        self.status.set(f"step {step}")

    @property
    def replicas(self) -> list[list[int]]:
        return [[0]]

    def assign(self, batch: Batch) -> list[list[int]]:
        return [[*range(len(batch.samples))]]

    def put_batch(self, batch: Batch, waited_s: float) -> None:
        self.batch = batch
        self._batch_wait_s = waited_s

    def stop(self) -> None:
        self.stopped = True

    def put_sync(self, report: SyncReport, applied: Callable[[], WeightsApplied | None]) -> None:
        self._sync = report
        self._applied = applied

    def compare_probe(self, probe: ProbeReady) -> None:
        raise AssertionError("observe.probe_every is 0 here")

    @property
    def layout(self) -> Layout:
        return trainer_layout(
            self.plan.spec, self.plan.trainer_topology, self.plan.config.model.dtype
        )

    def get_model(self) -> dict[str, torch.Tensor]:
        return {}

    def step(self) -> None:
        started = time.monotonic()
        batch = self.batch
        with self.trace.span(f"train step {batch.step}"):
            time.sleep(self.cell.train_s)
        train_s = time.monotonic() - started
        if self.idle is not None:
            for _ in self.idle.passes(batch.step, lambda: 1.0):
                time.sleep(self.cell.train_s)
        self.curr_step += 1
        applied = self._applied()
        now = time.monotonic()
        assert applied is not None  # not None, since nothing stops this run
        step_s = now - self._step_ended
        self._step_ended = now
        samples = batch.samples
        self.rows.append(
            {
                "step": batch.step,
                **step_times(
                    batch,
                    step_s,
                    train_s,
                    self._batch_wait_s,
                    self._sync.wait_s,
                    self._sync.sync_s,
                    applied.pause_s,
                ),
                "ordinals": [group.ordinal for group in batch.groups],
                "lengths": [sample.tokens for sample in samples],
                "version/min": min(sample.min_version for sample in samples),
                "version/max": max(sample.max_version for sample in samples),
                "mixed": sum(sample.min_version < sample.max_version for sample in samples),
                "rejected": batch.rejected,
                "ages": _ages(batch),
                "updates": 1 + (self.idle.metrics["idle/updates"] if self.idle else 0),
                "samples": idle_samples_metrics(batch)["idle/samples"],
            }
        )

    def save_checkpoint(self) -> None:
        """Nothing to save."""

    def shutdown(self) -> None:
        self.status.set("done")
        self.trace.close()


def _ages(batch: Batch) -> Counter[int]:
    """Age in versions -> number of tokens."""
    ages: Counter[int] = Counter()
    for sample in batch.samples:
        for version, tokens in sample.policy_versions:
            ages[batch.step - version] += tokens
    return ages


class _NoTransport:
    def close(self) -> None:
        """Nothing is open."""


class _NoUpdates:
    """Offers every version, and has nothing to write."""

    compares = False
    transport = _NoTransport()

    def offer(self, version: Version, *_: Any) -> WeightsOffer:
        return WeightsOffer(version)


class EmulatedSender(WeightsSender):
    """The sending end; a sleep replaces the writes."""

    write_s = 0.0

    def _prepare(self, executor: Any) -> Any:
        return _NoUpdates()

    def _write(self, executor: Any, updates: Any, grant: WeightsGrant) -> int:
        time.sleep(self.write_s)
        self._link.send(WeightsWritten(grant.version, 0, self.write_s))
        return 0


class EmulatedReceiver(WeightsReceiver):
    """The receiving end. The emulated engines are paused while the trainer writes."""

    async def _update(self, executor: Any, offered: OfferedVersion) -> UpdateCost:
        version = offered.version
        started_s = time.perf_counter()
        for engine in executor.engines:
            engine.pause()
        for name in self._trainers:
            self._link.send(name, WeightsGrant(version))
        await Writes(
            self._link, self._trainers, version, self._plan.config.timeouts.weights_s
        ).done()
        for engine in executor.engines:
            await engine.resume(
                version, recompute=self._plan.config.async_.partial_rollout == "retract"
            )
        return UpdateCost((started_s, time.perf_counter()), 0, list(range(len(executor.engines))))

    async def look_again(self, executor: Any) -> None:
        """Does nothing, since emulated engines have no weights."""


def generate(cell: Cell, key: RunKey, address_to: Connection) -> None:
    """The generator's process in one cell. It sends its address through `address_to`."""
    plan = cell.plan()
    link = Hub("generator.0", key)
    address_to.send(link.address)
    source = trainer_layout(plan.spec, plan.trainer_topology, plan.config.model.dtype)
    weights = EmulatedReceiver(plan, source, link, key_file="")
    # without a launcher; an executor needs it only for the engines' addresses
    rendezvous: Any = None
    executor = EmulatedGenerator(plan, rendezvous, RolloutsSender(link), cell=cell)
    Controller(
        executor,
        incoming=[weights],
        outgoing=[],
        max_steps=cell.steps,
        initial=[InitialWeights(weights)],
    ).run()
    link.close()
    executor.loop.close()


def train(cell: Cell, key: RunKey, address: str) -> list[dict[str, Any]]:
    """The trainer's process in one cell. Returns its rows."""
    plan = cell.plan()
    link = Peer("trainer.0", key, address)
    weights = EmulatedSender(plan, link)
    weights.write_s = cell.write_s
    buffer = RolloutBuffer(cell.prompts_per_step, cell.async_.max_staleness)
    rollouts = RolloutsReceiver(link, cell.timeout_s, buffer)
    executor: Any = EmulatedTrainer(plan, cell)  # lacks parts of an executor that nothing here uses
    if cell.async_.idle == "updates":
        executor.idle = IdleUpdates(plan.config, 0.0, rollouts.awaits)
    Controller(executor, incoming=[rollouts], outgoing=[weights], max_steps=cell.steps).run()
    link.close()
    return executor.rows
