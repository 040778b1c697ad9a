"""Both ends of the channel that brings weights to the engines that only evaluate (`eval.engines`).

It is a weights channel as the generator's is, with another schedule: the version that the run starts from, those that are due, and the
last. Training never waits for an evaluation: a version that is due while an earlier one is still being evaluated, or while no engine is
there, is turned down at once (`WeightsGrant.engines` 0), and noted as missed. Only the last version waits, after the last step and its
checkpoint: it is offered again as long as the answer is `later`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from megarl.generator.fleet import Fleet
from megarl.generator.returns import LOOK_UP_S
from megarl.messaging.messages import WeightsApplied, WeightsGrant
from megarl.messaging.rendezvous import EVALUATOR
from megarl.observe.evaluations import FAILED, SKIPPED
from megarl.plan.evaluation import is_due
from megarl.types import Version
from megarl.weight_sync.receiver import Taken, WeightsReceiver
from megarl.weight_sync.sender import SyncReport, WeightsExecutor, WeightsSender

RETURN_S = 5 * LOOK_UP_S  # for an engine that was restarted unnoticed, between two evaluations, to be found again
LATER_S = 20.0  # after which the offer of the last version is answered, if only by `later`


class EvaluatedExecutor(WeightsExecutor, Protocol):
    """The trainer's executor, as this channel uses it."""

    def put_evaluation_sync(self, report: SyncReport) -> None: ...


class EvaluationSender(WeightsSender):
    """Trainer → evaluator. `plan`: the evaluation's (plan.evaluation)."""

    receiver = EVALUATOR
    of = "evaluation "

    _ended: EvaluatedExecutor | None = None  # set once it holds the last version

    def send(self, executor: EvaluatedExecutor, again: bool = False) -> None:  # type: ignore[override]
        """Brings a version that is due, or the first of this start, unless it is turned down. The last one is left to `close`."""
        if executor.version == self._plan.config.max_steps:
            self._ended = executor
        elif self._transport is None or is_due(self._plan.config, executor.version):
            report = SyncReport()
            self._link.drain(WeightsApplied)
            self._bring(executor, report)
            executor.put_evaluation_sync(report)

    def close(self) -> None:
        """Brings the last version, once nothing is being evaluated any more."""
        if self._ended is not None:
            self._link.drain(WeightsApplied)
            while (grant := self._bring(self._ended, SyncReport())) is not None and grant.later:
                pass
            super().close()


class Evaluator(Protocol):
    """What drives the engines, as the receiving end uses it. Its fleet's pulse beats when an evaluation ends, too."""

    fleet: Fleet
    evaluating: Version | None
    gone: str  # why there will be no engine any more; empty while there may be

    @property
    def version(self) -> Version: ...

    def begin(self, version: Version, taken: Taken) -> None: ...

    def miss(self, version: Version, what: str, why: str) -> None: ...


class EvaluationReceiver(WeightsReceiver):
    """Trainer → evaluator, in the evaluator's only process."""

    async def take_all(self, evaluator: Evaluator) -> None:
        """Takes what is offered, and begins to evaluate it, until the run's last version is taken or missed."""
        last, settled = self._plan.config.max_steps, -1
        while settled < last:
            version = (await self._offers.next(evaluator.version)).version
            obstacle = await self._bring(evaluator, version, waits=version == last)
            later = obstacle is not None and version == last and not evaluator.gone
            if obstacle is not None:
                await self._tell(WeightsGrant(version, engines=0, later=later))
            if obstacle is not None and not later:
                evaluator.miss(version, *obstacle)
            settled = settled if later else version

    async def _bring(self, evaluator: Evaluator, version: Version, waits: bool) -> tuple[str, str] | None:
        """Brings `version` into all engines that are there, unless something is in the way: returns what becomes of its evaluation, and
        why. `waits`: for a while, until nothing is."""
        fleet, serving = evaluator.fleet, evaluator.version
        if not self._hosts:
            self._hosts = await self._meet_trainers()
        while (obstacle := await self._obstacle(evaluator, waits)) is None:
            await fleet.hold(self._plan.config.timeouts.weights_s)
            session = await self._sessions.open(fleet, self._hosts, serving, version)
            if session is not None:
                taken = await self._write(fleet, session)
                fleet.release(version)
                await self._applied(fleet, version, taken)
                evaluator.begin(version, taken)
                return None
            fleet.release(serving)
            self._over(fleet)
        return obstacle

    async def _obstacle(self, evaluator: Evaluator, waits: bool) -> tuple[str, str] | None:
        fleet, most_s = evaluator.fleet, self._plan.config.timeouts.rollouts_s / 2
        patience_s = LATER_S if waits else RETURN_S if evaluator.evaluating is None else 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(patience_s, most_s)):
                await fleet.pulse.until(lambda: bool(evaluator.gone or (fleet.members and evaluator.evaluating is None)))
        if evaluator.evaluating is not None:
            return SKIPPED, f"version {evaluator.evaluating} was still being evaluated"
        if not fleet.members:
            return FAILED, evaluator.gone or f"no engine was there: {'; '.join(fleet.lost.values())}"
        if self.fixed and (fleet.lost or fleet.returned):
            return FAILED, f"an engine was lost, and {self.fixed}"
        return None
