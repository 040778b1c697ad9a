"""The weights channel, receiving end: the generator lets the trainer ranks write into its engines.

See megarl.weight_sync.sender for one update seen from both ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from megarl.config.schema import STRICT
from megarl.generator.fleet import Fleet
from megarl.messaging.host import Host
from megarl.messaging.link import Hub
from megarl.messaging.messages import Hello, ProbeReady, WeightsApplied, WeightsGrant, WeightsWanted
from megarl.messaging.pulse import Pulse
from megarl.observe.status import StatusBoard
from megarl.observe.trace import TraceWriter
from megarl.plan.asynchrony import run_ahead
from megarl.plan.resolve import RunPlan
from megarl.reshard.layout import Layout
from megarl.types import Version
from megarl.weight_sync.offers import Offers
from megarl.weight_sync.sender import is_probe_version
from megarl.weight_sync.sessions import EngineSessions, Session
from megarl.weight_sync.update import Pause
from megarl.weight_sync.writes import Writes


@dataclass(frozen=True)
class Taken:
    """What an update cost the engines."""

    pause: Pause
    bytes_written: int  # by all trainer ranks together


class ServingExecutor(Protocol):
    """What the receiving end asks of the generator."""

    curr_step: int
    fleet: Fleet
    status: StatusBoard
    trace: TraceWriter
    pulse: Pulse  # beats when the version has changed, or what `wait_until` waits for

    @property
    def version(self) -> Version:
        """Of the weights in the engines; -1: none of the run's yet."""
        ...

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None: ...

    def wait_until(self, holds: Callable[[], bool], awaited: str) -> None: ...

    async def hold(self) -> None: ...

    def release(self, version: Version) -> None: ...

    async def probe(self) -> ProbeReady: ...

    async def evaluate(self) -> None: ...


