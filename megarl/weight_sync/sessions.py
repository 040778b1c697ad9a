"""Update sessions with the engines that there are: the way to their memory stays open, until others take part than before."""

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
from megarl.weight_sync.opening import Opened, open_engines
from megarl.weight_sync.sender import weights_map
from megarl.weight_sync.update import WeightUpdate
from megarl.weight_sync.workers import Workers, check_parallelism, connect, settle_layout, watch


@dataclass(frozen=True)
class Session:
    """Engines that stand still, open to be written to."""

    members: list[int]  # which engines of the fleet
    update: WeightUpdate
    opened: Opened
    grant: WeightsGrant  # what to tell every trainer rank
    endpoints: list[list[str]]  # by trainer rank, what to tell it beside that; empty while they stay what they are


class EngineSessions:
    """`source` is the trainer's layout, `link` where the engines' workers answer, with the key in `key_file`."""

    def __init__(self, plan: RunPlan, source: Layout, link: Hub, key_file: str):
        self._plan, self._link, self._key_file = plan, link, key_file
        self.map = weights_map(plan, source)  # to all engines
        self._workers: Workers | None = None
        self._opened: Opened | None = None
        self._members: list[int] = []  # to whom the way is open

    async def open(
        self, fleet: Fleet, trainers: Sequence[Host], serving: Version, version: Version, joining: bool = False
    ) -> Session | None:
        """For a write of `version`, with all engines that take part, or only those that are `joining`. None when there are none.

        `serving` is the version that the others hold by now (-1: none of ours yet), `trainers` where each trainer rank runs. An engine
        that is found to be lost is left out. Raises what else goes wrong, and the engines are used no more then.
        """
        while True:
            await self._notice_restarts(fleet, serving)
            members = sorted(fleet.returned) if joining else fleet.members
            if not members:
                return None
            known = members == self._members and not fleet.returned  # one that has come back is another process
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
                grant = WeightsGrant(version, [], len(members))
                if not known:
                    grant = WeightsGrant(version, [], len(members), opened.relay, opened.map.plan_hash)
                    endpoints = [opened.endpoints_of(rank) for rank in range(len(trainers))]
                return Session(members, session, opened, grant, endpoints)

    async def _notice_restarts(self, fleet: Fleet, serving: Version) -> None:
        """An engine that was started again since it last had a request to answer no longer has the weights."""
        for index in sorted(fleet.serving) if fleet.elastic and serving >= 0 else ():
            try:
                if await fleet.engines[index].version(self._plan.config.timeouts.weights_s) == -1:
                    fleet.lose(EngineUnreachable(fleet.engines[index].url, "it was started again"))
            except EngineUnreachable as error:
                fleet.lose(error)

    def _workers_of(self, members: list[int], fleet: Fleet) -> Workers:
        """Raises RuntimeError where the way that weights go by cannot be opened anew for other engines than before."""
        if self._opened is not None and not self._opened.one_sided:
            ways, lost = ", ".join(sorted(self._opened.kinds)), "; ".join(fleet.lost.values()) or "an engine has come back"
            raise RuntimeError(f"weights go by {ways}, which cannot go on with engines {members} alone: {lost}")
        clients = [fleet.engines[index] for index in members]
        return Workers(clients, self._plan.config.generator.tp, self._link, self._plan.config.timeouts.weights_s)

    async def _connect(self, workers: Workers, trainers: Sequence[Host], engines: int) -> Opened:
        """Compares the live engines with the map's destination layout, then makes their parameters writable."""
        every = self._plan.generator_topology.engines
        map = self.map if engines == every else weights_map(self._plan, self.map.source, engines)
        await check_parallelism(workers, self._plan.generator_topology)
        hosts = await connect(workers, self._key_file)
        await settle_layout(workers, map.destination)
        if self._plan.config.weights.audited:
            await watch(workers)
        return await open_engines(workers, self._plan.config.weights, map, trainers, hosts)
