"""Chooses the transport for a pair of ranks, from `weights.transport` and the hosts of both.

Trainer and generator make the same choice, since both derive it from the same data: the Host of the
trainer rank (in its Hello) and the Host of the generator rank (in its Endpoint).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import torch

from megarl.config.errors import ConfigError
from megarl.config.limits import find_callable
from megarl.messaging.host import Host
from megarl.reshard.deltas import Changes
from megarl.reshard.map import Copy
from megarl.weight_sync.transports.base import (
    CUDA_IPC,
    GLOO,
    MOONCAKE,
    NCCL,
    SHARED_MEMORY,
    Endpoint,
    Memory,
    OwnerGone,
    PeerUnreachable,
    Transport,
)

AUTO = "auto"
# In the order of preference of `auto`, and of opening. Shared memory moves parameters, so it comes
# before transports that pin them.
TABLE = {
    CUDA_IPC: "megarl.weight_sync.transports.cuda_ipc:CudaIpcTransport",
    SHARED_MEMORY: "megarl.weight_sync.transports.shared_memory:SharedMemoryTransport",
    MOONCAKE: "megarl.weight_sync.transports.mooncake:MooncakeTransport",
    NCCL: "megarl.weight_sync.transports.nccl:NcclTransport",
    GLOO: "megarl.weight_sync.transports.gloo:GlooTransport",
}


@dataclass(frozen=True, eq=False)
class Pairs:
    """The kind of transport of every pair of ranks."""

    kinds: tuple[str, ...]  # the kinds in use
    table: np.ndarray  # [generator ranks, trainer ranks]: index into `kinds`

    @classmethod
    def of(cls, kinds: Sequence[Sequence[str]]) -> Pairs:
        """Makes the pairs from the kind of each, [generator rank][trainer rank]."""
        in_use = tuple(dict.fromkeys(itertools.chain.from_iterable(kinds)))
        table = [list(map(in_use.index, of_generator)) for of_generator in kinds]
        return cls(in_use, np.array(table, dtype=np.int8))

    def trainers(self, kind: str) -> list[Collection[int]]:
        """[generator rank] the trainer ranks that write to it by `kind`.

        Equal collections are the same object.
        """
        generators, trainers = self.table.shape
        if kind in self.kinds:
            is_kind = self.table == self.kinds.index(kind)
        else:
            is_kind = np.zeros((generators, trainers), dtype=bool)
        collections: dict[bytes, Collection[int]] = {trainers * b"\1": range(trainers)}
        result: list[Collection[int]] = []
        for row in is_kind:
            key = row.tobytes()
            if key not in collections:
                collections[key] = frozenset(np.flatnonzero(row).tolist())
            result.append(collections[key])
        return result


class UnservedPair(ValueError):
    """Completes the sentence "weights.transport=…: trainer rank 0 and generator rank 0 …"."""


@functools.cache
def transport_class(name: str) -> type[Transport]:
    """The class for a name in TABLE or an import path package.module:Class.

    Raises ConfigError if there is no such transport.
    """
    candidate = find_callable(
        TABLE.get(name, name), f"weights.transport={name}", built_in=(AUTO, *TABLE)
    )
    if not _is_complete(candidate, Transport) or not _is_complete(
        getattr(candidate, "memory", None), Memory
    ):
        requirement = (
            "a complete subclass of megarl.weight_sync.transports.base:Transport, whose "
            "`memory` is one of Memory"
        )
        raise ConfigError(
            f"weights.transport={name}: must be {requirement}{_lacking(candidate)}; see "
            "docs/extending.md"
        )
    return candidate


def _lacking(candidate: object) -> str:
    """The end of a message that names the methods that a subclass, or its `memory`, lacks; empty if
    it is not a subclass.
    """
    ends = (candidate, Transport), (getattr(candidate, "memory", None), Memory)
    names = []
    for end, base in ends:
        if isinstance(end, type) and issubclass(end, base):
            names.extend(sorted(end.__abstractmethods__))
    if names:
        return f"; it lacks {', '.join(names)}"
    return ""


def _is_complete[T](candidate: object, base: type[T]) -> TypeGuard[type[T]]:
    return (
        isinstance(candidate, type)
        and issubclass(candidate, base)
        and not inspect.isabstract(candidate)
    )


def check_transport(setting: str) -> None:
    """Raises ConfigError for a transport that cannot serve even two ranks of this host.

    Called before anything starts.
    """
    host = this_host()
    try:
        transport_between(setting, host, host)
    except UnservedPair as error:
        raise ConfigError(
            f"weights.transport={setting}: two ranks on {host.name} {error}"
        ) from error


def this_host() -> Host:
    """The Host of this process.

    If torch has CUDA, `cuda` is true, since parameters are then on a GPU.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    facts: list[str] = []
    for kind in TABLE:
        facts += transport_class(kind).found_here()
    return Host(
        memory=f"{boot} {os.readlink('/proc/self/ns/pid')} shm:[{os.stat('/dev/shm').st_dev}]",
        network=f"{boot} {os.readlink('/proc/self/ns/net')}",
        name=socket.gethostname(),
        cuda=torch.cuda.is_available(),
        has=tuple(facts),
    )


