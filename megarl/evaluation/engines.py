"""Engines that only evaluate (`eval.engines`): the channel that brings them weights, and their
driver.

The channel is a weights channel like the generator's with another schedule: the version that the
run starts from, the versions that are due, and the last one. Training never waits for an
evaluation. If a version is due while an earlier one is still being evaluated, or while no engine is
there, it is refused at once (`WeightsGrant.engines` 0) and noted as missed. Only the last version
waits, after the last step and its checkpoint: it is offered again as long as the answer is `later`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import compress, repeat
from pathlib import Path
from typing import Any, Protocol

from megarl.base.rollout_types import Group, Prompt, Version
from megarl.data.prompts import HeldOutSet, held_out_sets
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.evaluation.evaluate import evaluate_sets
from megarl.evaluation.measures import Measures, open_measures
from megarl.evaluation.scores import BEGUN, FAILED, SKIPPED, is_due, note, write_result
from megarl.executors.engine_calls import show_engines
from megarl.generator.completions import EngineError, Sampling
from megarl.generator.fleet import LOOK_UP_S, Fleet, watch_returns
from megarl.messaging.messages import WeightsApplied, WeightsGrant
from megarl.messaging.rendezvous import EVALUATION, Rendezvous
from megarl.messaging.waiting import Background
from megarl.observe.samples import FailuresWriter
from megarl.observe.status import StatusBoard, TraceWriter
from megarl.plan.resolve import RunPlan
from megarl.roles.opening import open_scorers, open_served
from megarl.rollouts.rollout import Rollout, open_fleet, open_rollouts
from megarl.weight_sync.receiver import UpdateCost, WeightsReceiver
from megarl.weight_sync.sender import SyncReport, WeightsExecutor, WeightsSender
from megarl.weight_sync.sessions import notice_restarts

EVALUATOR = f"{EVALUATION.driver}.0"
# time to find an engine that was restarted unnoticed between two evaluations
RETURN_S = 5 * LOOK_UP_S
LATER_S = 20.0  # the offer of the last version is answered within this time, if only by `later`


class EvaluatedExecutor(WeightsExecutor, Protocol):
    """What this channel needs of the trainer's executor."""

    def put_metrics(self, metrics: Mapping[str, float]) -> None: ...


class EvaluationSender(WeightsSender):
    """The trainer's end. `plan`: the evaluation's plan (`evaluation_plan`)."""

    receiver = EVALUATOR
    purpose = "evaluation "

    _ended: EvaluatedExecutor | None = None  # the executor, once it has the last version

    def send(self, executor: EvaluatedExecutor, repeat: bool = False) -> None:  # type: ignore[override]
        """Sends a version that is due, or the first of this start, unless it is refused.

        `close` sends the last one.
        """
        if executor.version == self._plan.config.max_steps:
            self._ended = executor
        elif self._updates is None or is_due(self._plan.config, executor.version):
            report = SyncReport()
            self._link.drain(WeightsApplied)
            self._bring(executor, report)
            executor.put_metrics({"eval/sync_s": report.wait_s + report.sync_s})

    def close(self) -> None:
        """Sends the last version, once no evaluation is running."""
        if self._ended is not None:
            self._link.drain(WeightsApplied)
            while True:
                grant = self._bring(self._ended, SyncReport())
                if grant is None or not grant.later:
                    break
            super().close()


class Evaluator(Protocol):
    """What the receiving end needs of the engines' driver.

    The fleet's pulse also beats when an evaluation ends.
    """

    fleet: Fleet
    evaluating: Version | None
    no_engines_reason: str  # why there will be no more engines; empty while there may be

    @property
    def version(self) -> Version: ...

    def begin(self, version: Version, update: UpdateCost) -> None: ...

    def miss(self, version: Version, outcome: str, reason: str) -> None: ...


