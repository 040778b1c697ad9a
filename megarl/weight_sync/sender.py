"""The weights channel, sending end: each trainer rank writes its share of every update directly
into the engines (DDMA).

One update, seen from both ends (LlamaRL, section 5.2):

    trainer rank                                generator
    WeightsOffer(version)              →        waits until every rank has offered, pauses engines
    writes its copies of the map       ←        WeightsGrant(version, endpoints)
    WeightsWritten(version, shares)    →        audits the memory, ends the update, resumes engines
    goes on training                   ←        WeightsApplied(version), read at the step's report

`content.STRATEGIES` lists the classes that define the content of an update and prepare it before
the offer.

Boxes that go through landing memory (Mooncake) are written first. A WeightsWritten with `more`
announces that the rest follows, so that the workers spread the landed boxes meanwhile.

No rank gathers a tensor, and no rank sends for another. The reshard map says which rank writes
which box to which place. Trainer ranks that share a quantisation tile exchange its amax before they
offer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch

from megarl.base.rollout_types import Version
from megarl.config.errors import RunError
from megarl.config.schema import STRICT
from megarl.messaging.link import Peer
from megarl.messaging.messages import (
    Hello,
    LookAgain,
    LookedAgain,
    ProbeReady,
    WeightsApplied,
    WeightsGrant,
    WeightsWritten,
)
from megarl.messaging.process_groups import StopRequest
from megarl.messaging.rendezvous import GENERATOR
from megarl.observe.status import StatusBoard, TraceWriter
from megarl.plan.resolve import RunPlan
from megarl.reshard.forwarding import RelayRule, relayed
from megarl.reshard.layout import Layout, LayoutError
from megarl.weight_sync.audit import packed_shares
from megarl.weight_sync.content import is_probe_version, strategy_of, weights_map
from megarl.weight_sync.transports.base import decode_endpoints
from megarl.weight_sync.transports.choice import PairwiseTransport, this_host
from megarl.weight_sync.writing import FullUpdates

M = TypeVar("M", WeightsGrant, ProbeReady)


@dataclass
class SyncReport:
    """The cost of one weight update to a trainer rank, including repeats for engines that have come
    back.
    """

    wait_s: float = 0.0  # until the generator granted it
    sync_s: float = 0.0  # from the grant until everything was written


class WeightsExecutor(Protocol):
    """What the sending end needs of the trainer's executor."""

    rank: int
    device: torch.device
    status: StatusBoard
    trace: TraceWriter

    @property
    def version(self) -> Version:
        """The version of its weights."""
        ...

    @property
    def layout(self) -> Layout:
        """The layout of the weights on the trainer's ranks."""
        ...

    def get_model(self) -> Mapping[str, torch.Tensor]: ...

    def put_sync(
        self, report: SyncReport, applied: Callable[[], WeightsApplied | None]
    ) -> None: ...

    def compare_probe(self, probe: ProbeReady) -> None: ...


