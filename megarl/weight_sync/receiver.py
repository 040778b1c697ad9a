"""The weights channel, receiving end: the generator lets the trainer ranks write into its engines.

See megarl.weight_sync.sender for one update seen from both ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from megarl.base.rollout_types import Version
from megarl.config.schema import STRICT
from megarl.generator.fleet import Fleet
from megarl.messaging.host import Host
from megarl.messaging.link import Hub
from megarl.messaging.messages import (
    Hello,
    LookAgain,
    LookedAgain,
    ProbeReady,
    WeightsApplied,
    WeightsGrant,
    WeightsOffer,
    WeightsWanted,
)
from megarl.messaging.waiting import Pulse
from megarl.observe.status import StatusBoard, TraceWriter
from megarl.plan.resolve import RunPlan
from megarl.plan.topologies import run_ahead
from megarl.reshard.layout import Layout
from megarl.weight_sync.audit import AuditError
from megarl.weight_sync.content import is_probe_version
from megarl.weight_sync.sessions import EngineSessions, Session
from megarl.weight_sync.updates import Pause, Writes
from megarl.weight_sync.writing import changed_fraction, worth_it


class ServedExecutor(Protocol):
    """A driver of engines."""

    fleet: Fleet
    trace: TraceWriter

    @property
    def version(self) -> Version:
        """The version of the weights in the engines; -1 before the run's first."""
        ...


class ServingExecutor(ServedExecutor, Protocol):
    """What the receiving end needs of the generator's executor."""

    curr_step: int
    status: StatusBoard
    pulse: Pulse  # beats when the version changes, or another condition of `wait_until`

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None: ...

    def wait_until(self, holds: Callable[[], bool], awaited: str) -> None: ...

    async def hold(self) -> None: ...

    def release(self, version: Version) -> None: ...

    async def probe(self) -> ProbeReady: ...

    async def evaluate(self) -> None: ...


@dataclass(frozen=True)
class UpdateCost:
    """The cost of an update to the engines."""

    pause: Pause
    bytes_written: int  # by all trainer ranks together
    engines: list[int]  # numbers of the engines that took part
    high_water_bytes: int = 0  # most memory that one of their workers has held; 0 without an audit


