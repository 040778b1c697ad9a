"""Update sessions with the live engines.

Their memory stays open until a different set of engines takes part.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.base.rollout_types import Version
from megarl.config.errors import ConfigError
from megarl.config.schema import STRICT
from megarl.generator.client import EngineUnreachable
from megarl.generator.engine_state import Engine, EngineState
from megarl.generator.fleet import Fleet
from megarl.messaging.host import Host
from megarl.messaging.link import Hub
from megarl.messaging.messages import WeightsGrant
from megarl.messaging.rendezvous import GENERATOR
from megarl.plan.resolve import RunPlan
from megarl.reshard.layout import Layout
from megarl.reshard.map import ReshardMap
from megarl.weight_sync.content import strategy_of, weights_map
from megarl.weight_sync.opening import OpenedEngines, open_engines
from megarl.weight_sync.transports.choice import (
    transport_class,
    transport_pairs,
)
from megarl.weight_sync.updates import WeightUpdate
from megarl.weight_sync.workers import Workers, check_parallelism, connect, settle_layout, watch


@dataclass(frozen=True)
class Session:
    """Paused engines whose memory is open for writing."""

    members: Sequence[Engine]
    update: WeightUpdate
    opened: OpenedEngines
    grant: WeightsGrant  # the same for every trainer rank
    opens: bool  # whether the grant must carry endpoints, since they have changed


class EngineSessions:
    """`source` is the trainer's layout.

    The engines' workers answer over `link`, with the key in `key_file`.
    """

    def __init__(self, plan: RunPlan, source: Layout, link: Hub, key_file: str):
        self._plan = plan
        self._link = link
        self._key_file = key_file
        self.map = weights_map(plan, source)  # to all engines
        self._partial_update = strategy_of(
            plan
        ).generator_update  # the class of updates with less than all weights
        self._workers: Workers | None = None
        self._opened: OpenedEngines | None = None
        self._members: Sequence[Engine] = ()  # the engines whose memory is open

    async def open(
        self,
        fleet: Fleet,
        trainers: Sequence[Host],
        serving: Version,
        version: Version,
        catching_up: bool = False,
        delta: bool = False,
    ) -> Session | None:
        """Opens a session to write `version` into all members of the fleet, or with `catching_up`
        only into those that lack the current weights. None if there are none.

        `serving`: the current version in the engines (-1: none of the run's). `trainers`: the hosts
        of the trainer ranks. `delta`: the trainer ranks may write only changes since `serving`, or
        only adapters. They can do so if no engine's memory must be opened again, since all engines
        then have that version.

        An engine that turns out to be lost is left out. Any other error is raised, and the engines
        are no longer used.
        """
        while True:
            if serving >= 0:
                await notice_restarts(fleet, self._plan.config.timeouts.weights_s)
            await self._try_joining(fleet, fleet.engines_in(EngineState.JOINING), trainers)
            members = fleet.without_weights if catching_up else fleet.members
            if not members:
                return None
            # an engine that has come back is a new process
            memory_is_open = members == self._members and not fleet.without_weights
            if not memory_is_open:
                self._workers = self._workers_of(members, fleet)
            workers = self._workers
            assert workers is not None
            workers.may_lose = False
            fleet.updating = members
            update_class = self._partial_update if delta and memory_is_open else WeightUpdate
            update = update_class(
                workers, version, in_place=self._plan.config.async_.partial_rollout == "in_flight"
            )
            try:
                await update.open(
                    serving=serving if memory_is_open or self._opened is None else None
                )
                if not memory_is_open:
                    self._opened = await self._connect(
                        workers, trainers, self._plan_of(members, fleet)
                    )
            except Exception as error:
                if not (fleet.elastic and isinstance(error, EngineUnreachable)):
                    await update.abandon(str(error))
                    raise
                await update.cancel()
                self._members = ()
                fleet.lose(error)
            else:
                assert self._opened is not None
                self._members = members
                opened = self._opened
                workers.may_lose = fleet.elastic and opened.one_sided
                grant = WeightsGrant(version, engines=fleet.counts(members), delta=delta)
                if not memory_is_open:
                    grant = WeightsGrant(
                        version, b"", fleet.counts(members), opened.relay, opened.map.plan_hash
                    )
                return Session(members, update, opened, grant, opens=not memory_is_open)

    async def look_again(self, fleet: Fleet, version: Version) -> list[int]:
        """Compares the memory of all engines that serve `version` with the findings of the last
        audit. Returns the numbers of these engines, without those lost meanwhile. Raises AuditError.

        Connects to all of them anew, since those that came back were opened in separate sessions.
        """
        await notice_restarts(fleet, self._plan.config.timeouts.weights_s)
        members = fleet.serving
        fleet.updating = members
        if members:
            workers = self._workers_for(members, fleet)
            workers.may_lose = fleet.elastic
            session = WeightUpdate(workers, version, in_place=True)
            await session.open(serving=version)
            await connect(workers, self._key_file)
            await session.look_again()
            for error in workers.lost.values():
                fleet.lose(error)
        return [engine.number for engine in members if engine.is_serving]

    async def _try_joining(
        self, fleet: Fleet, joining: Sequence[Engine], trainers: Sequence[Host]
    ) -> None:
        """Tests joining engines before the other engines are paused for them.

        They must reach the hub, have the planned layout, and open their memory by a transport that
        lets engines come and go. Engines that fail must leave; the run goes on.
        """
        if not joining:
            return
        weights = self._plan.config.weights
        workers = self._workers_for(joining, fleet)
        trial = WeightUpdate(workers, -1)
        fleet.updating = joining
        try:
            await trial.open(serving=-1)
            plan = self._plan_of(joining, fleet)
            map = weights_map(plan, self.map.source)
            hosts = await self._check(workers, map, plan)
            refusal = self.fixed or _two_sided(
                transport_pairs(weights.transport, trainers, hosts).kinds
            )
            if refusal:
                raise ConfigError(refusal)
            await open_engines(workers, weights, map, trainers, hosts)
        except (RuntimeError, TimeoutError, ConfigError) as error:
            fleet.updating = ()
            if len(joining) > 1:
                with contextlib.suppress(TimeoutError):  # `leave` reports this itself
                    await trial.cancel()
                for engine in joining:
                    await self._try_joining(fleet, [engine], trainers)
            elif isinstance(error, EngineUnreachable):
                fleet.lose(error)
            else:
                await fleet.leave(
                    joining[0], f"it cannot join: {error}", self._plan.config.timeouts.weights_s
                )
        else:
            await trial.cancel()
            fleet.updating = ()

    @property
    def fixed(self) -> str:
        """Why the set of engines cannot change; empty if it can."""
        if self._opened is None:
            return ""
        return _two_sided(self._opened.kinds)

    def _workers_of(self, members: Sequence[Engine], fleet: Fleet) -> Workers:
        """The workers of `members`.

        Raises RuntimeError if the transports in use cannot be opened again for a different set of
        engines.
        """
        if self.fixed:
            reasons = fleet.reasons or "an engine has come back"
            numbers = [engine.number for engine in members]
            raise RuntimeError(
                f"{self.fixed}, so the run cannot go on with engines {numbers} alone: {reasons}"
            )
        return self._workers_for(members, fleet)

    def _workers_for(self, members: Sequence[Engine], fleet: Fleet) -> Workers:
        """The workers of `members`, in the order of their ranks."""
        clients = [engine.client for engine in members]
        tp = [topology.tp for topology in self._plan_of(members, fleet).topologies]
        return Workers(clients, tp, self._link, self._plan.config.timeouts.weights_s)

    def _plan_of(self, members: Sequence[Engine], fleet: Fleet) -> RunPlan:
        return self._plan.with_engines(fleet.counts(members))

    async def _connect(
        self, workers: Workers, trainers: Sequence[Host], plan: RunPlan
    ) -> OpenedEngines:
        """Compares the live engines, which are those of `plan`, with the map's destination layout,
        then opens their parameters for writing.
        """
        map = self.map if plan.groups == self._plan.groups else weights_map(plan, self.map.source)
        hosts = await self._check(workers, map, plan)
        if self._plan.config.weights.audited:
            config = self._plan.config
            of_generator = self._opened is None and self._link.name == GENERATOR
            file = Path(config.run_dir) / "engine_memory.jsonl" if of_generator else None
            await watch(workers, config.weights.audit == STRICT, file)
        return await open_engines(workers, self._plan.config.weights, map, trainers, hosts)

    async def _check(self, workers: Workers, map: ReshardMap, plan: RunPlan) -> list[Host]:
        """Connects the workers, and compares the live engines with the map's destination.

        Returns the hosts of the generator ranks.
        """
        await check_parallelism(workers, plan.topologies)
        hosts = await connect(workers, self._key_file)
        await settle_layout(workers, map.destination)
        return hosts


async def notice_restarts(fleet: Fleet, timeout_s: float) -> None:
    """Counts an engine as lost if it was restarted while it had no requests, since it no longer has
    the run's weights.
    """
    engines = fleet.serving if fleet.elastic else []
    answers = await asyncio.gather(
        *(engine.client.version(timeout_s) for engine in engines), return_exceptions=True
    )
    for engine, answer in zip(engines, answers):
        if isinstance(answer, EngineUnreachable):
            fleet.lose(answer)
        elif isinstance(answer, BaseException):
            raise answer
        elif answer == -1:
            fleet.lose(EngineUnreachable(engine.url, "it was started again"))


def _two_sided(kinds: Iterable[str]) -> str:
    """A text that names the transports among `kinds` whose set of engines cannot change; empty if
    there are none.
    """
    ways = sorted({kind for kind in kinds if not transport_class(kind).one_sided})
    if ways:
        return f"weights go by {', '.join(ways)}, whose process groups cannot change"
    return ""
