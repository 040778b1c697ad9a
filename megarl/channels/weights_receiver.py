"""The weights channel, receiving end: the generator lets the trainer ranks write into its engines.

See weights_sender for one update seen from both ends.
"""

from __future__ import annotations

from megarl.channels.admission import run_ahead
from megarl.messaging.host import Host
from megarl.messaging.link import Hub
from megarl.messaging.messages import Hello, WeightsApplied, WeightsGrant, WeightsOffer, WeightsWritten
from megarl.channels.weights_sender import is_probe_version, weights_map
from megarl.generator import update
from megarl.generator.opening import Opened, open_engines
from megarl.plan.resolve import RunPlan
from megarl.protocols import ChannelType, Executor
from megarl.reshard.layout import Layout
from megarl.transports.base import MOONCAKE, TWO_SIDED
from megarl.types import Version


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
        """Takes every version up to the run's last."""
        every = self._plan.config.observe.probe_every
        while executor.version < self._plan.config.max_steps:
            await self.take(executor)
            if is_probe_version(executor.version, every):
                probe = await executor.probe()
                for name in self._trainers:
                    self._link.send(name, probe)
            await executor.evaluate()
            self.settled = executor.version
            executor.pulse.beat()

    async def take(self, executor: Executor) -> None:
        """Waits for the next version on offer, and brings it into the engines."""
        version = await self._offer(executor)
        with executor.trace.span(f"take weights {version}", track="weights"):
            await executor.hold()
            session, bytes_written = await self._update(executor, version)
        executor.release(version)
        applied = WeightsApplied(version, self._plan.config.weights.audit, session.pause_s, bytes_written)
        for name in self._trainers:
            self._link.send(name, applied)

    async def _offer(self, executor: Executor) -> Version:
        """The next version that every trainer rank stands still for. The first rank may take its time: who needs the weights
        has a deadline. Then the others must follow."""
        while True:
            for version, ranks in self._offers.items():
                if len(ranks) == len(self._trainers):
                    del self._offers[version]
                    return version
            missing = ", ".join(name for name in self._trainers if name not in set().union(*self._offers.values()))
            timeout_s = self._plan.config.timeouts.weights_s if self._offers else None
            awaited = f"weights newer than version {executor.version} from {missing}"
            sender, offer = await self._link.arrival(WeightsOffer, timeout_s, awaited)
            self._offers.setdefault(offer.version, set()).add(sender)

    async def _update(self, executor: Executor, version: Version) -> tuple[update.WeightUpdate, int]:
        """Engines stand still, ranks write, the memory is audited, engines go on as `version`. Also returns the bytes written."""
        config = self._plan.config
        first, hosts = self._workers is None, []
        if first:
            hosts = await self._meet_trainers()
            self._workers = update.Workers(executor.get_model().engines, config.generator.tp, self._link, config.timeouts.weights_s)
        session = update.WeightUpdate(self._workers, in_place=config.async_.partial_rollout == "in_flight")
        with executor.trace.span(f"pause for weights {version}", track="weights"):
            try:
                await session.open(serving=executor.version)
                grant = await self._open(version, hosts) if first else WeightsGrant(version, [])
                written = await self._take_writes(session, grant)
                await session.close(version)
            except Exception as error:
                await session.abandon(str(error))
                raise
        return session, sum(message.bytes_written for message in written.values())

    async def _take_writes(self, session: update.WeightUpdate, grant: WeightsGrant) -> dict[str, WeightsWritten]:
        """Lets all trainer ranks write, and proves what they wrote; what each said of it, by its name."""
        opened = self._opened
        for name in self._trainers:
            self._link.send(name, grant)
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

    async def _open(self, version: Version, trainers: list[Host]) -> WeightsGrant:
        """Compares the live engines with the map's destination layout, then makes their parameters writable; the first grant.

        `trainers`: where each trainer rank runs.
        """
        await update.check_parallelism(self._workers, self._plan.config.generator.ep)
        engines = await update.connect(self._workers, self._key_file)
        await update.settle_layout(self._workers, self._map.destination)
        opened = self._opened = await open_engines(self._workers, self._plan.config.weights, self._map, trainers, engines)
        endpoints = [endpoint.encode() for endpoint in opened.endpoints]
        return WeightsGrant(version, endpoints, opened.ranks_per_host, opened.map.plan_hash)

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
