"""The engines' memory, opened to the trainer ranks' writes: once, before the first update, by every kind of transport in use."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from megarl.box import Box
from megarl.messaging.stores import open_store
from megarl.reshard.map import ReshardMap
from megarl.reshard.schedule import landings, waves
from megarl.weight_sync import commands
from megarl.weight_sync.commands import Command, ExpectMessages, Register, ShareDevice, ShareMemory
from megarl.weight_sync.transports.base import CUDA_IPC, MOONCAKE, SHARED_MEMORY, TWO_SIDED, Endpoint, Members
from megarl.weight_sync.transports.choice import Pairs, mooncake_protocol, this_host
from megarl.weight_sync.transports.two_sided import Incoming
from megarl.weight_sync.workers import Workers

Writers = Mapping[int, Collection[int]]  # generator rank → trainer ranks that write to it


async def open_memory(
    workers: Workers, kind: str, map: ReshardMap | None, writers: Writers | None = None, protocol: str | None = None
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
        command = Register(protocol or mooncake_protocol([this_host()]), {})
    else:
        command = _meeting(workers, kind, map, writers)
    payloads = await workers.run([_of_engine(command, map, writers, ranks) for ranks in workers.ranks])
    opened = [msgspec.msgpack.decode(payload, type=commands.Opened) for payload in payloads]
    return [endpoint for endpoint in opened if endpoint is not None and endpoint.rank in writers]


async def open_memories(
    workers: Workers, pairs: Pairs, map: ReshardMap, protocol: str, relayed: Mapping[str, Collection[int]]
) -> list[Endpoint]:
    """Opens every generator rank in all ways that `pairs` asks for, and by which others pass on to it: `relayed`, ranks by kind.

    Sharing moves parameters, so it comes before what pins them.
    """
    endpoints: list[Endpoint] = []
    for kind in (SHARED_MEMORY, CUDA_IPC, MOONCAKE, *TWO_SIDED):
        of_rank = {rank: [t for t, each in enumerate(kinds) if each == kind] for rank, kinds in enumerate(pairs)}
        writers = {rank: trainers for rank, trainers in of_rank.items() if trainers or rank in relayed.get(kind, ())}
        if writers:
            endpoints += await open_memory(workers, kind, map, writers, protocol)
    return endpoints


def _of_engine(command: Command, map: ReshardMap | None, writers: Writers, ranks: range) -> Command:
    """With what concerns the ranks of one engine alone: of a large run, all of it is too much to tell every one."""
    own = {rank: writers[rank] for rank in ranks if rank in writers}
    if isinstance(command, Register):
        return msgspec.structs.replace(command, landing={rank: _landing(map, rank, senders) for rank, senders in own.items()})
    if isinstance(command, ExpectMessages):
        incoming = {rank: _incoming(map, rank, senders, command.members) for rank, senders in own.items()}
        return msgspec.structs.replace(command, incoming=incoming)
    return command


def _landing(map: ReshardMap, rank: int, senders: Collection[int]) -> list[tuple[str, Box]]:
    return [(copy.destination_tensor, copy.destination_box) for copy in landings(map, rank) if copy.source_rank in senders]


def _meeting(workers: Workers, kind: str, map: ReshardMap, writers: Writers) -> ExpectMessages:
    host = workers.hub.address.rpartition("/")[2].rpartition(":")[0]
    workers.stores[kind], address = open_store(host)
    trainers = sorted({rank for senders in writers.values() for rank in senders})
    members = Members(tuple(trainers), tuple(sorted(writers)), waves(map))
    return ExpectMessages(kind, address, members, {}, workers.timeout_s)


def _incoming(map: ReshardMap, rank: int, senders: Collection[int], members: Members) -> list[Incoming]:
    return [
        Incoming(copy.source_rank, copy.destination_tensor, copy.destination_box, members.waves[copy.depth])
        for copy in map.writes_to(rank)
        if copy.source_rank in senders
    ]