class WeightsSender:
    """The trainer's end.

    Construct it on every trainer rank. All ranks call `send` once per version.
    """

    receiver = GENERATOR
    purpose = ""  # in the trace, the purpose of the engines

    def __init__(self, plan: RunPlan, link: Peer, stop: StopRequest | None = None):
        config = plan.config
        self._stop = stop or StopRequest()
        self._plan = plan
        self._link = link
        self._timeout_s = config.timeouts.weights_s
        self._probe_every = config.observe.probe_every
        self._mapped_plan = plan  # with the engines in the map
        self._updates: FullUpdates | None = None  # set from the first offer on
        self._report = SyncReport()  # report of the newest version
        # the newest written version, until the generator confirms it
        self._unconfirmed: Version | None = None
        self._applied: WeightsApplied | None = None  # the newest confirmation
        self._offered = self._written = -1  # the newest offered and written versions

    def send(self, executor: WeightsExecutor, repeat: bool = False) -> None:
        """Offers the executor's weights, waits for the grant, and writes.

        Gives the executor a SyncReport, unless the run stops.

        `repeat` repeats a version for an engine that has come back, and adds the cost to that
        version's report.

        The grant has the deadline of a batch, since with `async.partial_rollout=block` the grant
        waits for rollouts to finish. The first grant also waits for the engines to start.
        """
        version = executor.version
        self._report = report = self._report if repeat else SyncReport()
        grant = self._bring(executor, report, repeat)
        if grant is None or grant.is_empty:
            return
        executor.put_sync(report, applied=partial(self._await_applied, version))
        if is_probe_version(version, self._probe_every) and not repeat:
            awaited = f"log-probs of the probe of version {version} from {self.receiver}"
            with executor.trace.span(f"probe version {version}"):
                probe = self._unless_stopped(executor, ProbeReady, self._timeout_s, awaited)
                if probe is not None:
                    executor.compare_probe(probe)

    def _bring(
        self, executor: WeightsExecutor, report: SyncReport, repeat: bool = False
    ) -> WeightsGrant | None:
        """Offers the weights, and writes them if they are wanted.

        Returns the grant; None if the run stops before it comes.
        """
        version = executor.version
        grant_s = self._plan.config.timeouts.rollouts_s
        if self._updates is None:
            grant_s += self._plan.config.generator.startup_timeout_s
            self._updates = self._prepare(executor)
        base = self._base() if self._updates.compares and not repeat else -1
        offer = self._updates.offer(version, base, executor.get_model(), executor.trace)
        self._offered = version
        self._link.send(offer)
        grant = self._send_granted(executor, self._updates, report, grant_s)
        if grant is not None and not grant.is_empty:
            self._unconfirmed = version
            self._applied = None
            self._written = version
        return grant

    def _base(self) -> Version:
        """The version that all engines hold; -1 if there is none, or if the run stops before the
        generator confirms it.
        """
        if self._unconfirmed is not None and self._await_applied(self._unconfirmed) is None:
            return -1
        if self._applied is None:
            return -1
        return self._applied.version

    def _send_granted(
        self, executor: WeightsExecutor, updates: FullUpdates, report: SyncReport, timeout_s: float
    ) -> WeightsGrant | None:
        """Waits for the grant, and writes unless there is nothing to write to.

        Returns the grant; None if the run stops first.
        """
        version = executor.version
        offered_at = time.monotonic()
        with executor.trace.span(f"wait for {self.purpose}engines to take weights {version}"):
            grant = self._unless_stopped(
                executor,
                WeightsGrant,
                timeout_s,
                f"{self.receiver} to take weights version {version}",
            )
        if grant is None:
            return None
        if grant.version != version:
            problem = f"{self.receiver} granted version {grant.version}"
            raise RuntimeError(
                f"trainer.{executor.rank} offered weights version {version}, {problem}"
            )
        granted_at = time.monotonic()
        report.wait_s += granted_at - offered_at
        if grant.is_empty:
            return grant
        with executor.trace.span(f"write {self.purpose}weights {version}") as span_values:
            try:
                span_values["bytes"] = self._write(executor, updates, grant)
            except Exception as error:
                # tells the generator at once, so that it need not wait until its deadline
                self._link.send(WeightsWritten(version, 0, 0.0, error=str(error) or repr(error)))
                raise
        report.sync_s += time.monotonic() - granted_at
        return grant

    def _unless_stopped(
        self, executor: WeightsExecutor, kind: type[M], timeout_s: float, awaited: str
    ) -> M | None:
        """A message that the receiver sends to every rank, or None on every rank if the run must
        stop. Collective.
        """
        with executor.status.waiting(self.receiver, awaited):
            arrival = self._link.receive_unless(self._stop_asked, kind, timeout_s, awaited)
        if self._stop.agree(arrival is None, executor.device):
            return None
        assert arrival is not None  # otherwise all ranks would have agreed to stop
        return arrival[1]

    def _stop_asked(self) -> bool:
        return self._stop.is_made

    def _await_applied(self, version: Version) -> WeightsApplied | None:
        """The receiver's confirmation that the engines serve `version`; None if the run must stop
        before it comes.
        """
        while self._applied is None or self._applied.version != version:
            awaited = f"{self.receiver} to apply weights version {version}"
            arrival = self._link.receive_unless(
                self._stop_asked, WeightsApplied, self._timeout_s, awaited
            )
            if arrival is None:
                return None
            applied = arrival[1]
            if applied.version > version:
                raise RuntimeError(
                    f"weights version {version} was written last, {self.receiver} applied version "
                    f"{applied.version}"
                )
            self._applied = applied
        self._unconfirmed = None
        return self._applied

    def _prepare(self, executor: WeightsExecutor) -> FullUpdates:
        """Before any write: computes the map from the two layouts, proves it, and sends its hash
        and this rank's host to the generator.
        """
        config = self._plan.config
        self._whole_map = weights_map(self._plan, executor.layout)  # includes what engines pass on
        host = this_host()
        may_lose = config.generator.on_failure != "fail"
        transport = PairwiseTransport(
            config.weights.transport, host, executor.rank, self._timeout_s, may_lose
        )
        updates = strategy_of(self._plan).trainer_updates(
            transport, self._whole_map, executor.rank, config
        )
        check_parameters(executor.get_model(), self._whole_map.source, executor.rank)
        self._link.send(Hello(self._whole_map.plan_hash, host))
        return updates

    def _write(self, executor: WeightsExecutor, updates: FullUpdates, grant: WeightsGrant) -> int:
        """Writes the update. Returns the number of bytes."""
        if grant.plan_hash:
            self._connect(executor, updates, grant)
        size_bytes = 0
        started = time.monotonic()
        for part, shares in updates.write(grant, executor.get_model()):
            write_s = time.monotonic() - started
            is_partial = shares is None
            unwritten = sorted(updates.transport.unwritten)
            self._link.send(
                WeightsWritten(
                    grant.version,
                    part.bytes,
                    write_s,
                    packed_shares(shares or {}),
                    unwritten=unwritten,
                    more=is_partial,
                )
            )
            size_bytes = size_bytes + part.bytes
            started = time.monotonic()
        return size_bytes

    def _connect(
        self, executor: WeightsExecutor, updates: FullUpdates, grant: WeightsGrant
    ) -> None:
        """Connects to the engines that take part from now on."""
        plan = self._plan.with_engines(grant.engines)
        if plan.groups != self._mapped_plan.groups:
            self._whole_map = weights_map(plan, executor.layout)
            self._mapped_plan = plan
        if grant.relay is None:
            map = self._whole_map
        else:
            map = relayed(self._whole_map, RelayRule(*grant.relay))[0]
        if map.plan_hash != grant.plan_hash:
            raise RuntimeError(
                f"trainer.{executor.rank} computed map {map.plan_hash} for these engines, "
                f"{self.receiver} {grant.plan_hash}"
            )
        updates.connect(map, decode_endpoints(grant.endpoints), executor.get_model())
        executor.trace.mark(f"{self.purpose}weights map", to=updates.bytes_by_receiver())

    def close(self) -> None:
        """Waits until the last weights are in use, since the generator would count a rank that
        leaves early as lost.
        """
        if self._unconfirmed is not None:  # a run that stops does not wait
            self._await_applied(self._unconfirmed)
        # (An unanswered offer keeps the engines paused.) After the last version, the generator
        # compares without being asked.
        if (
            self._stop.is_made
            and self._link.name == "trainer.0"
            and -1 < self._offered == self._written < self._plan.config.max_steps
        ):
            self._look_again()
        if self._updates is not None:
            self._updates.transport.close()

    def _look_again(self) -> None:
        """The last audit when the run stops, since no further update will find changes in the
        engines. Raises RunError if memory has changed.
        """
        config = self._plan.config
        left_s = config.checkpoint.on_termination_s - (time.monotonic() - self._stop.since)
        if config.weights.audit != STRICT or left_s <= 0:
            return
        self._link.send(LookAgain())
        try:
            _, answer = self._link.receive(
                LookedAgain,
                min(left_s / 2, self._timeout_s),
                f"{self.receiver} to look at the engines again",
            )
        except TimeoutError as error:
            answer = LookedAgain(obstacle=str(error))
        if answer.obstacle:
            print(
                "the engines' memory was not compared with the last audit again: "
                f"{answer.obstacle}",
                flush=True,
            )
        if answer.problem:
            raise RunError(answer.problem)


def check_parameters(parameters: Mapping[str, torch.Tensor], layout: Layout, rank: int) -> None:
    """Raises LayoutError that names every tensor in which a trainer rank's live parameters differ
    from the map's layout.
    """
    live = {}
    for name, values in parameters.items():
        live[name] = (tuple(values.shape), str(values.dtype).removeprefix("torch."))
    planned = {tensor.name: (tensor.shape, tensor.dtype) for tensor in layout.tensors(rank)}
    differing_names = sorted(
        name for name in live.keys() | planned.keys() if live.get(name) != planned.get(name)
    )
    if differing_names:
        lines = []
        for name in differing_names:
            lines.append(
                f"trainer rank {rank}, {name}: shape, dtype {live.get(name)}, in the layout "
                f"{planned.get(name)}"
            )
        raise LayoutError("the trainer's weights are not laid out as planned:\n" + "\n".join(lines))
