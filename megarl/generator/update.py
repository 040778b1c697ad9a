"""The engines' side of a weight update: stand still, be written to, prove it, go on under the new version.

    update = WeightUpdate(workers)
    await update.open(serving)         # the engines are those that were updated last → pause → SGLang's update session
    … the trainer ranks write (one-sided; Mooncake: then `await update.spread()`), or `await update.receive()` while they send …
    await update.audit(shares, map)    # raises AuditError
    await update.close(version)        # end of session → version → prefix cache emptied → resume
    await update.abandon(reason)       # instead, when any of it failed: what may be half-written never generates
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Awaitable, Callable, Collection, Iterable, Mapping, Optional, Sequence

import msgspec
import torch.distributed as dist

from megarl.generator import commands
from megarl.generator.client import EngineClient, EngineError, EngineUnreachable
from megarl.generator.commands import (
    Arrange,
    Audit,
    Command,
    Connect,
    Describe,
    ExpectMessages,
    PassOn,
    Receive,
    Register,
    ShareDevice,
    ShareMemory,
    Spread,
)
from megarl.messaging.host import Host
from megarl.messaging.link import Hub
from megarl.messaging.messages import WorkerReply
from megarl.reshard.audit import MASK
from megarl.reshard.box import Box
from megarl.reshard.kinds import ITEM_BYTES, Layout, LayoutError
from megarl.reshard.map import ReshardMap
from megarl.reshard.nodes import Relay
from megarl.reshard.scales import engine_view
from megarl.reshard.schedule import lands, waves
from megarl.transports.base import CUDA_IPC, MOONCAKE, SHARED_MEMORY, TWO_SIDED, Endpoint, Members, RemoteTensor
from megarl.transports.choice import Pairs, mooncake_protocol, this_host
from megarl.transports.two_sided import Incoming
from megarl.types import Version

Writers = Mapping[int, Collection[int]]  # generator rank → trainer ranks that write to it


class AuditError(RuntimeError):
    """What lies in an engine's memory is not what was sent."""


class VersionError(RuntimeError):
    """An engine does not hold the version of the weights that it should."""