class EvaluationReceiver(WeightsReceiver):
    """The evaluator's end, in its only process."""

    async def take_all(self, evaluator: Evaluator) -> None:
        """Takes each version that is offered and starts its evaluation, until the run's last
        version is taken or missed.
        """
        last = self._plan.config.max_steps
        settled = -1
        while settled < last:
            version = (await self._offers.next(evaluator.version)).version
            obstacle = await self._bring(evaluator, version, waits=version == last)
            if obstacle is None:
                settled = version
                continue
            later = version == last and not evaluator.no_engines_reason
            await self._send_all(WeightsGrant(version, engines=(), later=later))
            if not later:
                outcome, reason = obstacle
                evaluator.miss(version, outcome, reason)
                settled = version

    async def _bring(
        self, evaluator: Evaluator, version: Version, waits: bool
    ) -> tuple[str, str] | None:
        """Brings `version` into all engines that are there.

        If something prevents that, returns the outcome of its evaluation, and the reason. `waits`:
        first waits for a while until nothing does.
        """
        fleet = evaluator.fleet
        serving = evaluator.version
        if not self._hosts:
            self._hosts = await self._meet_trainers()
        while True:
            obstacle = await self._obstacle(evaluator, waits)
            if obstacle is not None:
                return obstacle
            await fleet.hold(self._plan.config.timeouts.weights_s)
            session = await self._sessions.open(fleet, self._hosts, serving, version)
            if session is not None:
                update = await self._write(fleet, session)
                fleet.release(version)
                await self._applied(fleet, version, update)
                evaluator.begin(version, update)
                return None
            fleet.release(serving)
            self._end_update(fleet)

    async def _obstacle(self, evaluator: Evaluator, waits: bool) -> tuple[str, str] | None:
        fleet = evaluator.fleet
        patience_s = 0.0
        if waits:
            patience_s = LATER_S
        elif evaluator.evaluating is None:
            patience_s = RETURN_S

        def is_decided() -> bool:
            if evaluator.no_engines_reason:
                return True
            return bool(fleet.members) and evaluator.evaluating is None

        with contextlib.suppress(TimeoutError):
            limit_s = self._plan.config.timeouts.rollouts_s / 2
            async with asyncio.timeout(min(patience_s, limit_s)):
                await fleet.pulse.until(is_decided)
        if evaluator.evaluating is not None:
            return SKIPPED, f"version {evaluator.evaluating} was still being evaluated"
        if not fleet.members:
            return FAILED, evaluator.no_engines_reason or f"no engine was there: {fleet.reasons}"
        if self.fixed and (fleet.down or fleet.without_weights):
            return FAILED, f"an engine was lost, and {self.fixed}"
        return None


LOOK_S = 1.0


@dataclass
class EvaluationDriver:
    """Evaluates the weights in the engines, one version at a time while training goes on.

    An evaluation that loses all engines is noted as failed. Any other error ends the run.
    """

    plan: RunPlan  # the evaluation's plan (`evaluation_plan`)
    fleet: Fleet
    rollout: Rollout  # the rollout of held-out prompts
    sets: Sequence[HeldOutSet]
    tokenizer: Tokenizer
    measures: Measures
    trace: TraceWriter
    status: StatusBoard
    background: Background
    evaluating: Version | None = None
    no_engines_reason: str = ""  # why there will be no more engines

    @property
    def version(self) -> Version:
        return -1 if self.fleet.version is None else self.fleet.version

    def begin(self, version: Version, update: UpdateCost) -> None:
        """Called when the engines have `version` and no evaluation is running."""
        assert self.evaluating is None
        begin_s, end_s = update.pause
        self._record(
            f"evaluation weights {version}",
            begin_s,
            end_s,
            update.engines,
            bytes=update.bytes_written,
            audited=self.plan.config.weights.audited,
        )
        if is_due(self.plan.config, version):
            self.evaluating = version
            note(self.plan.config.run_dir, version, BEGUN)
            self.background.start(self._evaluate(version), f"evaluation of version {version}")

    def miss(self, version: Version, outcome: str, reason: str) -> None:
        """Notes that `version` has no scores, if it was due."""
        if is_due(self.plan.config, version):
            note(self.plan.config.run_dir, version, outcome, reason)
            result = outcome if outcome == FAILED else f"was {outcome}"
            print(f"the evaluation of version {version} {result}: {reason}", flush=True)

    async def _evaluate(self, version: Version) -> None:
        begin_s = time.perf_counter()
        engines = self.fleet.serving
        self.status.set(f"evaluating version {version}")
        wrong_versions: set[Version] = set()
        sets = evaluate_sets(
            self.plan,
            self._noting(version, wrong_versions),
            self.sets,
            self.tokenizer,
            self.fleet.places(engines),
            self.measures,
        )
        work: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(sets)
        if not await self.fleet.while_serving(work):
            await asyncio.wait({work})  # until it sends no more requests
            self.miss(version, FAILED, f"its engines were lost: {self.fleet.reasons}")
        elif wrong_versions:
            listed = ", ".join(map(str, sorted(wrong_versions)))
            reason = f"version {listed} has answered too: an engine was started again"
            self.miss(version, FAILED, reason)
        else:
            write_result(self.plan.config.run_dir, version, work.result())
        numbers = [engine.number for engine in engines]
        self._record(f"evaluate version {version}", begin_s, time.perf_counter(), numbers)
        self.status.set("waiting for the next version to evaluate")
        self.evaluating = None
        self.fleet.pulse.beat()

    def _noting(self, version: Version, wrong_versions: set[Version]) -> Rollout:
        """The rollout, which adds to `wrong_versions` all versions but `version` that have
        answered.
        """

        async def rollout(prompt: Prompt, sampling: Sampling, n: int) -> Group:
            group = await self.rollout(prompt, sampling, n)
            for sample in group.samples:
                versions = set(compress(sample.versions, sample.policy_mask or repeat(1)))
                wrong_versions.update(versions - {version})
            return group

        return rollout

    def _record(
        self, name: str, begin_s: float, end_s: float, engines: Sequence[int], **arguments: Any
    ) -> None:
        for number in engines:
            self.trace.add(name, begin_s, end_s, f"{self.fleet.name}.{number}", **arguments)

    async def watch_engines(self) -> None:
        """Waits for lost engines to come back, until none can."""
        config = self.plan.config
        try:
            await watch_returns(self.fleet, config.run_dir, config.generator)
        except EngineError as error:
            print(f"evaluation has stopped: {error}", flush=True)
            self.no_engines_reason = "no engine was there, and none will be"
            self.fleet.pulse.beat()

    async def watch_versions(self) -> None:
        """Notices engines that restart between two requests of an evaluation, and so would answer
        with the run's first weights.
        """
        while True:
            await self.fleet.pulse.until(lambda: self.evaluating is not None)
            with contextlib.suppress(TimeoutError):  # the launcher kills an engine that hangs
                await notice_restarts(self.fleet, self.plan.config.timeouts.weights_s)
            await asyncio.sleep(LOOK_S)

    async def all_done(self, receiver: EvaluationReceiver) -> None:
        """Returns when the run's last version is evaluated, or cannot be.

        Raises AuditError if an engine's memory has changed since.
        """
        await receiver.take_all(self)
        await self.fleet.pulse.until(lambda: self.evaluating is None)
        await receiver.look_again(self)


