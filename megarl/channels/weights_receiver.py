"""The weights channel, receiving end: the generator lets the trainer ranks write into its engines.

See weights_sender for one update seen from both ends.
"""

from __future__ import annotations

import time

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


class WeightsReceiver:
    """Trainer → generator, at the generator's only process.

    `capacity` is how many versions the engines may be behind when the generator starts a batch: batch s is started under
    version s - capacity or newer.
    """

    name = "weights"
    outbound = "trainer"
    inbound = "generator"
    type = ChannelType.DDMA_WEIGHTS_UPDATE

    def __init__(self, plan: RunPlan, source: Layout, link: Hub, key_file: str):
        self._plan, self._link, self._key_file = plan, link, key_file
        self.capacity = plan.config.async_.capacity
        self._map = weights_map(plan, source)
        self._trainers = [f"trainer.{rank}" for rank in range(plan.trainer_topology.world_size)]
        self._offers: dict[int, set[str]] = {}  # version → trainer ranks that have offered it
        self._workers: update.Workers | None = None
        self._opened: Opened | None = None

    def recv(self, executor: Executor) -> None:
        """Takes the weights that the coming batch needs, waiting for them, and any newer ones on offer."""
        self.take(executor, oldest=executor.curr_step - self.capacity)

    def take(self, executor: Executor, oldest: int) -> None:
        """Updates the engines until they hold version `oldest` or a newer one, and whatever is on offer by then."""
        while executor.version < oldest or self._complete_offer() is not None:
            version = self._complete_offer()
            if version is None:
                version = self._await_offer(executor)
            self._update(executor, version)

    def _complete_offer(self) -> int | None:
        """A version that every trainer rank stands still for."""
        while (found := self._link.poll(WeightsOffer)) is not None:
            self._note(*found)
        return next((version for version, ranks in self._offers.items() if len(ranks) == len(self._trainers)), None)

    def _await_offer(self, executor: Executor) -> int:
        started = time.monotonic()
        while (version := self._complete_offer()) is None:
            awaited = f"weights newer than version {executor.version} from {self._missing()}"
            with executor.status.waiting("trainer", awaited):
                self._note(*self._link.receive(WeightsOffer, self._plan.config.timeouts.rollouts_s, awaited))
        executor.waited_s += time.monotonic() - started
        return version

    def _note(self, sender: str, offer: WeightsOffer) -> None:
        self._offers.setdefault(offer.version, set()).add(sender)

    def _missing(self) -> str:
        offered = set().union(*self._offers.values())
        return ", ".join(name for name in self._trainers if name not in offered)

    def _update(self, executor: Executor, version: int) -> None:
        """One update: engines stand still, ranks write, the memory is audited, engines go on as `version`."""
        config = self._plan.config
        del self._offers[version]
        with executor.trace.span(f"update to weights {version}"):
            grant = WeightsGrant(version, [])
            first = self._workers is None
            if first:
                hosts = self._meet_trainers()
                self._workers = update.Workers(executor.get_model().engines, config.generator.tp, self._link, config.timeouts.weights_s)
            session = update.WeightUpdate(self._workers)
            executor.run(session.open())
            if first:
                opened = self._opened = executor.run(self._open(hosts))
                grant = WeightsGrant(version, [e.encode() for e in opened.endpoints], opened.ranks_per_host, opened.map.plan_hash)
            for name in self._trainers:
                self._link.send(name, grant)
            if self._opened.kinds.intersection(TWO_SIDED):
                executor.run(session.receive())
            written = [self._await_written(version) for _ in self._trainers]
            if MOONCAKE in self._opened.kinds:
                executor.run(session.spread())
            if self._opened.relays:
                executor.run(session.pass_on())
            if config.weights.audit:
                executor.run(session.audit([message.shares for message in written], self._opened.map, self._opened.relays))
            executor.run(session.close(version))
        executor.version = version
        total = sum(message.bytes_written for message in written)
        applied = WeightsApplied(version, config.weights.audit, session.pause_s, total)
        for name in self._trainers:
            self._link.send(name, applied)
        if is_probe_version(version, config.observe.probe_every):
            probe = executor.probe()
            for name in self._trainers:
                self._link.send(name, probe)

    def _await_written(self, version: int) -> WeightsWritten:
        awaited = f"the trainer ranks to write weights version {version}"
        _, message = self._link.receive(WeightsWritten, self._plan.config.timeouts.weights_s, awaited)
        assert message.version == version
        return message

    def _meet_trainers(self) -> list[Host]:
        """Both ends must have computed the same map, before the first byte is written. Where each trainer rank runs."""
        hosts: dict[str, Host] = {}
        for _ in self._trainers:
            sender, hello = self._link.receive(Hello, self._plan.config.timeouts.rendezvous_s, "the trainer ranks' reshard maps")
            if hello.plan_hash != self._map.plan_hash:
                raise RuntimeError(f"{sender} computed reshard map {hello.plan_hash}, the generator {self._map.plan_hash}")
            hosts[sender] = hello.host
        return [hosts[name] for name in self._trainers]

    async def _open(self, trainers: list[Host]) -> Opened:
        """Compares the live engines with the map's destination layout, then makes their parameters writable.

        `trainers`: where each trainer rank runs.
        """
        engines = await update.connect(self._workers, self._key_file)
        await update.settle_layout(self._workers, self._map.destination)
        return await open_engines(self._workers, self._plan.config.weights, self._map, trainers, engines)

    def send(self, executor: Executor) -> None:
        raise AssertionError("the generator does not send weights")

    def close(self) -> None:
        """The link is closed by the rollouts channel, which shares it."""


class SynchronousWeightsReceiver:
    """The same channel with capacity 0: the weights the run starts from, and those it ends with."""

    def __init__(self, channel: WeightsReceiver):
        self._channel = channel
        self.name, self.outbound, self.inbound, self.type, self.capacity = "initial_weights", "trainer", "generator", channel.type, 0

    def recv(self, executor: Executor) -> None:
        self._channel.take(executor, oldest=executor.curr_step)

    def send(self, executor: Executor) -> None:
        self._channel.send(executor)

    def close(self) -> None:
        pass
