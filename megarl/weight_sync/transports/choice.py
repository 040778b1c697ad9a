"""Chooses the transport for a pair of ranks, from `weights.transport` and the hosts of both.

Trainer and generator come to the same choice, because both derive it from the same data: the trainer rank's Host (in its Hello) and the
generator rank's (in its Endpoint).
"""

from __future__ import annotations

import functools
import inspect
import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard, TypeVar

import torch

from megarl.config.errors import ConfigError
from megarl.config.named import find_callable
from megarl.messaging.host import Host
from megarl.weight_sync.transports.base import CUDA_IPC, GLOO, MOONCAKE, NCCL, SHARED_MEMORY, Memory, Transport

AUTO = "auto"
# In the order in which `auto` prefers them and memory is opened: shared memory moves parameters, so it precedes transports that pin them.
TABLE = {
    CUDA_IPC: "megarl.weight_sync.transports.cuda_ipc:CudaIpcTransport",
    SHARED_MEMORY: "megarl.weight_sync.transports.shared_memory:SharedMemoryTransport",
    MOONCAKE: "megarl.weight_sync.transports.mooncake:MooncakeTransport",
    NCCL: "megarl.weight_sync.transports.nccl:NcclTransport",
    GLOO: "megarl.weight_sync.transports.gloo:GlooTransport",
}

T = TypeVar("T")
Pairs = Sequence[Sequence[str]]  # kind of transport, [generator rank][trainer rank]


class Unserved(ValueError):
    """Completes the sentence "weights.transport=…: trainer rank 0 and generator rank 0 …"."""


@functools.cache
def transport_class(name: str) -> type[Transport]:
    """The class for a name in TABLE or an import path package.module:Class. Raises ConfigError if there is no such transport."""
    found = find_callable(TABLE.get(name, name), f"weights.transport={name}", built_in=(AUTO, *TABLE))
    if not _is_complete(found, Transport) or not _is_complete(getattr(found, "memory", None), Memory):
        needed = "a complete subclass of megarl.weight_sync.transports.base:Transport, whose `memory` is one of Memory"
        raise ConfigError(f"weights.transport={name}: must be {needed}; see docs/extending.md")
    return found


def _is_complete(found: object, base: type[T]) -> TypeGuard[type[T]]:
    return isinstance(found, type) and issubclass(found, base) and not inspect.isabstract(found)


def check_transport(setting: str) -> None:
    """Called before anything starts: raises ConfigError for a transport that could not serve even two ranks of this host."""
    here = this_host()
    try:
        transport_between(setting, here, here)
    except Unserved as error:
        raise ConfigError(f"weights.transport={setting}: two ranks on {here.name} {error}") from error


def this_host() -> Host:
    """The Host of this process. It has CUDA if torch does: parameters are then on a GPU."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Host(
        memory=f"{boot} {os.readlink('/proc/self/ns/pid')} shm:[{os.stat('/dev/shm').st_dev}]",
        network=f"{boot} {os.readlink('/proc/self/ns/net')}",
        name=socket.gethostname(),
        cuda=torch.cuda.is_available(),
        has=tuple(fact for kind in TABLE for fact in transport_class(kind).found_here()),
    )


def transport_between(setting: str, trainer: Host, generator: Host) -> str:
    """The kind of transport from a trainer rank to a generator rank: `setting`, or with AUTO the best that works.

    Raises Unserved if `setting` does not work between these two, and ConfigError as `transport_class` does.
    """
    works = [kind for kind in TABLE if not transport_class(kind).hindrance(trainer, generator)]
    if setting == AUTO:
        near = on_one_host(trainer, generator)
        return next(kind for kind in works if near or not transport_class(kind).same_host)
    if hindrance := transport_class(setting).hindrance(trainer, generator):
        raise Unserved(f"{hindrance}; between them work {', '.join(works)}")
    return setting


def transport_pairs(setting: str, trainers: Sequence[Host], generators: Sequence[Host]) -> Pairs:
    """The transport of every pair of ranks, each side in rank order. Raises ConfigError for the first pair that `setting` cannot serve."""
    pairs = []
    for generator_rank, generator in enumerate(generators):
        found: dict[Host, str] = {}  # there are few hosts
        for trainer_rank, trainer in enumerate(trainers):
            try:
                found[trainer] = found.get(trainer) or transport_between(setting, trainer, generator)
            except Unserved as error:
                ranks = f"trainer rank {trainer_rank} on {trainer.name} and generator rank {generator_rank} on {generator.name}"
                raise ConfigError(f"weights.transport={setting}: {ranks} {error}") from error
        pairs.append([found[trainer] for trainer in trainers])
    return pairs


def on_one_host(one: Host, other: Host) -> bool:
    return (one.memory, one.network) == (other.memory, other.network)


def describe_pairs(pairs: Pairs) -> str:
    """How many pairs of ranks use each transport, for logs."""
    counts = Counter(kind for of_generator in pairs for kind in of_generator)
    return ", ".join(f"{kind} for {count} of {counts.total()} pairs of ranks" for kind, count in counts.most_common())
