"""The weights channel, receiving end: the generator lets the trainer ranks write into its engines.

See weights_sender for one update seen from both ends.
"""

from __future__ import annotations

import asyncio
from typing import Optional

from megarl.channels.admission import run_ahead
from megarl.messaging.host import Host
from megarl.messaging.link import Hub
from megarl.messaging.messages import Hello, ProbeReady, WeightsApplied, WeightsGrant, WeightsOffer, WeightsWanted, WeightsWritten
from megarl.channels.weights_sender import is_probe_version, weights_map
from megarl.generator import update
from megarl.generator.client import EngineUnreachable
from megarl.generator.fleet import Fleet
from megarl.generator.opening import Opened, open_engines
from megarl.plan.resolve import RunPlan
from megarl.protocols import ChannelType, Executor
from megarl.reshard.layout import Layout
from megarl.transports.base import CUDA_IPC, MOONCAKE, SHARED_MEMORY, TWO_SIDED
from megarl.types import Version

MAPPED = {SHARED_MEMORY, CUDA_IPC}  # ways that can be opened anew at any time, and that a lost engine does not block


class WeightsReceiver:
    """Trainer → generator, at the generator's only process.

    Every version is taken as soon as all trainer ranks have offered it, by a background task (`serve`), whatever the executor
    does meanwhile: what an update means for requests that are running is the executor's to say (`hold`, `release`).

    `capacity` is how many versions the engines may be behind when the generator begins a batch; None: any.
    """

    name = "weights"
    outbound = "trainer"
    inbound = "generator"
    type = ChannelType.DDMA_WEIGHTS_UPDATE

    def __init__(self, plan: RunPlan, source: Layout, link: Hub, key_file: str):
        self._plan, self._link, self._key_file = plan, link, key_file
        self.capacity = run_ahead(plan.config.async_)
        self.settled: Version = -1  # taken, and done with all that follows an update
        self._map = weights_map(plan, source)
        self._trainers = [f"trainer.{rank}" for rank in range(plan.trainer_topology.world_size)]
        self._offers: dict[int, set[str]] = {}  # version → trainer ranks that have offered it
        self._workers: update.Workers | None = None
        self._opened: Opened | None = None
        self._members: list[int] = []  # engines that took part last: to them the way is open
        self._hosts: list[Host] = []  # of the trainer ranks
        self._busy = False  # an update is on its way
        self._updates = 0

    def recv(self, executor: Executor) -> None:
        """Waits for the weights that the coming batch needs."""
        if self.capacity is not None:
            self.await_version(executor, executor.curr_step - self.capacity)

    def await_version(self, executor: Executor, oldest: Version) -> None:
        """Waits until the engines have `oldest` or a newer version, and what follows its update is done."""
        awaited = f"weights version {oldest} from {', '.join(self._trainers)}"
        with executor.status.waiting("trainer", awaited):
            executor.wait_until(lambda: self.settled >= oldest, awaited)

    async def serve(self, executor: Executor) -> None:
        """Takes every version up to the run's last, and gives the one that is served to engines that come back."""
        executor.background.start(self._invite(executor), "invitation of engines that came back")
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

    async def _join_beside(self, after: asyncio.Future[None], executor: Executor) -> None:
        """Until `after` is done, or an engine was taken back."""
        offer = asyncio.ensure_future(self._offer(executor, again=True))
        try:
            await asyncio.wait({after, offer}, return_when=asyncio.FIRST_COMPLETED)
            if offer.done():
                await self._join(executor, offer.result())
        finally:
            offer.cancel()

    async def _after(self, executor: Executor) -> None:
        """What follows an update."""
        if is_probe_version(executor.version, self._plan.config.observe.probe_every):
            self._tell(await executor.probe())
        await executor.evaluate()

    async def take(self, executor: Executor) -> None:
        """Waits for the next version on offer, and brings it into the engines; into those that have come back, what the others serve."""
        while (version := await self._offer(executor)) == executor.version:
            await self._join(executor, version)
        fleet, self._busy = executor.get_model(), True
        with executor.trace.span(f"take weights {version}", track="weights"):
            await executor.hold()
            session, bytes_written = await self._update(executor, version)
        executor.release(version)
        self._done(fleet, session, version, bytes_written)

    async def _join(self, executor: Executor, version: Version) -> None:
        """Brings `version`, which the others serve meanwhile, into engines that have come back."""
        fleet, self._busy = executor.get_model(), True
        with executor.trace.span(f"weights {version} for engines {sorted(fleet.returned)}", track="weights"):
            if opened := await self._open_session(executor, version, joining=True):
                session, grant = opened
                bytes_written = await self._write(fleet, session, grant, version)
                self._done(fleet, session, version, bytes_written)
            else:  # lost once more
                self._tell(WeightsGrant(version, [], engines=0))
                self._busy, self._updates = False, self._updates + 1

    def _done(self, fleet: Fleet, session: update.WeightUpdate, version: Version, bytes_written: int) -> None:
        """Those that took part serve `version`, but for those that were lost on the way."""
        for error in session.workers.lost.values():
            fleet.lose(error)
        fleet.take_back(self._members)
        self._tell(WeightsApplied(version, self._plan.config.weights.audit, session.pause_s, bytes_written))
        self._busy, self._updates = False, self._updates + 1
        fleet.pulse.beat()

    async def _invite(self, executor: Executor) -> None:
        """Asks for the weights that are served now when an engine has come back. Whoever is not waiting for a batch then, soon
        sends newer ones; engines that have come back by then take part in that."""
        fleet = executor.get_model()
        while True:
            await fleet.pulse.until(lambda: bool(fleet.returned) and not self._busy and executor.version >= 0)
            before = self._updates
            self._link.send("trainer.0", WeightsWanted(executor.version))
            await fleet.pulse.until(lambda: self._updates != before or not fleet.returned)

    def _tell(self, message: WeightsGrant | WeightsApplied | ProbeReady) -> None:
        for name in self._trainers:
            self._link.send(name, message)

    async def _offer(self, executor: Executor, again: bool = False) -> Version:
        """The next version that every trainer rank stands still for; `again`: only the one that is served.

        The first rank may take its time: who needs the weights has a deadline. Then the others must follow.
        """
        while True:
            for version, ranks in self._offers.items():
                if len(ranks) == len(self._trainers) and (not again or version == executor.version):
                    del self._offers[version]
                    return version
            missing = ", ".join(name for name in self._trainers if name not in set().union(*self._offers.values()))
            timeout_s = self._plan.config.timeouts.weights_s if self._offers and missing else None
            awaited = f"weights newer than version {executor.version} from {missing}"
            sender, offer = await self._link.arrival(WeightsOffer, timeout_s, awaited)
            self._offers.setdefault(offer.version, set()).add(sender)

    async def _update(self, executor: Executor, version: Version) -> tuple[update.WeightUpdate, int]:
        """Engines stand still, ranks write, the memory is audited, engines go on as `version`. Also returns the bytes written."""
        fleet = executor.get_model()
        with executor.trace.span(f"pause for weights {version}", track="weights"):
            while (opened := await self._open_session(executor, version)) is None:
                await fleet.pulse.until(lambda: bool(fleet.members))  # whoever watches the lost ones has a deadline
            session, grant = opened
            return session, await self._write(fleet, session, grant, version)

    async def _open_session(
        self, executor: Executor, version: Version, joining: bool = False
    ) -> Optional[tuple[update.WeightUpdate, WeightsGrant]]:
        """Engines stand still, open to be written to: all that take part, or only the `joining`. None when there are none."""
        config, fleet = self._plan.config, executor.get_model()
        while True:
            await self._notice_restarts(executor)
            members = sorted(fleet.returned) if joining else fleet.members
            if not members:
                return None
            known = members == self._members and not fleet.returned  # one that has come back is another process
            if not known:
                self._check_elastic(members, fleet)
                clients = [fleet.engines[index] for index in members]
                self._workers = update.Workers(clients, config.generator.tp, self._link, config.timeouts.weights_s)
            self._workers.may_lose = False
            session = update.WeightUpdate(self._workers, in_place=config.async_.partial_rollout == "in_flight")
            try:
                await session.open(serving=executor.version if known or self._opened is None else None)
                grant = WeightsGrant(version, [], len(members)) if known else await self._open(version, len(members))
                self._members = members
                return session, grant
            except Exception as error:
                if not (fleet.elastic and isinstance(error, EngineUnreachable)):
                    await session.abandon(str(error))
                    raise
                await session.cancel()
                self._members = []
                fleet.lose(error)

    async def _notice_restarts(self, executor: Executor) -> None:
        """An engine that was started again since it last had a request to answer no longer has the weights."""
        fleet = executor.get_model()
        for index in sorted(fleet.serving) if fleet.elastic and executor.version >= 0 else ():
            try:
                if await fleet.engines[index].version(self._plan.config.timeouts.weights_s) == -1:
                    fleet.lose(EngineUnreachable(fleet.engines[index].url, "it was started again"))
            except EngineUnreachable as error:
                fleet.lose(error)

    def _check_elastic(self, members: list[int], fleet: Fleet) -> None:
        """Raises RuntimeError where the way that weights go by cannot be opened anew for other engines than before."""
        if self._opened is not None and not self._opened.kinds <= MAPPED:
            ways, lost = ", ".join(sorted(self._opened.kinds)), "; ".join(fleet.lost.values()) or "an engine has come back"
            raise RuntimeError(f"weights go by {ways}, which cannot go on with engines {members} alone: {lost}")

    async def _write(self, fleet: Fleet, session: update.WeightUpdate, grant: WeightsGrant, version: Version) -> int:
        """From the grant to the engines' going on. Returns the bytes written."""
        session.workers.may_lose = fleet.elastic and self._opened.kinds <= MAPPED  # memory can be written to though its owner is gone
        try:
            written = await self._take_writes(session, grant)
            await session.close(version)
        except Exception as error:
            await session.abandon(str(error))
            raise
        return sum(message.bytes_written for message in written.values())

    async def _take_writes(self, session: update.WeightUpdate, grant: WeightsGrant) -> dict[str, WeightsWritten]:
        """Lets all trainer ranks write, and proves what they wrote; what each said of it, by its name."""
        opened = self._opened
        self._tell(grant)
        if opened.kinds.intersection(TWO_SIDED):
            await session.receive()
        written = await self._await_written(grant.version)
        if MOONCAKE in opened.kinds:
            await session.spread()
        if opened.relays:
            await session.pass_on()
        if self._plan.config.weights.audit:
            await session.audit([message.shares for message in written.values()], opened.map, opened.relays)
        return written

    async def _await_written(self, version: Version) -> dict[str, WeightsWritten]:
        written: dict[str, WeightsWritten] = {}
        while missing := [name for name in self._trainers if name not in written]:
            awaited = f"{', '.join(missing)} to write weights version {version}"
            sender, message = await self._link.arrival(WeightsWritten, self._plan.config.timeouts.weights_s, awaited)
            if sender not in missing or message.version != version:
                raise RuntimeError(f"generator.0 waited for {awaited}, but {sender} has written version {message.version}")
            if message.error:
                raise RuntimeError(f"{sender} could not write weights version {version}: {message.error}")
            written[sender] = message
        return written

    async def _meet_trainers(self) -> list[Host]:
        """Both ends must have computed the same map, before the first byte is written. Where each trainer rank runs."""
        hosts: dict[str, Host] = {}
        differing = []
        for _ in self._trainers:
            sender, hello = await self._link.arrival(Hello, self._plan.config.timeouts.rendezvous_s, "the trainer ranks' reshard maps")
            hosts[sender] = hello.host
            if hello.plan_hash != self._map.plan_hash:
                differing.append(f"{sender} computed {hello.plan_hash}")
        if differing:
            ours = f"generator.0 computed {self._map.plan_hash}"
            raise RuntimeError(f"the reshard maps differ: {', '.join(sorted(differing))}; {ours}: do their layouts agree?")
        return [hosts[name] for name in self._trainers]

    async def _open(self, version: Version, engines: int) -> WeightsGrant:
        """Compares the live engines with the map's destination layout, then makes their parameters writable; the grant that says how."""
        if not self._hosts:
            self._hosts = await self._meet_trainers()
        map = self._map if engines == self._plan.generator_topology.engines else weights_map(self._plan, self._map.source, engines)
        await update.check_parallelism(self._workers, self._plan.config.generator.ep)
        hosts = await update.connect(self._workers, self._key_file)
        await update.settle_layout(self._workers, map.destination)
        opened = self._opened = await open_engines(self._workers, self._plan.config.weights, map, self._hosts, hosts)
        endpoints = [endpoint.encode() for endpoint in opened.endpoints]
        return WeightsGrant(version, endpoints, engines, opened.ranks_per_host, opened.map.plan_hash)

    def send(self, executor: Executor) -> None:
        raise AssertionError("the generator does not send weights")

    def close(self) -> None:
        """The link is closed by the rollouts channel, which shares it."""


class InitialWeights:
    """The same channel with capacity 0: the weights the run starts from, and those it ends with."""

    def __init__(self, channel: WeightsReceiver):
        self._channel = channel
        self._serving = False
        self.name, self.outbound, self.inbound, self.type, self.capacity = "initial_weights", "trainer", "generator", channel.type, 0

    def recv(self, executor: Executor) -> None:
        if not self._serving:
            executor.start(self._channel.serve(executor), "weights receiver")
            self._serving = True
        self._channel.await_version(executor, executor.curr_step)

    def send(self, executor: Executor) -> None:
        self._channel.send(executor)

    def close(self) -> None:
        pass
