"""Sends commands to all workers of the engines. Their answers come back over the run's hub.

Commands need an open update session, because SGLang passes none to its workers outside one. Before
the first write of a run, call `connect`, then `settle_layout`, which compares the live parameters
with the layout from which the reshard map was built.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import torch.distributed as dist

from megarl.base.files import write_whole
from megarl.base.geometry import GeneratorTopology
from megarl.generator.client import EngineClient, EngineUnreachable
from megarl.messaging.host import Host
from megarl.messaging.link import Hub
from megarl.messaging.messages import WorkerReply
from megarl.reshard.layout import Layout, LayoutError, LocalTensor, contiguous_strides, engine_view
from megarl.weight_sync import commands
from megarl.weight_sync.audit import check_proven
from megarl.weight_sync.commands import Arrange, Command, Connect, Describe, EmptyCache
from megarl.weight_sync.transports.base import Form, RemoteTensor, digest_of

ENOUGH = 0.95  # of the planned KV cache: SGLang rounds to pages


@dataclass
class Workers:
    """All TP workers of all engines, whose generator ranks follow each other."""

    engines: Sequence[EngineClient]
    tp: Sequence[int]  # size of each engine
    hub: Hub  # answers come here
    timeout_s: float  # limit of one command
    # where the process groups of transports meet
    stores: list[dist.Store] = field(default_factory=list)
    may_lose: bool = False  # whether commands go on without an engine that becomes unreachable
    lost: dict[int, EngineUnreachable] = field(default_factory=dict)  # index in `engines` -> error
    # suffix of the workers' names
    connection: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def count(self) -> int:
        return sum(self.tp)

    @property
    def address(self) -> str:
        """The address at which the engines reach this host."""
        return urlsplit(self.hub.address).hostname or ""

    @cached_property
    def ranks(self) -> list[range]:
        """The generator ranks of each engine."""
        ends = itertools.accumulate(self.tp)
        return [range(end - tp, end) for end, tp in zip(ends, self.tp)]

    def place_of(self, rank: int) -> int:
        """The index in `engines` of the engine of a generator rank."""
        return bisect.bisect_right(self.ranks, rank, key=lambda ranks: ranks.start) - 1

    async def run(self, per_engine: Sequence[Command | None]) -> list[bytes]:
        """Sends one command, or none, to each engine.

        Returns the payloads of the answers by generator rank; they are empty for engines that got
        no command or are lost.

        Raises RuntimeError with the worker's traceback if one failed, TimeoutError if one did not
        answer, and EngineUnreachable.
        """
        name = ""  # all commands are of one kind
        encoded: dict[int, bytes] = {}  # by id, since many commands are the same object
        requests: dict[EngineClient, tuple[bytes, int, bool]] = {}
        for engine, command, tp in zip(self.engines, per_engine, self.tp):
            if command is not None:
                name = type(command).__name__
                if id(command) not in encoded:
                    encoded[id(command)] = commands.encode(command)
                requests[engine] = (encoded[id(command)], tp, isinstance(command, EmptyCache))

        async def send(engine: EngineClient) -> None:
            if engine in requests:
                body, tp, empties_cache = requests[engine]
                await engine.command(body, tp, self.timeout_s, empty_cache=empties_cache)

        unreachable = await self.each(send)
        absent = self.lost.keys() | unreachable.keys()
        missing: set[int] = set()
        for place, ranks in enumerate(self.ranks):
            if place not in absent and self.engines[place] in requests:
                missing.update(ranks)
        payloads: dict[int, bytes] = {}
        while missing:
            answers = await self.hub.arrivals(
                WorkerReply, self.timeout_s, lambda: f"the answer of {_ranks(missing)} to {name}"
            )
            for sender, reply in answers:
                if (
                    not sender.endswith(self.connection)
                    or reply.command != name
                    or reply.generator_rank not in missing
                ):
                    continue  # its engine was lost after it had answered
                if reply.error:
                    raise RuntimeError(
                        f"generator rank {reply.generator_rank} failed at "
                        f"{reply.command}:\n{reply.error}"
                    )
                missing.discard(reply.generator_rank)
                payloads[reply.generator_rank] = reply.payload
        self.go_on_without(unreachable)
        return [payloads.get(rank, b"") for rank in range(self.count)]

    async def each(
        self, call: Callable[[EngineClient], Awaitable[None]]
    ) -> dict[int, EngineUnreachable]:
        """Calls all engines except lost ones, and waits for all.

        Returns those that could not be reached. Raises any other error.
        """
        calls: dict[int, Awaitable[None]] = {}
        for place, engine in enumerate(self.engines):
            if place not in self.lost:
                calls[place] = call(engine)
        outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
        unreachable: dict[int, EngineUnreachable] = {}
        for place, outcome in zip(calls, outcomes):
            if isinstance(outcome, EngineUnreachable):
                unreachable[place] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        return unreachable

    def go_on_without(self, unreachable: Mapping[int, EngineUnreachable]) -> None:
        """Notes these engines as lost. Raises one of the errors if no engine may be lost."""
        if unreachable and not self.may_lose:
            raise next(iter(unreachable.values()))
        self.lost |= unreachable

    async def run_all(self, command: Command) -> list[bytes]:
        return await self.run([command] * len(self.engines))


def _ranks(missing: Collection[int]) -> str:
    return f"generator rank {', '.join(map(str, sorted(missing)))}"


async def check_parallelism(workers: Workers, planned: Sequence[GeneratorTopology]) -> None:
    """Raises LayoutError that names every engine whose parallel sizes are not `planned`.

    Call it before `connect`, which relies on these sizes. Prints which engines have smaller KV
    caches than they were told.
    """
    live_sizes = await asyncio.gather(
        *(engine.parallelism(workers.timeout_s) for engine in workers.engines)
    )
    engines_that_differ: dict[str, list[str]] = {}  # sizes that the map is for -> engines
    for engine, sizes, topology in zip(workers.engines, live_sizes, planned, strict=True):
        live = _sizes(sizes.tp_size, sizes.ep_size, sizes.attn_dp_size)
        expected = _sizes(topology.tp, topology.ep, topology.dp_attention)
        if live != expected:
            engines_that_differ.setdefault(expected, []).append(
                f"engine {engine.url} runs with {live}"
            )
        if 0 < sizes.max_total_num_tokens < ENOUGH * (sizes.max_total_tokens or 0):
            print(
                f"engine {engine.url} has a KV cache of {sizes.max_total_num_tokens:,} tokens, not "
                f"of the planned {sizes.max_total_tokens:,}: something else holds memory of its "
                "GPU",
                flush=True,
            )
    problems = []
    for expected, engines in engines_that_differ.items():
        problems.append(f"{'; '.join(engines)}, the reshard map is for {expected}")
    if problems:
        raise LayoutError("; ".join(problems))


def _sizes(tp: int, ep: int, dp_attention: int) -> str:
    return f"tp={tp}, ep={ep}, dp_attention={dp_attention}"


async def connect(workers: Workers, key_file: str) -> list[Host]:
    """Connects the workers to the hub, once, before anything else.

    Returns the host of each generator rank.
    """
    first_ranks = [ranks.start for ranks in workers.ranks]
    payloads = await workers.run(
        [Connect(rank, workers.hub.address, workers.connection, key_file) for rank in first_ranks]
    )
    return [msgspec.msgpack.decode(payload, type=Host) for payload in payloads]


async def describe(workers: Workers) -> list[list[RemoteTensor]]:
    """All live parameters, by generator rank."""
    return [description or [] for description in await _described(workers, {})]


async def _described(
    workers: Workers, known_digests: Mapping[int, bytes]
) -> list[list[RemoteTensor] | None]:
    requests = []
    for ranks in workers.ranks:
        digests = {rank: known_digests[rank] for rank in ranks if rank in known_digests}
        requests.append(Describe(digests))
    decode = msgspec.msgpack.Decoder(commands.Description).decode
    return list(map(decode, await workers.run(requests)))


async def settle_layout(workers: Workers, layout: Layout) -> None:
    """Checks the live engines against the layout, and makes their workers use its shapes.

    Raises LayoutError.

    Each worker gets the digest of the expected layout, and describes itself only if it differs,
    since a large run has a million tensors.
    """
    tensors = list(map(layout.shapes, range(workers.count)))
    digests = {}
    shapes = {}
    for rank_tensors in _distinct(tensors):
        digests[id(rank_tensors)] = digest_of(_forms(rank_tensors, engine_view))
        shapes[id(rank_tensors)] = {
            t.name: t.shape for t in rank_tensors if t.engine_shape is not None
        }
    digest_of_rank = {rank: digests[id(shared)] for rank, shared in enumerate(tensors)}
    check_layout(await _described(workers, digest_of_rank), layout)
    if any(shapes.values()):
        requests = []
        for ranks in workers.ranks:
            requests.append(Arrange({rank: shapes[id(tensors[rank])] for rank in ranks}))
        await workers.run(requests)


def arranged_forms(layout: Layout, count: int) -> list[list[Form]]:
    """The tensors of the first `count` ranks once the layout is settled.

    Replicas share the list.
    """
    tensors = list(map(layout.shapes, range(count)))
    forms = {}
    for rank_tensors in _distinct(tensors):
        forms[id(rank_tensors)] = _forms(
            rank_tensors, lambda tensor: (tensor.shape, contiguous_strides(tensor.shape))
        )
    return [forms[id(rank_tensors)] for rank_tensors in tensors]


def _forms(
    tensors: Sequence[LocalTensor],
    view: Callable[[LocalTensor], tuple[tuple[int, ...], tuple[int, ...]]],
) -> list[Form]:
    result: list[Form] = []
    for tensor in tensors:
        shape, strides = view(tensor)
        result.append(Form(tensor.name, shape, tensor.dtype, strides))
    return result


def _distinct(tensors: Sequence[Sequence[LocalTensor]]) -> Iterable[Sequence[LocalTensor]]:
    return {id(rank_tensors): rank_tensors for rank_tensors in tensors}.values()


async def watch(workers: Workers, strict: bool, file: Path | None = None) -> None:
    """Makes the workers hash the tensors that they compute with but no update writes.

    Prints how much memory there is of each kind, and writes a list of all of it to `file`, one
    object a line. Also prints which memory is unproven; with `strict`, raises AuditError instead.
    """
    decode = msgspec.msgpack.Decoder(commands.WatchedMemory).decode
    watched = list(map(decode, await workers.run_all(commands.Watch())))
    ranks_of_digest: dict[bytes, list[int]] = {}  # digest -> ranks; of replicas, only one is asked
    for rank, memory in enumerate(watched):
        ranks_of_digest.setdefault(memory.digest, []).append(rank)
    replicas_of = {ranks[0]: ranks for ranks in ranks_of_digest.values()}
    requests = []
    for ranks in workers.ranks:
        requests.append(commands.Inventory([rank for rank in ranks if rank in replicas_of]))
    payloads = await workers.run(requests)
    inventories = {}
    ranks_of: dict[commands.MemoryEntry, list[int]] = {}
    for rank, replicas in replicas_of.items():
        inventories[rank] = msgspec.msgpack.decode(payloads[rank], type=list[commands.MemoryEntry])
        for entry in inventories[rank]:
            ranks_of.setdefault(entry, []).extend(replicas)
    if file is not None:
        lines = []
        for entry, ranks in ranks_of.items():
            fields = msgspec.structs.asdict(entry) | {"ranks": sorted(ranks)}
            lines.append(msgspec.json.encode(fields).decode() + "\n")
        write_whole(file, "".join(lines))
    largest = max(watched, key=lambda memory: memory.tensor_bytes)
    parts = []
    for kind in commands.KINDS:
        sizes = []
        for entry in inventories[ranks_of_digest[largest.digest][0]]:
            if entry.kind == kind:
                sizes.append(entry.bytes)
        if sizes:
            parts.append(f"{len(sizes)} {kind} ({sum(sizes)} bytes)")
    checked = f"{commands.WRITTEN}, {commands.DERIVED} or {commands.CONSTANT}"
    print(
        f"memory of a generator rank, in tensors: {', '.join(parts)}; every audit checks what is "
        f"{checked}",
        flush=True,
    )
    check_proven(ranks_of, strict)


def check_layout(live: Sequence[Sequence[RemoteTensor] | None], layout: Layout) -> None:
    """Raises LayoutError with the names of all tensors that differ between the engines and the
    map's layout. `live`: None means as planned.
    """
    problems = []
    for rank, tensors in enumerate(live):
        if tensors is None:
            continue
        live_tensors = {tensor.name: tensor for tensor in tensors}
        planned = {tensor.name: tensor for tensor in layout.tensors(rank)}
        for name in planned.keys() - live_tensors.keys():
            problems.append(f"generator rank {rank} has no {name}")
        for name in live_tensors.keys() - planned.keys():
            problems.append(f"generator rank {rank} has {name}, which the layout does not know")
        for name in planned.keys() & live_tensors.keys():
            planned_tensor = planned[name]
            live_tensor = live_tensors[name]
            planned_form = (*engine_view(planned_tensor), planned_tensor.dtype)
            live_form = (live_tensor.shape, live_tensor.strides, live_tensor.dtype)
            if planned_form != live_form:
                problems.append(
                    f"generator rank {rank}, {name}: shape, strides, dtype {live_form}, in the "
                    f"layout {planned_form}"
                )
    if problems:
        raise LayoutError(
            "the engines' weights are not laid out as planned:\n" + "\n".join(sorted(problems))
        )