async def evaluate_versions(
    plan: RunPlan, rendezvous: Rendezvous, receiver: EvaluationReceiver
) -> None:
    """Evaluates the versions that are due, up to the run's last."""
    config = plan.config
    run_dir = Path(plan.config.run_dir)
    status = StatusBoard(run_dir, EVALUATOR).for_work()
    trace = TraceWriter(run_dir, EVALUATOR)
    tokenizer = load_tokenizer(config.model)
    background = Background()
    elastic = config.generator.on_failure != "fail"
    async with AsyncExitStack() as resources:
        failures = resources.enter_context(contextlib.closing(FailuresWriter(run_dir)))
        with status.waiting("the engines", "start-up"):
            fleet = await open_fleet(plan, rendezvous, resources, elastic, EVALUATION.prefix)
            served = await open_served(plan, rendezvous, resources, elastic)
        scorers = open_scorers(plan, served, tokenizer)
        logs = run_dir / "logs" / "evaluator"
        rollouts = await open_rollouts(
            plan,
            fleet,
            scorers,
            tokenizer,
            resources,
            training=False,
            logs=logs,
            tell=failures.tell,
        )
        sets = held_out_sets(config, tokenizer, plan.spec)
        driver = EvaluationDriver(
            plan=plan,
            fleet=fleet,
            rollout=rollouts.held_out,
            sets=sets,
            tokenizer=tokenizer,
            measures=await open_measures(plan, served, scorers, tokenizer, resources, logs),
            trace=trace,
            status=status,
            background=background,
        )
        resources.push_async_callback(background.close)
        background.start(driver.watch_engines(), f"lost engines of {fleet.name}")
        for role in served.values():
            returns = watch_returns(role, config.run_dir, config.generator)
            background.start(returns, f"lost engines of {role.name}")
        background.start(driver.watch_versions(), f"restarts of {fleet.name}")
        background.start(
            show_engines(fleet, run_dir, trace), f"status of the engines of {fleet.name}"
        )
        status.set("waiting for the first version")
        await background.beside(driver.all_done(receiver))
    status.set("done")
    trace.close()
