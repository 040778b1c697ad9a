"""Update sessions with the engines that are alive. The way to their memory stays open until a different set of engines takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.generator.client import EngineUnreachable
from megarl.generator.fleet import Fleet
from megarl.messaging.host import Host
from megarl.messaging.link import Hub
from megarl.messaging.messages import WeightsGrant
from megarl.plan.resolve import RunPlan
from megarl.reshard.layout import Layout
from megarl.types import Version
from megarl.weight_sync.common import weights_map
from megarl.weight_sync.opening import Opened, open_engines
from megarl.weight_sync.update import WeightUpdate
from megarl.weight_sync.workers import Workers, check_parallelism, connect, settle_layout, watch


@dataclass(frozen=True)
class Session:
    """Paused engines whose memory is open to be written."""

    members: list[int]  # indices of the engines in the fleet
    update: WeightUpdate
    opened: Opened
    grant: WeightsGrant  # the same for every trainer rank
    endpoints: list[list[str]]  # by trainer rank, to go with the grant; empty as long as they do not change


class EngineSessions:
    """`source` is the trainer's layout. The engines' workers answer over `link`, with the key in `key_file`."""

    def __init__(self, plan: RunPlan, source: Layout, link: Hub, key_file: str):
        self._plan, self._link, self._key_file = plan, link, key_file
        self.map = weights_map(plan, source)  # to all engines
        self._workers: Workers | None = None
        self._opened: Opened | None = None
        self._members: list[int] = []  # the engines whose memory is open

    async def open(
        self, fleet: Fleet, trainers: Sequence[Host], serving: Version, version: Version, joining: bool = False, delta: bool = False
    ) -> Session | None:
        """Opens a session to write `version` into all members of the fleet, or only into those that have come back (`joining`). Returns
        None when there are none.

        `serving` is the version that the engines hold by now (-1: none of the run's yet), `trainers` says where each trainer rank runs.
        `delta`: the trainer ranks may write only what has changed since `serving`, as long as the engines' memory need not be opened anew:
        then all of them hold that version.

        An engine that turns out to be lost is left out. Any other error is raised, and the engines are not used any more.
        """
        while True:
            await self._notice_restarts(fleet, serving)
            members = sorted(fleet.returned) if joining else fleet.members
            if not members:
                return None
            known = members == self._members and not fleet.returned  # an engine that has come back is a new process
            if not known:
                self._workers = self._workers_of(members, fleet)
            workers = self._workers
            assert workers is not None
            workers.may_lose = False
            session = WeightUpdate(workers, version, in_place=self._plan.config.async_.partial_rollout == "in_flight")
            try:
                await session.open(serving=serving if known or self._opened is None else None)
                if not known:
                    self._opened = await self._connect(workers, trainers, len(members))
            except Exception as error:
                if not (fleet.elastic and isinstance(error, EngineUnreachable)):
                    await session.abandon(str(error))
                    raise
                await session.cancel()
                self._members = []
                fleet.lose(error)
            else:
                assert self._opened is not None
                self._members = members
                opened, endpoints = self._opened, [[] for _ in trainers]
                workers.may_lose = fleet.elastic and opened.one_sided
                grant = WeightsGrant(version, [], len(members), delta=delta)
                if not known:
                    grant = WeightsGrant(version, [], len(members), opened.relay, opened.map.plan_hash)
                    endpoints = [opened.endpoints_of(rank) for rank in range(len(trainers))]
                return Session(members, session, opened, grant, endpoints)

    async def _notice_restarts(self, fleet: Fleet, serving: Version) -> None:
        """Counts an engine as lost if it was restarted while it had no requests: it no longer has the weights."""
        for index in sorted(fleet.serving) if fleet.elastic and serving >= 0 else ():
            try:
                if await fleet.engines[index].version(self._plan.config.timeouts.weights_s) == -1:
                    fleet.lose(EngineUnreachable(fleet.engines[index].url, "it was started again"))
            except EngineUnreachable as error:
                fleet.lose(error)

    def _workers_of(self, members: list[int], fleet: Fleet) -> Workers:
        """The workers of `members`. Raises RuntimeError if the transports in use cannot be opened again for a different set of engines."""
        if self._opened is not None and not self._opened.one_sided:
            ways, lost = ", ".join(sorted(self._opened.kinds)), "; ".join(fleet.lost.values()) or "an engine has come back"
            raise RuntimeError(f"weights go by {ways}, which cannot go on with engines {members} alone: {lost}")
        clients = [fleet.engines[index] for index in members]
        return Workers(clients, self._plan.config.generator.tp, self._link, self._plan.config.timeouts.weights_s)

    async def _connect(self, workers: Workers, trainers: Sequence[Host], engines: int) -> Opened:
        """Compares the live engines with the map's destination layout, then opens their parameters to be written."""
        every = self._plan.generator_topology.engines
        map = self.map if engines == every else weights_map(self._plan, self.map.source, engines)
        await check_parallelism(workers, self._plan.generator_topology)
        hosts = await connect(workers, self._key_file)
        await settle_layout(workers, map.destination)
        if self._plan.config.weights.audited:
            await watch(workers)
        return await open_engines(workers, self._plan.config.weights, map, trainers, hosts)