class WeightsReceiver:
    """Trainer → generator, at the generator's only process.

    Every version is taken as soon as all trainer ranks have offered it, by a background task (`serve`), whatever the executor
    does meanwhile: what an update means for requests that are running is the executor's to say (`hold`, `release`).

    The engines may be `async.capacity` versions behind when the generator begins a batch (megarl.plan.asynchrony).
    """

    def __init__(self, plan: RunPlan, source: Layout, link: Hub, key_file: str):
        self._plan, self._link = plan, link
        self._run_ahead = run_ahead(plan.config.async_)
        self.settled: Version = -1  # taken, and done with all that follows an update
        self._sessions = EngineSessions(plan, source, link, key_file)
        self._trainers = [f"trainer.{rank}" for rank in range(plan.trainer_topology.world_size)]
        self._offers = Offers(link, self._trainers, plan.config.timeouts.weights_s)
        self._hosts: list[Host] = []  # of the trainer ranks
        self._busy = False  # an update is on its way
        self._updates = 0

    def recv(self, executor: ServingExecutor) -> None:
        """Waits for the weights that the coming batch needs."""
        if self._run_ahead is not None:
            self.await_version(executor, executor.curr_step - self._run_ahead)

    def await_version(self, executor: ServingExecutor, oldest: Version) -> None:
        """Waits until the engines have `oldest` or a newer version, and what follows its update is done."""
        awaited = f"weights version {oldest} from {', '.join(self._trainers)}"
        with executor.status.waiting("trainer", awaited):
            executor.wait_until(lambda: self.settled >= oldest, awaited)

    async def serve(self, executor: ServingExecutor) -> None:
        """Takes every version up to the run's last, and gives the one that is served to engines that come back."""
        executor.start(self._invite(executor), "invitation of engines that came back")
        while executor.version < self._plan.config.max_steps:
            await self.take(executor)
            after = asyncio.ensure_future(self._after(executor))
            try:
                while not after.done():  # it needs engines, and there may be none but those that come back meanwhile
                    await self._join_beside(after, executor)
                after.result()
            finally:
                after.cancel()
            self.settled = executor.version
            executor.pulse.beat()

    async def _join_beside(self, after: asyncio.Future[None], executor: ServingExecutor) -> None:
        """Until `after` is done, or an engine was taken back."""
        offer = asyncio.ensure_future(self._offers.next(executor.version, again=True))
        try:
            await asyncio.wait({after, offer}, return_when=asyncio.FIRST_COMPLETED)
            if offer.done():
                await self._join(executor, offer.result())
        finally:
            offer.cancel()

    async def _after(self, executor: ServingExecutor) -> None:
        """What follows an update."""
        if is_probe_version(executor.version, self._plan.config.observe.probe_every):
            self._tell(await executor.probe())
        await executor.evaluate()

    async def take(self, executor: ServingExecutor) -> None:
        """Waits for the next version on offer, and brings it into the engines; into those that have come back, what the others serve."""
        while (version := await self._offers.next(executor.version)) == executor.version:
            await self._join(executor, version)
        self._busy = True
        with executor.trace.span(f"take weights {version}", track="weights"):
            await executor.hold()
            taken = await self._update(executor, version)
            executor.trace.add(f"pause for weights {version}", *taken.pause, track="weights")
        executor.release(version)
        self._applied(executor, version, taken)

    async def _join(self, executor: ServingExecutor, version: Version) -> None:
        """Brings `version`, which the others serve meanwhile, into engines that have come back."""
        fleet, self._busy = executor.fleet, True
        with executor.trace.span(f"weights {version} for engines {sorted(fleet.returned)}", track="weights"):
            session = await self._sessions.open(fleet, self._hosts, version, version, joining=True)
            if session is None:  # lost once more
                self._tell(WeightsGrant(version, [], engines=0))
                self._over(fleet)
            else:
                self._applied(executor, version, await self._write(fleet, session))

    def _applied(self, executor: ServingExecutor, version: Version, taken: Taken) -> None:
        began, ended = taken.pause
        self._tell(WeightsApplied(version, self._plan.config.weights.audited, ended - began, taken.bytes_written))
        self._over(executor.fleet)

    def _over(self, fleet: Fleet) -> None:
        self._busy, self._updates = False, self._updates + 1
        fleet.pulse.beat()

    async def _invite(self, executor: ServingExecutor) -> None:
        """Asks for the weights that are served now when an engine has come back. Whoever is not waiting for a batch then, soon
        sends newer ones; engines that have come back by then take part in that."""
        fleet = executor.fleet
        while True:
            await fleet.pulse.until(lambda: bool(fleet.returned) and not self._busy and executor.version >= 0)
            before = self._updates
            self._link.send("trainer.0", WeightsWanted(executor.version))
            await fleet.pulse.until(lambda: self._updates != before or not fleet.returned)

    def _tell(self, message: WeightsGrant | WeightsApplied | ProbeReady) -> None:
        for name in self._trainers:
            self._link.send(name, message)

    async def _update(self, executor: ServingExecutor, version: Version) -> Taken:
        """Brings `version` into all engines that there are."""
        fleet = executor.fleet
        if not self._hosts:
            self._hosts = await self._meet_trainers()
        while (session := await self._sessions.open(fleet, self._hosts, executor.version, version)) is None:
            await fleet.pulse.until(lambda: bool(fleet.members))  # whoever watches the lost ones has a deadline
        return await self._write(fleet, session)

    async def _write(self, fleet: Fleet, session: Session) -> Taken:
        """From the grant to the engines' going on; those that took part serve then, but for those that were lost on the way."""
        try:
            bytes_written = await self._take_writes(session)
            pause = await session.update.close()
        except Exception as error:
            await session.update.abandon(str(error))
            raise
        for error in session.update.workers.lost.values():
            fleet.lose(error)
        fleet.take_back(session.members, session.grant.version)
        return Taken(pause, bytes_written)

    async def _take_writes(self, session: Session) -> int:
        """Lets all trainer ranks write, and proves what they wrote: the bytes."""
        opened, update, grant = session.opened, session.update, session.grant
        if self._plan.config.weights.audit == STRICT:
            await update.recall()
        for name, endpoints in zip(self._trainers, session.endpoints, strict=True):
            self._link.send(name, msgspec.structs.replace(grant, endpoints=endpoints))
        if not opened.one_sided:
            await update.receive()
        writes = Writes(self._link, self._trainers, grant.version, self._plan.config.timeouts.weights_s)
        if opened.lands:
            await writes.landed()
            await asyncio.gather(update.spread(), writes.done())  # what landed is spread while all else is written
        else:
            await writes.done()
        await update.give_up({rank: f"{sender} could not write" for sender, message in writes.parts for rank in message.unwritten})
        if opened.relays:
            await update.pass_on(opened.relays)
        if self._plan.config.weights.audited:
            await update.audit([message.shares for _, message in writes.parts], opened.map, opened.relays)
        return sum(message.bytes_written for _, message in writes.parts)

    async def _meet_trainers(self) -> list[Host]:
        """Both ends must have computed the same map, before the first byte is written. Where each trainer rank runs."""
        hosts: dict[str, Host] = {}
        differing = []
        while missing := [name for name in self._trainers if name not in hosts]:
            awaited = f"the reshard map of {', '.join(missing)}"
            sender, hello = await self._link.arrival(Hello, self._plan.config.timeouts.rendezvous_s, awaited)
            hosts[sender] = hello.host
            if hello.plan_hash != self._sessions.map.plan_hash:
                differing.append(f"{sender} computed {hello.plan_hash}")
        if differing:
            ours = f"generator.0 computed {self._sessions.map.plan_hash}"
            raise RuntimeError(f"the reshard maps differ: {', '.join(sorted(differing))}; {ours}: do their layouts agree?")
        return [hosts[name] for name in self._trainers]


class InitialWeights:
    """The same end without any lag: the weights the run starts from, and those it ends with."""

    def __init__(self, channel: WeightsReceiver):
        self._channel = channel
        self._serving = False

    def recv(self, executor: ServingExecutor) -> None:
        if not self._serving:
            executor.start(self._channel.serve(executor), "weights receiver")
            self._serving = True
        self._channel.await_version(executor, executor.curr_step)