def transport_between(setting: str, trainer: Host, generator: Host) -> str:
    """The kind of transport from a trainer rank to a generator rank: `setting`, or with AUTO the
    best one that works.

    Raises UnservedPair if `setting` does not work between these two, and ConfigError as
    `transport_class` does.
    """
    near = on_one_host(trainer, generator)
    works = []
    for kind in TABLE:
        transport = transport_class(kind)
        if not transport.hindrance(trainer, generator):
            works.append(kind)
            if setting == AUTO and (near or not transport.same_host):
                return kind
    hindrance = transport_class(setting).hindrance(trainer, generator)
    if hindrance:
        raise UnservedPair(f"{hindrance}; between them work {', '.join(works)}")
    return setting


def transport_pairs(setting: str, trainers: Sequence[Host], generators: Sequence[Host]) -> Pairs:
    """The transport of every pair of ranks, each side in rank order.

    Raises ConfigError for the first pair that `setting` cannot serve.

    It is found once for all pairs of the same kind: pairs differ only in the properties of their
    hosts, and in whether they share memory and network. (A run has thousands of ranks on each side,
    and millions of pairs.)
    """
    trainer_of, trainer_hosts = _numbered(trainers)
    generator_of, generator_hosts = _numbered(generators)
    transport_of_pair: dict[tuple, int] = {}  # kind of pair -> number of its transport
    kinds: dict[str, int] = {}
    table = np.zeros((len(generator_hosts), len(trainer_hosts)), dtype=np.int8)
    for g, generator in enumerate(generator_hosts):
        for t, trainer in enumerate(trainer_hosts):
            shared = trainer.memory == generator.memory, trainer.network == generator.network
            pair_kind = *shared, trainer.cuda, trainer.has, generator.cuda, generator.has
            if pair_kind not in transport_of_pair:
                try:
                    kind = transport_between(setting, trainer, generator)
                except UnservedPair as error:
                    trainer_rank = trainer_of.tolist().index(t)
                    generator_rank = generator_of.tolist().index(g)
                    raise ConfigError(
                        f"weights.transport={setting}: trainer rank {trainer_rank} on "
                        f"{trainer.name} and generator rank {generator_rank} on {generator.name} "
                        f"{error}"
                    ) from error
                transport_of_pair[pair_kind] = kinds.setdefault(kind, len(kinds))
            table[g, t] = transport_of_pair[pair_kind]
    return Pairs(tuple(kinds), table[generator_of][:, trainer_of])


def _numbered(hosts: Sequence[Host]) -> tuple[np.ndarray, list[Host]]:
    """(number of each rank's host, hosts by number)."""
    numbers: dict[Host, int] = {}
    number_of_rank = [numbers.setdefault(host, len(numbers)) for host in hosts]
    return np.array(number_of_rank, dtype=np.int64), list(numbers)


def on_one_host(first: Host, second: Host) -> bool:
    return (first.memory, first.network) == (second.memory, second.network)


def describe_pairs(pairs: Pairs) -> str:
    """The number of pairs of ranks with each transport, as a text for logs."""
    counts = np.bincount(pairs.table.ravel(), minlength=len(pairs.kinds)).tolist()
    texts = []
    for kind, count in Counter(dict(zip(pairs.kinds, counts))).most_common():
        texts.append(f"{kind} for {count} of {pairs.table.size} pairs of ranks")
    return ", ".join(texts)


class PairwiseTransport:
    """Several transports of one trainer rank behind one interface. Each generator rank is served by
    the one that suits the pair.

    `setting`: weights.transport; `host`: the Host of this trainer rank, as the generator knows it.

    With `may_lose`, writing continues without engines that have ended. If an engine's memory was
    mapped, its loss means that it has ended, and the generator continues without it, too. Ranks
    that could not be reached over the network may still run, so the generator must learn about them
    (`unwritten`).
    """

    def __init__(
        self, setting: str, host: Host, rank: int, timeout_s: float, may_lose: bool = False
    ):
        self._may_lose = may_lose
        self.unwritten: set[int] = set()  # generator ranks not written since `connect`
        self._setting = setting
        self._host = host
        self._rank = rank
        self._timeout_s = timeout_s
        self._transports: list[Transport] = []
        self._towards: dict[int, Transport] = {}  # generator rank -> transport

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        """`endpoints`: for every generator rank, one endpoint for each kind of transport by which
        any trainer rank writes to it.
        """
        endpoints_of_kind: dict[str, list[Endpoint]] = defaultdict(list)
        for endpoint in endpoints:
            if endpoint.kind == transport_between(self._setting, self._host, endpoint.host):
                endpoints_of_kind[endpoint.kind].append(endpoint)
        for kind, kind_endpoints in endpoints_of_kind.items():
            transport = transport_class(kind)(self._rank, self._timeout_s)
            transport.connect(kind_endpoints)
            self._transports.append(transport)
            self._towards |= {endpoint.rank: transport for endpoint in kind_endpoints}

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        tensors = list(sources)
        for transport in self._transports:
            with self._going_on():
                transport.prepare(tensors)

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        self._towards[copy.destination_rank].write(copy, values)

    def room(self, rank: int) -> float:
        return self._towards[rank].room(rank)

    def write_changes(self, rank: int, changes: Changes, version: int) -> None:
        self._towards[rank].write_changes(rank, changes, version)

    def fence(self) -> None:
        for transport in self._transports:
            with self._going_on():
                transport.fence()

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        self._transports = []
        self._towards = {}
        self.unwritten = set()

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except (OwnerGone, PeerUnreachable) as error:
            if not self._may_lose:
                raise
            if isinstance(error, PeerUnreachable):
                self.unwritten |= error.ranks
