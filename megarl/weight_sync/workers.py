"""Sends commands to all workers of the engines; their answers come back over the run's hub.

Commands need an open update session: SGLang passes none to its workers outside one. Before the first write of a run call `connect`, then
`settle_layout`, which compares the live parameters with the layout that the reshard map was built on.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import torch.distributed as dist

from megarl.files import write_whole
from megarl.generator.client import EngineClient, EngineUnreachable
from megarl.messaging.host import Host
from megarl.messaging.link import Hub
from megarl.messaging.messages import WorkerReply
from megarl.reshard.kinds import Layout, LayoutError
from megarl.reshard.scales import engine_view
from megarl.topology import GeneratorTopology
from megarl.weight_sync import commands
from megarl.weight_sync.audit import check_proven
from megarl.weight_sync.commands import Arrange, Command, Connect, Describe
from megarl.weight_sync.transports.base import RemoteTensor


@dataclass
class Workers:
    """All TP workers of all engines. Generator rank g is TP rank g % tp of engine g // tp."""

    engines: Sequence[EngineClient]
    tp: int
    hub: Hub  # answers come here
    timeout_s: float  # of one command
    stores: list[dist.Store] = field(default_factory=list)  # where the process groups of transports meet
    may_lose: bool = False  # whether commands go on without an engine that becomes unreachable
    lost: dict[int, EngineUnreachable] = field(default_factory=dict)  # by index in `engines`
    connection: str = field(default_factory=lambda: secrets.token_hex(4))  # suffix of the workers' names

    @property
    def count(self) -> int:
        return len(self.engines) * self.tp

    @property
    def address(self) -> str:
        """The address of this host at which the engines reach it."""
        return urlsplit(self.hub.address).hostname or ""

    @property
    def ranks(self) -> list[range]:
        """The generator ranks of each engine."""
        return [range(first, first + self.tp) for first in range(0, self.count, self.tp)]

    async def run(self, per_engine: Sequence[Command]) -> list[bytes]:
        """Sends one command to each engine. Returns the answers' payloads by generator rank; that of a lost one is empty.

        Raises RuntimeError with the worker's traceback when one failed, TimeoutError when one did not answer, and EngineUnreachable.
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
                continue  # from an engine that was lost after it had answered
            if reply.error:
                raise RuntimeError(f"generator rank {reply.generator_rank} failed at {reply.command}:\n{reply.error}")
            payloads[reply.generator_rank] = reply.payload
        self.go_on_without(unreachable)
        return [payloads.get(rank, b"") for rank in range(self.count)]

    async def each(self, call: Callable[[EngineClient], Awaitable[None]]) -> dict[int, EngineUnreachable]:
        """Calls all engines except lost ones, and waits for all. Returns those that could not be reached; raises any other error."""
        places = [place for place in range(len(self.engines)) if place not in self.lost]
        outcomes = await asyncio.gather(*(call(self.engines[place]) for place in places), return_exceptions=True)
        unreachable: dict[int, EngineUnreachable] = {}
        for place, outcome in zip(places, outcomes):
            if isinstance(outcome, EngineUnreachable):
                unreachable[place] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        return unreachable

    def go_on_without(self, unreachable: Mapping[int, EngineUnreachable]) -> None:
        """Notes them as lost. Raises one of them where no engine may be lost."""
        if unreachable and not self.may_lose:
            raise next(iter(unreachable.values()))
        self.lost |= unreachable

    async def run_all(self, command: Command) -> list[bytes]:
        return await self.run([command] * len(self.engines))


async def check_parallelism(workers: Workers, planned: GeneratorTopology) -> None:
    """Raises LayoutError that names every engine with other parallel sizes than planned. Call it before `connect`, which relies on them."""
    found = await asyncio.gather(*(engine.parallelism(workers.timeout_s) for engine in workers.engines))
    wrong = [
        f"engine {engine.url} runs with {_sizes(sizes.tp_size, sizes.ep_size, sizes.dp_size)}"
        for engine, sizes in zip(workers.engines, found)
        if (sizes.tp_size, sizes.ep_size, sizes.dp_size) != (planned.tp, planned.ep, planned.dp_attention)
    ]
    if wrong:
        raise LayoutError(f"{'; '.join(wrong)}, the reshard map is for {_sizes(planned.tp, planned.ep, planned.dp_attention)}")


def _sizes(tp: int, ep: int, dp_attention: int) -> str:
    return f"tp={tp}, ep={ep}, dp_attention={dp_attention}"


async def connect(workers: Workers, key_file: str) -> list[Host]:
    """Connects the workers to the hub, once, before anything else. Returns where each generator rank runs."""
    first_ranks = range(0, workers.count, workers.tp)
    payloads = await workers.run([Connect(rank, workers.hub.address, workers.connection, key_file) for rank in first_ranks])
    return [msgspec.msgpack.decode(payload, type=Host) for payload in payloads]


async def describe(workers: Workers) -> list[list[RemoteTensor]]:
    """All live parameters, by generator rank."""
    return [msgspec.msgpack.decode(payload, type=commands.Description) for payload in await workers.run_all(Describe())]


async def settle_layout(workers: Workers, layout: Layout) -> None:
    """Checks the live engines against the layout, and has their workers use its shapes. Raises LayoutError."""
    check_layout(await describe(workers), layout)
    shapes = {rank: {t.name: t.shape for t in layout.tensors(rank) if t.engine_shape is not None} for rank in range(workers.count)}
    if any(shapes.values()):
        await workers.run_all(Arrange(shapes))


async def watch(workers: Workers, strict: bool, file: Path | None = None) -> None:
    """Has the workers hash the tensors that they compute with but no update writes. Prints how much memory there is of each kind, and
    writes a list of all of it into `file`, an object a line. Unproven memory is named, or if `strict` raises AuditError."""
    watched = [msgspec.msgpack.decode(payload, type=commands.Watched) for payload in await workers.run_all(commands.Watch())]
    ranks_of: dict[commands.Held, list[int]] = {}
    for rank, each in enumerate(watched):
        for held in each.held:
            ranks_of.setdefault(held, []).append(rank)
    if file is not None:
        lines = [msgspec.json.encode(msgspec.structs.asdict(held) | {"ranks": ranks}).decode() for held, ranks in ranks_of.items()]
        write_whole(file, "".join(f"{line}\n" for line in lines))
    most = max(watched, key=lambda each: each.bytes)
    kinds = {kind: [held for held in most.held if held.kind == kind] for kind in commands.KINDS}
    parts = [f"{len(of)} {kind} ({sum(held.bytes for held in of)} bytes)" for kind, of in kinds.items() if of]
    checked = f"{commands.WRITTEN}, {commands.DERIVED} or {commands.CONSTANT}"
    print(f"memory of a generator rank, in tensors: {', '.join(parts)}; every audit checks all that is {checked}", flush=True)
    check_proven(ranks_of, strict)


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