@dataclass
class Workers:
    """All TP workers of all engines. Generator rank g is TP rank g % tp of engine g // tp."""

    engines: Sequence[EngineClient]
    tp: int
    hub: Hub  # answers come here
    timeout_s: float  # of one command
    stores: dict[str, dist.TCPStore] = field(default_factory=dict)  # where the groups of two-sided transports meet, by kind
    may_lose: bool = False  # what is done goes on without an engine that becomes unreachable
    lost: dict[int, EngineUnreachable] = field(default_factory=dict)  # by place in `engines`
    connection: str = field(default_factory=lambda: secrets.token_hex(4))  # what the workers' own names end with

    @property
    def count(self) -> int:
        return len(self.engines) * self.tp

    async def run(self, per_engine: Sequence[Command]) -> list[bytes]:
        """One command per engine, inside an open update session; the answer's payload by generator rank, empty from a lost one.

        Raises RuntimeError with the worker's traceback when one failed, TimeoutError when one did not answer, EngineUnreachable.
        """
        name = type(per_engine[0]).__name__
        commanded = dict(zip(self.engines, per_engine))
        unreachable = await self.each(lambda engine: engine.command(commands.encode(commanded[engine]), self.tp, self.timeout_s))
        awaited = {rank for rank in range(self.count) if rank // self.tp not in self.lost.keys() | unreachable.keys()}
        payloads: dict[int, bytes] = {}
        while missing := awaited - payloads.keys():
            ranks = ", ".join(map(str, sorted(missing)))
            sender, reply = await self.hub.arrival(WorkerReply, self.timeout_s, f"the answer of generator rank {ranks} to {name}")
            if not sender.endswith(self.connection) or reply.command != name or reply.generator_rank not in awaited:
                continue  # an engine's that was lost after it had answered
            if reply.error:
                raise RuntimeError(f"generator rank {reply.generator_rank} failed at {reply.command}:\n{reply.error}")
            payloads[reply.generator_rank] = reply.payload
        self.go_on_without(unreachable)
        return [payloads.get(rank, b"") for rank in range(self.count)]

    async def each(self, call: Callable[[EngineClient], Awaitable[None]]) -> dict[int, EngineUnreachable]:
        """Calls all engines but the lost ones, and waits for all. Returns those that could not be reached; raises what else went wrong."""
        places = [place for place in range(len(self.engines)) if place not in self.lost]
        outcomes = await asyncio.gather(*(call(self.engines[place]) for place in places), return_exceptions=True)
        failed = {place: outcome for place, outcome in zip(places, outcomes) if isinstance(outcome, BaseException)}
        for outcome in failed.values():
            if not isinstance(outcome, EngineUnreachable):
                raise outcome
        return failed

    def go_on_without(self, unreachable: Mapping[int, EngineUnreachable]) -> None:
        """Raises one of them where nothing may be lost."""
        if unreachable and not self.may_lose:
            raise next(iter(unreachable.values()))
        self.lost |= unreachable

    async def run_all(self, command: Command) -> list[bytes]:
        return await self.run([command] * len(self.engines))


async def check_parallelism(workers: Workers, ep: int) -> None:
    """Raises LayoutError that names every engine with other parallel sizes than planned. Before `connect`: commands go to so many ranks."""
    found = await asyncio.gather(*(engine.parallelism(workers.timeout_s) for engine in workers.engines))
    wrong = [
        f"engine {engine.url} runs with tp={sizes.tp_size}, ep={sizes.ep_size}"
        for engine, sizes in zip(workers.engines, found)
        if (sizes.tp_size, sizes.ep_size) != (workers.tp, ep)
    ]
    if wrong:
        raise LayoutError(f"{'; '.join(wrong)}, the reshard map is for tp={workers.tp}, ep={ep}")


async def connect(workers: Workers, key_file: str) -> list[Host]:
    """Once, before anything else. Needs an open update session. Where each generator rank runs."""
    first_ranks = range(0, workers.count, workers.tp)
    payloads = await workers.run([Connect(rank, workers.hub.address, workers.connection, key_file) for rank in first_ranks])
    return [msgspec.msgpack.decode(payload, type=Host) for payload in payloads]


async def describe(workers: Workers) -> list[list[RemoteTensor]]:
    """Every live parameter, by generator rank."""
    return [msgspec.msgpack.decode(payload, type=commands.Description) for payload in await workers.run_all(Describe())]


async def settle_layout(workers: Workers, layout: Layout) -> None:
    """Checks the live engines against the layout, and makes their workers speak of parameters in its shapes. Raises LayoutError."""
    check_layout(await describe(workers), layout)
    shapes = {rank: {t.name: t.shape for t in layout.tensors(rank) if t.engine_shape is not None} for rank in range(workers.count)}
    if any(shapes.values()):
        await workers.run_all(Arrange(shapes))


def check_layout(live: Sequence[Sequence[RemoteTensor]], layout: Layout) -> None:
    """Raises LayoutError that names every tensor in which the engines differ from the layout the map was built on."""
    problems = []
    for rank, tensors in enumerate(live):
        found = {tensor.name: tensor for tensor in tensors}
        planned = {tensor.name: tensor for tensor in layout.tensors(rank)}
        for name in planned.keys() - found.keys():
            problems.append(f"generator rank {rank} has no {name}")
        for name in found.keys() - planned.keys():
            problems.append(f"generator rank {rank} has {name}, which the layout does not know")
        for name in planned.keys() & found.keys():
            want, have = planned[name], found[name]
            wanted, had = (*engine_view(want), want.dtype), (have.shape, have.strides, have.dtype)
            if wanted != had:
                problems.append(f"generator rank {rank}, {name}: shape, strides, dtype {had}, in the layout {wanted}")
    if problems:
        raise LayoutError("the engines' weights are not laid out as planned:\n" + "\n".join(sorted(problems)))


async def open_memory(
    workers: Workers, kind: str, map: Optional[ReshardMap], writers: Optional[Writers] = None, protocol: Optional[str] = None
) -> list[Endpoint]:
    """Makes the live parameters writable by transports of `kind`, once; the endpoint of every generator rank in `writers`.

    `writers` says which trainer ranks will write to which generator ranks in this way; None: all to all. `protocol` is Mooncake's;
    None: what this host would use. `map` may be None for memory that is only mapped. Needs an open update session.
    """
    if writers is None:
        writers = {rank: range(map.source.world_size) if map else () for rank in range(workers.count)}
    if kind == SHARED_MEMORY:
        command: Command = ShareMemory()
    elif kind == CUDA_IPC:
        command = ShareDevice()
    elif kind == MOONCAKE:
        landing = {rank: _landing(map, rank, senders) for rank, senders in writers.items()}
        command = Register(protocol or mooncake_protocol([this_host()]), landing)
    else:
        command = _meeting(workers, kind, map, writers)
    opened = [msgspec.msgpack.decode(payload, type=commands.Opened) for payload in await workers.run_all(command)]
    return [endpoint for endpoint in opened if endpoint is not None and endpoint.rank in writers]


async def open_memories(workers: Workers, pairs: Pairs, map: ReshardMap, protocol: str) -> list[Endpoint]:
    """Opens every generator rank in all ways that `pairs` asks for. Sharing moves parameters, so it comes before what pins them."""
    endpoints: list[Endpoint] = []
    for kind in (SHARED_MEMORY, CUDA_IPC, MOONCAKE, *TWO_SIDED):
        of_rank = {rank: [t for t, each in enumerate(kinds) if each == kind] for rank, kinds in enumerate(pairs)}
        writers = {rank: trainers for rank, trainers in of_rank.items() if trainers}
        if writers:
            endpoints += await open_memory(workers, kind, map, writers, protocol)
    return endpoints


@dataclass
class WeightUpdate:
    """One update of all engines. `pause_s` is how long they stood still, once closed.

    Requests that are running are retracted, and their KV is computed anew from the new weights; `in_place`, they keep it.
    """

    workers: Workers
    in_place: bool = False
    pause_s: float = 0.0

    async def open(self, serving: Optional[Version] = None) -> None:
        """Engines stop at a token boundary and open SGLang's update session.

        `serving` is the version they must hold by now (-1: none of ours yet). Raises VersionError where one holds another: it is not the
        process that was updated last, and the memory known of it is not its own. None: not checked.
        """
        if serving is not None:
            await self._check_versions(serving, "was it restarted since the last update?")
        self._began = time.monotonic()
        mode = "in_place" if self.in_place else "retract"
        await self._each(lambda engine: engine.pause(self.workers.timeout_s, mode))
        await self._each(lambda engine: engine.begin_update(self.workers.timeout_s))

    async def receive(self) -> None:
        """Two-sided transports only: the workers take in what the trainer ranks send meanwhile."""
        await self.workers.run_all(Receive())

    async def spread(self) -> None:
        """Mooncake only, when the trainer ranks have written all: the workers put the boxes of short rows where they belong."""
        await self.workers.run_all(Spread())

    async def pass_on(self) -> None:
        """With relays only, when everything is in place at their leaders (after `receive` and `spread`)."""
        await self.workers.run_all(PassOn())

    async def audit(
        self, shares: Iterable[Mapping[int, Mapping[str, int]]], map: ReshardMap, relays: Collection[Relay] = ()
    ) -> None:
        """Compares the senders' hash shares with the live parameters' hashes; raises AuditError naming tensors and ranks."""
        payloads = await self.workers.run_all(Audit())
        gone = {rank for rank, payload in enumerate(payloads) if not payload}
        of_the_living = [{rank: hashes for rank, hashes in each.items() if rank not in gone} for each in shares]
        found = [msgspec.msgpack.decode(payload, type=commands.Hashes) if payload else {} for payload in payloads]
        compare(found, of_the_living, map, relays)

    async def close(self, version: Version) -> None:
        """Ends the session, so that post-load work runs; forgets keys and values of older weights; goes on as `version`.

        In place they cannot be forgotten while requests use them; that they serve no other is the version's work (`EngineClient.complete`).
        Raises VersionError where an engine does not say that it holds `version`; none is resumed then.
        """
        await self._each(lambda engine: engine.end_update(self.workers.timeout_s))
        await self._each(lambda engine: engine.set_version(version, self.workers.timeout_s))
        if not self.in_place:
            await self._each(lambda engine: engine.flush(self.workers.timeout_s))
        await self._check_versions(version, "somebody else sets versions")
        await self._each(lambda engine: engine.resume(self.workers.timeout_s))
        self.pause_s = time.monotonic() - self._began

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


def compare(
    found: Sequence[Mapping[str, int]],
    shares: Iterable[Mapping[int, Mapping[str, int]]],
    map: ReshardMap,
    relays: Collection[Relay] = (),
) -> None:
    """`found[generator rank][tensor]` against the sum of the senders' shares modulo 2^64. Raises AuditError.

    What a relay brought must be what was sent to its leader.
    """
    sent: dict[tuple[int, str], int] = defaultdict(int)
    for of_sender in shares:
        for rank, tensors in of_sender.items():
            for name, share in tensors.items():
                sent[rank, name] = (sent[rank, name] + share) & MASK
    leaders = {(relay.destination_rank, relay.tensor): relay.source_rank for relay in relays}
    sent |= {(rank, name): sent[leader, name] for (rank, name), leader in leaders.items()}
    there = {(rank, name): value for rank, hashes in enumerate(found) for name, value in hashes.items()}
    wrong = sorted(key for key in there.keys() | sent.keys() if there.get(key) != sent.get(key))
    if wrong:
        lines = [f"{name} on generator rank {rank} is not what {_sent(map, rank, name, leaders)}" for rank, name in wrong]
        raise AuditError("weight audit failed:\n" + "\n".join(lines))


def open_store(host: str) -> dist.TCPStore:
    """Listens on `host` alone; by itself torch would listen on every interface."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _sent(map: ReshardMap, rank: int, name: str, leaders: Mapping[tuple[int, str], int]) -> str:
    """Who should have filled a tensor, and how it got there."""
    leader = leaders.get((rank, name), rank)
    ranks = {copy.source_rank for copy in map.writes_to(leader) if copy.destination_tensor == name}
    by_relay = "" if leader == rank else f", passed on by generator rank {leader}"
    return f"trainer rank {', '.join(str(source) for source in sorted(ranks))} sent{by_relay}"


def _landing(map: ReshardMap, rank: int, senders: Collection[int]) -> list[tuple[str, Box]]:
    shapes = {tensor.name: tensor.shape for tensor in map.destination.tensors(rank)}
    return [
        (copy.destination_tensor, copy.destination_box)
        for copy in map.writes_to(rank)
        if copy.source_rank in senders and lands(copy.destination_box, shapes[copy.destination_tensor], ITEM_BYTES[copy.dtype])
    ]


def _meeting(workers: Workers, kind: str, map: ReshardMap, writers: Writers) -> ExpectMessages:
    host = workers.hub.address.rpartition("/")[2].rpartition(":")[0]
    workers.stores[kind] = open_store(host)
    trainers = sorted({rank for senders in writers.values() for rank in senders})
    members = Members(tuple(trainers), tuple(sorted(writers)), waves(map))
    incoming = {
        rank: [
            Incoming(copy.source_rank, copy.destination_tensor, copy.destination_box, members.waves[copy.depth])
            for copy in map.writes_to(rank)
            if copy.source_rank in senders
        ]
        for rank, senders in writers.items()
    }
    return ExpectMessages(kind, f"{host}:{workers.stores[kind].port}", members, incoming, workers.timeout_s)
