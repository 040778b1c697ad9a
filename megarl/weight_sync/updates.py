"""One update of the engines' weights, at the generator: engines pause, are written to, are audited,
and continue.

There is one class for each content: all weights (`WeightUpdate`) or changes (`DeltaUpdate`).
`content.STRATEGIES` lists them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from megarl.base.rollout_types import Version
from megarl.generator.client import EngineClient, EngineUnreachable
from megarl.generator.completions import EngineError
from megarl.messaging.link import Hub
from megarl.messaging.messages import WeightsWritten
from megarl.reshard.forwarding import Relay, SentTensors
from megarl.weight_sync import commands
from megarl.weight_sync.audit import (
    AuditError,
    check_unchanged,
    compare,
    differing,
    expected_hashes_of,
)
from megarl.weight_sync.commands import Audit, EmptyCache, End, PassOn, Recall, Receive, Spread
from megarl.weight_sync.opening import OpenedEngines
from megarl.weight_sync.workers import Workers

ENDED_S = 10.0  # time for an engine to end after it was asked to; later its launcher must end it
_decode_found = msgspec.msgpack.Decoder(commands.AuditResult).decode
_decode_changes = msgspec.msgpack.Decoder(commands.Changes).decode
# times when the first engine stopped and the last one continued, by time.perf_counter
Pause = tuple[float, float]


class VersionError(RuntimeError):
    """An engine has another version of the weights than it should."""


@dataclass
class WeightUpdate:
    """One update of all engines with all weights, in this order:

        update = WeightUpdate(workers, version)
        await update.open(serving)  # checks the version they hold, pauses, begins SGLang's session
        await update.recall()  # weights.audit=strict: nothing has changed since the last audit
        await update.take(opened, writes)  # while the trainer ranks write
        await update.pass_on(relays)  # engines write to engines
        await update.audit(shares, map)  # raises AuditError
        await update.close()  # ends the session, sets the version, empties the cache, resumes
        await update.abandon(reason)  # instead, if anything failed

    Running requests are retracted, and their KV is recomputed under the new weights, unless
    `in_place` lets them keep it. Engines never generate with half-written weights.
    """

    workers: Workers
    version: Version  # the version that is written
    in_place: bool = False
    high_water_bytes: int = 0  # most memory that one of the workers has held, as found by the audit

    passing_on: ClassVar = PassOn()

    async def open(self, serving: Version | None = None) -> None:
        """Pauses the engines at a token boundary and opens SGLang's update session.

        `serving`: the version that they must have now (-1: none of the run's yet; None: not
        checked). Raises VersionError if an engine has another. Such an engine is a new process, and
        its memory is not mapped.
        """
        if serving is not None:
            await self._check_versions(serving, "was it restarted since the last update?")
        mode = "in_place" if self.in_place else "retract"
        await self._each(lambda engine: engine.pause(self.workers.timeout_s, mode))
        stopped: list[float] = []

        async def begin(engine: EngineClient) -> None:
            # it answers once its running step has ended
            await engine.begin_update(self.workers.timeout_s)
            stopped.append(time.perf_counter())

        await self._each(begin)
        self._began = min(stopped, default=time.perf_counter())

    async def take(self, opened: OpenedEngines, writes: Writes) -> None:
        """Waits, after the grant, until the engines to which the trainer ranks write have received
        everything. Gives up engines that lack a part. Raises as `Writes.done` does.
        """
        if not opened.one_sided:
            await self.receive()
        if opened.lands:
            await writes.landed()
            # landed boxes are spread while the rest is written
            await asyncio.gather(self.spread(), writes.done())
        else:
            await writes.done()
        await self.give_up(writes.unwritten)

    async def receive(self) -> None:
        """Only for two-sided transports: the workers receive what the trainer ranks send."""
        await self.workers.run_all(Receive())

    async def spread(self) -> None:
        """Only for Mooncake, once all landing boxes are written: the workers copy them to the
        parameters.
        """
        await self.workers.run_all(Spread())

    async def pass_on(self, relays: Collection[Relay]) -> None:
        """If there are relays, makes the leaders pass on tensors, once the leaders have received
        everything (after `receive` and `spread`).
        """
        leading = {self.workers.place_of(relay.source_rank) for relay in relays}
        places = range(len(self.workers.engines))
        payloads = await self.workers.run(
            [self.passing_on if place in leading else None for place in places]
        )
        reasons = {}
        for relay in relays:
            if not payloads[relay.source_rank]:
                reasons[relay.destination_rank] = (
                    f"generator rank {relay.source_rank} was lost before it passed weights on"
                )
        for rank, payload in enumerate(payloads):
            if payload:
                for unreached in msgspec.msgpack.decode(payload, type=commands.UnreachedRanks):
                    reasons[unreached] = f"generator rank {rank} could not pass weights on"
        await self.give_up(reasons)

    async def give_up(self, reasons_of_ranks: Mapping[int, str]) -> None:
        """Continues without the engines of these generator ranks, which lack a part of the weights,
        for the reasons in `reasons_of_ranks`. Ends those that still answer, so that they are
        started again. Raises EngineUnreachable if no engine may be lost.
        """
        losses = {}
        for rank, reason in reasons_of_ranks.items():
            place = self.workers.place_of(rank)
            if place not in self.workers.lost:
                url = self.workers.engines[place].url
                losses[place] = EngineUnreachable(url, f"{reason} to engine {url}")
        self.workers.go_on_without(losses)
        for loss in losses.values():
            print(f"an engine lacks a part of the weights, and is ended: {loss}", flush=True)
        await asyncio.gather(*map(self._end, losses))

    async def _end(self, place: int) -> None:
        engine = self.workers.engines[place]
        with contextlib.suppress(EngineError, TimeoutError):  # it ends before it answers
            await engine.command(commands.encode(End()), self.workers.tp[place], ENDED_S)

    async def audit(
        self, shares: Sequence[bytes], tensors: SentTensors, relays: Collection[Relay] = ()
    ) -> None:
        """Compares the hashes of the live parameters with the trainer ranks' shares
        (audit.packed_shares). Checks that tensors which no update writes are unchanged. Raises
        AuditError with the names of tensors and ranks.
        """
        payloads = await self.workers.run_all(Audit(self.version))
        results = []
        digests = []
        for payload in payloads:
            result = _decode_found(payload) if payload else commands.AuditResult()
            results.append(result)
            digests.append(result.digest if payload else None)
        self.high_water_bytes = max(result.high_water_bytes for result in results)
        check_unchanged(
            [result.changes for result in results], [engine.url for engine in self.workers.engines]
        )
        differing_ranks = differing(digests, expected_hashes_of(shares, tensors), tensors)
        if differing_ranks:
            compare(await self._hashes(differing_ranks), shares, tensors, relays)
            raise AuditError(
                "weight audit failed: the memory of generator rank "
                f"{', '.join(map(str, differing_ranks))} changes while it is hashed"
            )

    async def _hashes(self, ranks: Collection[int]) -> list[bytes | None]:
        """The hashes of these ranks; None for others."""
        requests = []
        for engine_ranks in self.workers.ranks:
            requests.append(commands.SendHashes() if set(engine_ranks) & set(ranks) else None)
        payloads = await self.workers.run(requests)
        result: list[bytes | None] = []
        for rank, payload in enumerate(payloads):
            result.append(msgspec.msgpack.decode(payload, type=bytes) if rank in ranks else None)
        return result

    async def recall(self, unwritten: bool = False) -> None:
        """Call it before the first write.

        Raises AuditError, with the names of tensors and ranks, if parameters have changed since the
        last audit, or if other tensors have and `unwritten` is true.
        """
        payloads = await self.workers.run_all(Recall(unwritten))
        changes = []
        for payload in payloads:
            changes.append(_decode_changes(payload) if payload else commands.Changes([], -1))
        check_unchanged(changes, [engine.url for engine in self.workers.engines])

    async def close(self) -> Pause:
        """Empties the prefix cache of older weights' keys and values, ends the session, which runs
        SGLang's post-load work, and resumes as `version`. Returns the pause.

        With `in_place`, keys and values are kept, since running requests still use them. Other
        requests do not, because the version is a part of a request's cache key
        (`EngineClient.complete`). Raises VersionError if an engine does not report `version`, and
        then resumes none.
        """
        if not self.in_place:
            await self.workers.run_all(EmptyCache())
        await self._each(lambda engine: engine.end_update(self.workers.timeout_s))
        await self._each(lambda engine: engine.set_version(self.version, self.workers.timeout_s))
        await self._check_versions(self.version, "something else sets versions")
        await self._each(lambda engine: engine.resume(self.workers.timeout_s))
        return self._began, time.perf_counter()

    async def look_again(self) -> None:
        """Call it instead of writing.

        Raises AuditError if anything has changed since the last audit. Otherwise the engines
        continue.
        """
        await self.recall(unwritten=True)
        await self._each(lambda engine: engine.end_update(self.workers.timeout_s))
        await self._each(lambda engine: engine.resume(self.workers.timeout_s))

    async def cancel(self) -> None:
        """Call it before anything is granted.

        Ends the sessions that have begun; weights stay unchanged and engines paused.
        """
        called = (engine.end_update(self.workers.timeout_s) for engine in self.workers.engines)
        for outcome in await asyncio.gather(*called, return_exceptions=True):
            # it had begun no session, or is lost
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):
                raise outcome

    async def abandon(self, reason: str) -> None:
        """Leaves the engines as they are, most of them paused.

        Their clients refuse all requests, running and new.
        """
        await self._each(
            lambda engine: engine.condemn(
                f"its weights may be old or half-written, since an update failed: {reason}"
            )
        )

    async def _check_versions(self, version: Version, explanation: str) -> None:
        versions: dict[EngineClient, Version] = {}

        async def ask(engine: EngineClient) -> None:
            versions[engine] = await engine.version(self.workers.timeout_s)

        await self._each(ask)
        problems = []
        for engine, engine_version in versions.items():
            if engine_version != version:
                problems.append(f"engine {engine.url} holds weights version {engine_version}")
        if problems:
            raise VersionError(f"{'; '.join(problems)}, not {version}: {explanation}")

    async def _each(self, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        self.workers.go_on_without(await self.workers.each(call))


class DeltaUpdate(WeightUpdate):
    """An update with the changes since the previous version."""

    async def take(self, opened: OpenedEngines, writes: Writes) -> None:
        if not opened.one_sided:
            await self.receive()
        await writes.done()
        await self.give_up(writes.unwritten)
        if opened.lands_changes:
            await self.spread()

    async def receive(self) -> None:
        await self.workers.run_all(Receive(self.version))

    async def spread(self) -> None:
        await self.workers.run_all(Spread(self.version))


class Writes:
    """Collects the WeightsWritten messages of one version, at the generator.

    A rank sends one for each part; only the last has no `more`.

    `parts` lists (rank's name, message).
    """

    def __init__(self, link: Hub, trainers: Sequence[str], version: Version, timeout_s: float):
        self._link = link
        self._trainers = trainers
        self._timeout_s = timeout_s
        self._version = version
        self._unheard = set(trainers)
        self._unfinished = set(trainers)  # ranks that have reported nothing, or not everything
        self.parts: list[tuple[str, WeightsWritten]] = []

    async def landed(self) -> None:
        """Returns once each rank has written its first part, so that all landing boxes are written.

        Raises as `done` does.
        """
        await self._until_none_of(self._unheard)

    async def done(self) -> None:
        """Returns once all is written.

        Raises RuntimeError if a rank failed or wrote another version, and TimeoutError if one is
        late.
        """
        await self._until_none_of(self._unfinished)

    async def _until_none_of(self, missing: set[str]) -> None:
        def awaited() -> str:
            return (
                f"{', '.join(name for name in self._trainers if name in missing)} to write "
                f"weights version {self._version}"
            )

        while missing:
            for sender, message in await self._link.arrivals(
                WeightsWritten, self._timeout_s, awaited
            ):
                if sender not in self._unfinished or message.version != self._version:
                    raise RuntimeError(
                        f"{self._link.name} waited for {awaited()}, but {sender} has written "
                        f"version {message.version}"
                    )
                if message.error:
                    raise RuntimeError(
                        f"{sender} could not write weights version {self._version}: {message.error}"
                    )
                self._unheard.discard(sender)
                if not message.more:
                    self._unfinished.discard(sender)
                self.parts.append((sender, message))

    @property
    def bytes_written(self) -> int:
        """The bytes that all trainer ranks have written."""
        return sum(message.bytes_written for _, message in self.parts)

    @property
    def unwritten(self) -> dict[int, str]:
        """Generator ranks to which some trainer rank could not write → the reason."""
        result: dict[int, str] = {}
        for sender, message in self.parts:
            for rank in message.unwritten:
                result[rank] = f"{sender} could not write"
        return result

    def shares(self) -> list[bytes]:
        """Each trainer rank's share of the hashes. Call it when the update is done."""
        shares_of = {}
        for sender, message in self.parts:
            if not message.more:
                shares_of[sender] = message.shares
        return [shares_of[name] for name in self._trainers]