class WeightsReceiver:
    """The generator's end, in its only process.

    A background task (`serve`) takes every version as soon as all trainer ranks have offered it,
    even while the executor does other work. The executor decides what an update does to running
    requests (`hold`, `release`).

    The engines may be `async.capacity` versions behind when the generator begins a batch
    (megarl.plan.topologies).
    """

    def __init__(self, plan: RunPlan, source: Layout, link: Hub, key_file: str):
        self._plan = plan
        self._link = link
        self._run_ahead = run_ahead(plan.config.async_)
        self.settled: Version = -1  # the newest version whose probe and evaluation are also done
        self._sessions = EngineSessions(plan, source, link, key_file)
        self._trainers = [f"trainer.{rank}" for rank in range(plan.trainer_topology.world_size)]
        self._offers = Offers(link, self._trainers, plan.config.timeouts.weights_s)
        self._hosts: list[Host] = []  # hosts of the trainer ranks
        self._busy = False  # whether an update is running
        self._updates = 0

    def recv(self, executor: ServingExecutor) -> None:
        """Waits for the weights that the next batch needs."""
        if self._run_ahead is not None:
            self.await_version(executor, executor.curr_step - self._run_ahead)

    def await_version(self, executor: ServingExecutor, oldest: Version) -> None:
        """Waits until the engines have `oldest` or a newer version, and its probe and evaluation
        are done.
        """
        awaited = f"weights version {oldest} from {', '.join(self._trainers)}"
        with executor.status.waiting("trainer", awaited):
            executor.wait_until(lambda: self.settled >= oldest, awaited)

    async def serve(self, executor: ServingExecutor) -> None:
        """Takes every version up to the run's last.

        Also brings the served version into engines that come back.
        """
        executor.start(self._invite(executor), "invitation of engines that came back")
        executor.start(self._answer(executor), "last look at the engines of a run that stops")
        while executor.version < self._plan.config.max_steps:
            await self.take(executor)
            follow_up = asyncio.ensure_future(self._probe_and_evaluate(executor))
            try:
                while (
                    not follow_up.done()
                ):  # it needs engines, and all of them may just be coming back
                    await self._catch_up_beside(follow_up, executor)
                follow_up.result()
            finally:
                follow_up.cancel()
            if executor.version == self._plan.config.max_steps:
                await self.look_again(executor)
            self.settled = executor.version
            executor.pulse.beat()

    async def _catch_up_beside(
        self, follow_up: asyncio.Future[None], executor: ServingExecutor
    ) -> None:
        """Waits until `follow_up` is done or an engine has been taken back."""
        offer = asyncio.ensure_future(self._offers.next(executor.version, only_serving=True))
        try:
            await asyncio.wait({follow_up, offer}, return_when=asyncio.FIRST_COMPLETED)
            if offer.done():
                await self._catch_up(executor, offer.result().version)
        finally:
            offer.cancel()

    async def _probe_and_evaluate(self, executor: ServingExecutor) -> None:
        """Makes the probe and the evaluation after an update."""
        if is_probe_version(executor.version, self._plan.config.observe.probe_every):
            await self._send_all(await executor.probe())
        await executor.evaluate()

    async def take(self, executor: ServingExecutor) -> None:
        """Waits for the next new version and brings it into the engines.

        Until it comes, serves offers for engines that have come back.
        """
        while (offered := await self._offers.next(executor.version)).version == executor.version:
            await self._catch_up(executor, offered.version)
        version = offered.version
        self._busy = True
        with executor.trace.span(f"take weights {version}", track="weights"):
            await executor.hold()
            cost = await self._update(executor, offered)
            executor.trace.add(
                f"pause for weights {version}",
                *cost.pause,
                track="weights",
                **self._trace_values(cost),
            )
        executor.release(version)
        compared = self._plan.config.weights.delta != "off"
        await self._applied(
            executor.fleet, version, cost, changed_fraction(offered.offers) if compared else None
        )

    async def look_again(self, executor: ServedExecutor) -> None:
        """The last audit of a run, with weights.audit=strict, since no further update will find
        changes in the engines. Raises AuditError.
        """
        if self._plan.config.weights.audit != STRICT:
            return
        self._busy = True
        with executor.trace.span(
            f"look again at weights {executor.version}", track="weights"
        ) as span_values:
            span_values["engines"] = await self._sessions.look_again(
                executor.fleet, executor.version
            )
        print(
            f"engines {span_values['engines']} hold what the audit of version {executor.version} "
            "found in them",
            flush=True,
        )
        self._end_update(executor.fleet)

    async def _answer(self, executor: ServedExecutor) -> None:
        """Compares the memory again when the run stops. Trainer rank 0 has a deadline for this."""
        sender, _ = await self._link.arrival(LookAgain, None, "the run's stop")
        await executor.fleet.pulse.until(lambda: not self._busy)
        answer = LookedAgain()
        try:
            await self.look_again(executor)
        except AuditError as error:
            answer = LookedAgain(problem=str(error))
        except (RuntimeError, TimeoutError) as error:
            answer = LookedAgain(obstacle=str(error))
        self._link.send(sender, answer)

    async def _catch_up(self, executor: ServingExecutor, version: Version) -> None:
        """Brings `version` into engines that have come back, while the other engines serve it."""
        fleet = executor.fleet
        self._busy = True
        numbers = sorted(engine.number for engine in fleet.without_weights)
        with executor.trace.span(f"weights {version} for engines {numbers}", track="weights"):
            session = await self._sessions.open(
                fleet, self._hosts, version, version, catching_up=True
            )
            if session is None:  # lost once more
                await self._send_all(WeightsGrant(version, engines=()))
                self._end_update(fleet)
            else:
                cost = await self._write(fleet, session)
                executor.trace.add(
                    f"pause for weights {version} again",
                    *cost.pause,
                    "weights",
                    **self._trace_values(cost),
                )
                await self._applied(fleet, version, cost)

    async def _applied(
        self, fleet: Fleet, version: Version, cost: UpdateCost, changed: float | None = None
    ) -> None:
        start, end = cost.pause
        message = WeightsApplied(
            version=version,
            audited=self._plan.config.weights.audited,
            pause_s=end - start,
            bytes_written=cost.bytes_written,
            engines=len(fleet.serving),
            changed_fraction=changed,
            serving=fleet.by_name(fleet.counts(fleet.serving)),
            sampled=fleet.by_name(fleet.sampled),
            drafts=fleet.take_drafts(),
            prefill=fleet.take_prefill(),
            high_water_bytes=cost.high_water_bytes,
        )
        await self._send_all(message)
        self._end_update(fleet)

    def _trace_values(self, cost: UpdateCost) -> dict[str, Any]:
        """Values for the trace. A failed audit has already raised an error."""
        return {
            "bytes": cost.bytes_written,
            "audited": self._plan.config.weights.audited,
            "engines": cost.engines,
        }

    def _end_update(self, fleet: Fleet) -> None:
        self._busy = False
        self._updates = self._updates + 1
        fleet.updating = ()
        fleet.pulse.beat()

    @property
    def fixed(self) -> str:
        """Why the set of engines cannot change; empty if it can."""
        return self._sessions.fixed

    async def _invite(self, executor: ServingExecutor) -> None:
        """Asks for the served weights when an engine has come back.

        Trainer ranks that are not waiting for a batch will soon send newer weights; the engine then
        takes part in that update instead.
        """
        fleet = executor.fleet
        while True:
            await fleet.pulse.until(
                lambda: bool(fleet.without_weights) and not self._busy and executor.version >= 0
            )
            updates_so_far = self._updates
            self._link.send("trainer.0", WeightsWanted(executor.version))
            await fleet.pulse.until(
                lambda: self._updates != updates_so_far or not fleet.without_weights
            )

    async def _send_all(self, message: WeightsGrant | WeightsApplied | ProbeReady) -> None:
        await self._link.send_all(self._trainers, message)

    async def _update(self, executor: ServingExecutor, offered: OfferedVersion) -> UpdateCost:
        """Brings a new version into all engines that are alive."""
        fleet = executor.fleet
        serving = executor.version
        if not self._hosts:
            self._hosts = await self._meet_trainers()
        while (
            session := await self._sessions.open(
                fleet,
                self._hosts,
                serving,
                offered.version,
                delta=worth_it(offered.offers, serving),
            )
        ) is None:
            # no deadline here: the watch over lost engines has one
            await fleet.pulse.until(lambda: bool(fleet.members))
        return await self._write(fleet, session)

    async def _write(self, fleet: Fleet, session: Session) -> UpdateCost:
        """Does an update from the grant until the engines continue.

        Afterwards all members serve, except those lost meanwhile.
        """
        try:
            bytes_written = await self._take_writes(session)
            pause = await session.update.close()
        except Exception as error:
            await session.update.abandon(str(error))
            raise
        for error in session.update.workers.lost.values():
            fleet.lose(error)
        fleet.take_back(session.members, session.grant.version)
        return UpdateCost(
            pause=pause,
            bytes_written=bytes_written,
            engines=[engine.number for engine in session.members],
            high_water_bytes=session.update.high_water_bytes,
        )

    async def _take_writes(self, session: Session) -> int:
        """Lets all trainer ranks write, and audits the result. Returns the bytes written."""
        opened = session.opened
        update = session.update
        grant = session.grant
        if self._plan.config.weights.audit == STRICT:
            await update.recall()
        if session.opens:
            grants = (  # made one by one, since all endpoints are large
                msgspec.structs.replace(grant, endpoints=opened.endpoints_of(rank))
                for rank in range(len(self._trainers))
            )
            await self._link.send_each(zip(self._trainers, grants))
        else:
            await self._send_all(grant)
        writes = Writes(
            self._link, self._trainers, grant.version, self._plan.config.timeouts.weights_s
        )
        await update.take(opened, writes)
        if opened.relays:
            await update.pass_on(opened.relays)
        if self._plan.config.weights.audited:
            await update.audit(writes.shares(), opened.tensors, opened.relays)
        return writes.bytes_written

    async def _meet_trainers(self) -> list[Host]:
        """Checks that both ends have computed the same map, before the first byte is written.

        Returns the hosts of the trainer ranks.
        """
        hosts: dict[str, Host] = {}
        differing = []
        missing = set(self._trainers)

        def awaited() -> str:
            return (
                "the reshard map of "
                f"{', '.join(name for name in self._trainers if name in missing)}"
            )

        while missing:
            for sender, hello in await self._link.arrivals(
                Hello, self._plan.config.timeouts.rendezvous_s, awaited
            ):
                missing.discard(sender)
                hosts[sender] = hello.host
                if hello.plan_hash != self._sessions.map.plan_hash:
                    differing.append(f"{sender} computed {hello.plan_hash}")
        if differing:
            own_hash = f"{self._link.name} computed {self._sessions.map.plan_hash}"
            raise RuntimeError(
                f"the reshard maps differ: {', '.join(sorted(differing))}; {own_hash}: do their "
                "layouts agree?"
            )
        return [hosts[name] for name in self._trainers]


