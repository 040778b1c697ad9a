"""Which transport serves a pair of ranks: `weights.transport`, and what both know of each other's host.

Trainer and generator come to the same answer, each from the same data: the trainer rank's Host (in its Hello) and the generator
rank's (in its Endpoint).
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from megarl.config.errors import ConfigError
from megarl.config.named import find_callable
from megarl.messaging.host import Host
from megarl.weight_sync.transports import mooncake
from megarl.weight_sync.transports.base import CUDA_IPC, GLOO, MOONCAKE, NCCL, SHARED_MEMORY, Transport

AUTO = "auto"
_CLASSES = {
    CUDA_IPC: "megarl.weight_sync.transports.cuda_ipc:CudaIpcTransport",
    SHARED_MEMORY: "megarl.weight_sync.transports.shared_memory:SharedMemoryTransport",
    MOONCAKE: "megarl.weight_sync.transports.mooncake:MooncakeTransport",
    NCCL: "megarl.weight_sync.transports.nccl:NcclTransport",
    GLOO: "megarl.weight_sync.transports.gloo:GlooTransport",
}

Pairs = Sequence[Sequence[str]]  # kind of transport, [generator rank][trainer rank]


class Unserved(ValueError):
    """Completes the sentence "weights.transport=…: trainer rank 0 and generator rank 0 …"."""


def this_host() -> Host:
    """Of this process. CUDA counts when torch has it: parameters are then on a GPU."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Host(
        memory=f"{boot} {os.readlink('/proc/self/ns/pid')} shm:[{os.stat('/dev/shm').st_dev}]",
        network=f"{boot} {os.readlink('/proc/self/ns/net')}",
        name=socket.gethostname(),
        cuda=torch.cuda.is_available(),
        mooncake=mooncake.imports(),
        infiniband=mooncake.has_infiniband(),
    )


def transport_between(kind: str, trainer: Host, generator: Host) -> str:
    """Kind of the transport from a trainer rank to a generator rank: `kind`, or for AUTO the best that works.

    Pure. Raises Unserved for a kind that does not work between these two.
    """
    works = [each for each, hindrance in _HINDRANCES.items() if not hindrance(trainer, generator)]
    if kind == AUTO:
        near = on_one_host(trainer, generator)
        return next(each for each in works if near or each not in (CUDA_IPC, SHARED_MEMORY))
    if hindrance := _HINDRANCES[kind](trainer, generator):
        raise Unserved(f"{hindrance}; between them work {', '.join(works)}")
    return kind


def transport_pairs(setting: str, trainers: Sequence[Host], generators: Sequence[Host]) -> Pairs:
    """Of every pair of ranks, each side in rank order. Raises ConfigError for the first pair that `setting` cannot serve."""
    kind, pairs = kind_of(setting), []
    for generator_rank, generator in enumerate(generators):
        found: dict[Host, str] = {}  # there are few hosts
        for trainer_rank, trainer in enumerate(trainers):
            try:
                found[trainer] = found.get(trainer) or transport_between(kind, trainer, generator)
            except Unserved as error:
                ranks = f"trainer rank {trainer_rank} on {trainer.name} and generator rank {generator_rank} on {generator.name}"
                raise ConfigError(f"weights.transport={setting}: {ranks} {error}") from error
        pairs.append([found[trainer] for trainer in trainers])
    return pairs


def check_transport(setting: str) -> None:
    """Before anything starts: raises ConfigError for a transport that could not even serve two ranks of this host."""
    kind, here = kind_of(setting), this_host()
    try:
        transport_between(kind, here, here)
    except Unserved as error:
        raise ConfigError(f"weights.transport={setting}: two ranks on {here.name} {error}") from error


def on_one_host(one: Host, other: Host) -> bool:
    return (one.memory, one.network) == (other.memory, other.network)


def kind_of(setting: str) -> str:
    """What weights.transport asks for: AUTO, or a kind. Raises ConfigError."""
    return AUTO if setting == AUTO else transport_class(setting).kind


def describe_pairs(pairs: Pairs) -> str:
    """How many pairs of ranks use what, for logs."""
    counts = Counter(kind for of_generator in pairs for kind in of_generator)
    return ", ".join(f"{kind} for {count} of {counts.total()} pairs of ranks" for kind, count in counts.most_common())


def mooncake_protocol(hosts: Iterable[Host]) -> str:
    """One for all ranks of a run: rdma where every one of them has a GPU and an InfiniBand (or RoCE) device, else tcp."""
    return "rdma" if all(host.cuda and host.infiniband for host in hosts) else "tcp"


def transport_class(name: str) -> type[Transport]:
    """The class behind one of the kinds, or package.module:Class. Raises ConfigError for what does not import or is none."""
    found = find_callable(_CLASSES.get(name, name), f"weights.transport={name}", built_in=(AUTO, *_CLASSES))
    if not isinstance(found, type) or getattr(found, "kind", None) not in _CLASSES:
        raise ConfigError(
            f"weights.transport={name}: must be a class with a kind of {', '.join(_CLASSES)}; see megarl/weight_sync/transports/base.py"
        )
    return found


def _maps_memory(on_gpu: bool, trainer: Host, generator: Host) -> str:
    if trainer.memory != generator.memory:
        return "share no memory: other machine, or container"
    if on_gpu and not trainer.cuda:
        return "share no GPU memory: the trainer runs without CUDA"
    if on_gpu != generator.cuda:
        return f"share no memory of that kind: the engine's parameters lie on the {'GPU' if generator.cuda else 'CPU'}"
    return ""


def _by_nccl(trainer: Host, generator: Host) -> str:
    return "" if trainer.cuda and generator.cuda else "do not both have CUDA"


def _by_mooncake(trainer: Host, generator: Host) -> str:
    missing = [side for side, host in (("the trainer's", trainer), ("the generator's", generator)) if not host.mooncake]
    return f"do not both have Mooncake: its transfer engine does not import on {' and '.join(missing)} host" if missing else ""


# What stands in the way of each kind of transport; "": nothing. In the order in which `auto` prefers them.
_HINDRANCES: dict[str, Callable[[Host, Host], str]] = {
    CUDA_IPC: partial(_maps_memory, True),
    SHARED_MEMORY: partial(_maps_memory, False),
    MOONCAKE: _by_mooncake,
    NCCL: _by_nccl,
    GLOO: lambda trainer, generator: "",
}
