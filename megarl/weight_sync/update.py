"""The engines' side of a weight update: stand still, be written to, prove it, go on under the new version.

update = WeightUpdate(workers, version)
await update.open(serving)         # the engines are those that were updated last → pause → SGLang's update session
await update.recall()              # weights.audit=strict: what is about to be overwritten is what was audited last; raises AuditError
… the trainer ranks write (one-sided; Mooncake: `await update.spread()` once all that lands is there), or `await update.receive()`
while they send …
await update.audit(shares, map)    # raises AuditError
await update.close()               # end of session → version → prefix cache emptied → resume
await update.abandon(reason)       # instead, when any of it failed: what may be half-written never generates
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from megarl.generator.client import EngineClient, EngineUnreachable
from megarl.generator.completions import EngineError
from megarl.reshard.forwarding import Relay
from megarl.reshard.map import ReshardMap
from megarl.types import Version
from megarl.weight_sync import commands
from megarl.weight_sync.audit import check_unchanged, compare
from megarl.weight_sync.commands import Audit, End, PassOn, Recall, Receive, Spread
from megarl.weight_sync.workers import Workers

ENDED_S = 10.0  # an engine that was told to end has, or is left to its launcher

Pause = tuple[float, float]  # when the first engine had stopped, and when the last went on, by time.perf_counter


class VersionError(RuntimeError):
    """An engine does not hold the version of the weights that it should."""


@dataclass
class WeightUpdate:
    """One update of all engines. Requests that are running are retracted, and their KV is computed anew from the new weights;
    `in_place`, they keep it."""

    workers: Workers
    version: Version  # that is being written
    in_place: bool = False

    async def open(self, serving: Version | None = None) -> None:
        """Engines stop at a token boundary and open SGLang's update session.

        `serving` is the version they must hold by now (-1: none of ours yet). Raises VersionError where one holds another: it is not the
        process that was updated last, and the memory known of it is not its own. None: not checked.
        """
        if serving is not None:
            await self._check_versions(serving, "was it restarted since the last update?")
        mode = "in_place" if self.in_place else "retract"
        await self._each(lambda engine: engine.pause(self.workers.timeout_s, mode))
        stopped: list[float] = []

        async def begin(engine: EngineClient) -> None:
            await engine.begin_update(self.workers.timeout_s)  # answered when the step that still ran is over
            stopped.append(time.perf_counter())

        await self._each(begin)
        self._began = min(stopped, default=time.perf_counter())

    async def receive(self) -> None:
        """Two-sided transports only: the workers take in what the trainer ranks send meanwhile."""
        await self.workers.run_all(Receive())

    async def spread(self) -> None:
        """Mooncake only, when the trainer ranks have written all that lands: the workers put these boxes where they belong."""
        await self.workers.run_all(Spread())

    async def pass_on(self, relays: Collection[Relay]) -> None:
        """With relays only, when everything is in place at their leaders (after `receive` and `spread`)."""
        payloads = await self.workers.run_all(PassOn())
        lost = {rank for rank, payload in enumerate(payloads) if not payload}
        by_lost = [relay for relay in relays if relay.source_rank in lost]
        left_out = {r.destination_rank: f"generator rank {r.source_rank} was lost before it passed weights on" for r in by_lost}
        for rank, payload in enumerate(payloads):
            for other in msgspec.msgpack.decode(payload, type=commands.Unwritten) if payload else ():
                left_out[other] = f"generator rank {rank} could not pass weights on"
        await self.give_up(left_out)

    async def give_up(self, left_out: Mapping[int, str]) -> None:
        """Goes on without the engines of these generator ranks, which lack a part of the weights, and why. One that still answers is ended,
        so that it is started again. Raises EngineUnreachable where nothing may be lost."""
        places = {rank // self.workers.tp: why for rank, why in left_out.items()}
        missed = {place: why for place, why in places.items() if place not in self.workers.lost}
        engines = {place: self.workers.engines[place] for place in missed}
        losses = {place: EngineUnreachable(engine.url, f"{missed[place]} to engine {engine.url}") for place, engine in engines.items()}
        self.workers.go_on_without(losses)
        for loss in losses.values():
            print(f"it lacks a part of the weights, and is ended: {loss}", flush=True)
        await asyncio.gather(*(self._end(engine) for engine in engines.values()))

    async def _end(self, engine: EngineClient) -> None:
        with contextlib.suppress(EngineError, TimeoutError):  # it does not come to answer
            await engine.command(commands.encode(End()), self.workers.tp, ENDED_S)

    async def audit(self, shares: Iterable[Mapping[int, Mapping[str, int]]], map: ReshardMap, relays: Collection[Relay] = ()) -> None:
        """Compares the senders' hash shares with the hashes of the live parameters, and what no update writes with what it was; raises
        AuditError naming tensors and ranks."""
        payloads = await self.workers.run_all(Audit(self.version))
        gone = {rank for rank, payload in enumerate(payloads) if not payload}
        of_the_living = [{rank: hashes for rank, hashes in each.items() if rank not in gone} for each in shares]
        found = [msgspec.msgpack.decode(payload, type=commands.Found) if payload else commands.Found() for payload in payloads]
        check_unchanged([each.changes for each in found], [engine.url for engine in self.workers.engines])
        hashes = [each.hashes for each in found]
        compare(hashes, of_the_living, map, [relay for relay in relays if not {relay.source_rank, relay.destination_rank} & gone])

    async def recall(self) -> None:
        """Before the first write: raises AuditError, naming tensors and ranks, where parameters are not what the last audit found."""
        payloads = await self.workers.run_all(Recall())
        changes = [msgspec.msgpack.decode(payload, type=commands.Changes) if payload else commands.Changes([], -1) for payload in payloads]
        check_unchanged(changes, [engine.url for engine in self.workers.engines])

    async def close(self) -> Pause:
        """Ends the session, so that post-load work runs; forgets keys and values of older weights; goes on as `version`. Returns when
        the engines stood still.

        In place they cannot be forgotten while requests use them; that they serve no other is the version's work (`EngineClient.complete`).
        Raises VersionError where an engine does not say that it holds `version`; none is resumed then.
        """
        await self._each(lambda engine: engine.end_update(self.workers.timeout_s))
        await self._each(lambda engine: engine.set_version(self.version, self.workers.timeout_s))
        if not self.in_place:
            await self._each(lambda engine: engine.flush(self.workers.timeout_s))
        await self._check_versions(self.version, "somebody else sets versions")
        await self._each(lambda engine: engine.resume(self.workers.timeout_s))
        return self._began, time.perf_counter()

    async def cancel(self) -> None:
        """Before anything was granted: ends the sessions that were begun, with the weights as they were. The engines still stand still."""
        called = (engine.end_update(self.workers.timeout_s) for engine in self.workers.engines)
        for outcome in await asyncio.gather(*called, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):  # (none was begun, or it is the lost one)
                raise outcome

    async def abandon(self, reason: str) -> None:
        """The engines stay as they are, most of them paused; their clients refuse every request: those that run, and those to come."""
        await self._each(lambda engine: engine.condemn(f"its weights may be old or half-written, for an update failed: {reason}"))

    async def _check_versions(self, version: Version, why: str) -> None:
        found: dict[EngineClient, Version] = {}

        async def ask(engine: EngineClient) -> None:
            found[engine] = await engine.version(self.workers.timeout_s)

        await self._each(ask)
        wrong = [f"engine {engine.url} holds weights version {v}" for engine, v in found.items() if v != version]
        if wrong:
            raise VersionError(f"{'; '.join(wrong)}, not {version}: {why}")

    async def _each(self, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        self.workers.go_on_without(await self.workers.each(call))