class InitialWeights:
    """The same receiving end without lag, for the first and the last weights of the run."""

    def __init__(self, channel: WeightsReceiver):
        self._channel = channel
        self._serving = False

    def recv(self, executor: ServingExecutor) -> None:
        if not self._serving:
            executor.start(self._channel.serve(executor), "weights receiver")
            self._serving = True
        self._channel.await_version(executor, executor.curr_step)


@dataclass(frozen=True)
class OfferedVersion:
    """A version that every rank has offered."""

    version: Version
    offers: list[WeightsOffer]


class Offers:
    """Collects the offers of the ranks `trainers`.

    Once a rank has offered a version, the others must follow within `timeout_s`.
    """

    def __init__(self, link: Hub, trainers: Sequence[str], timeout_s: float):
        self._link = link
        self._trainers = trainers
        self._timeout_s = timeout_s
        self._open: dict[Version, dict[str, WeightsOffer]] = {}  # version -> rank -> its offer
        self._pending: Counter[str] = Counter()  # rank -> number of its open offers

    async def next(self, serving: Version, only_serving: bool = False) -> OfferedVersion:
        """Waits for the next version that every rank has offered.

        With `only_serving`, that can only be `serving`, for engines that have come back.

        The first offer has no deadline here, since its users have one. Raises TimeoutError that
        names missing ranks.
        """

        def awaited() -> str:
            return f"weights newer than version {serving} from {', '.join(self._missing())}"

        while True:
            for version, offers in self._open.items():
                if len(offers) == len(self._trainers) and (not only_serving or version == serving):
                    del self._open[version]
                    self._pending -= Counter(offers.keys())
                    return OfferedVersion(version, list(offers.values()))
            if self._open and len(self._pending) < len(self._trainers):
                timeout_s = self._timeout_s
            else:
                timeout_s = None
            for sender, offer in await self._link.arrivals(WeightsOffer, timeout_s, awaited):
                version_offers = self._open.setdefault(offer.version, {})
                self._pending[sender] += sender not in version_offers
                version_offers[sender] = offer

    def _missing(self) -> list[str]:
        result: list[str] = []
        for name in self._trainers:
            if name not in self._pending:
                result.append(name)
        return result
