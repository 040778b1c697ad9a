"""What a transport is: how boxes of values get from a trainer rank into the live tensors of engine workers.

A transport is one file of this folder, with both its ends and what the generator tells the one about the other. `choice.TABLE` names
those that there are; `weights.transport` takes any other by its import path.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import torch
import torch.distributed as dist

from megarl.box import Box
from megarl.messaging.host import Host
from megarl.reshard.map import Copy, ReshardMap

SHARED_MEMORY, CUDA_IPC, MOONCAKE, GLOO, NCCL = "shared_memory", "cuda_ipc", "mooncake", "gloo", "nccl"


class RemoteTensor(msgspec.Struct, frozen=True):
    """One live parameter of an engine worker."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # float32 | bfloat16 | …
    strides: tuple[int, ...]  # in elements
    offset_bytes: int = 0  # in the endpoint's memory, where it has one
    allocation: int = 0  # which of the endpoint's allocations


def describe(name: str, parameter: torch.Tensor, offset_bytes: int = 0, allocation: int = 0) -> RemoteTensor:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return RemoteTensor(name, tuple(parameter.shape), dtype, tuple(parameter.stride()), offset_bytes, allocation)


class Landing(msgspec.Struct, frozen=True, array_like=True):
    """Where the box of `tensor` that begins at `start` is to be put in one piece; the worker then spreads it."""

    tensor: str
    start: tuple[int, ...]
    offset_bytes: int  # in the endpoint's memory


class Allocation(msgspec.Struct, frozen=True):
    """One piece of GPU memory that another process of the host can open (cuda_ipc)."""

    handle: bytes
    size_bytes: int  # from its beginning to the end of the last tensor in it
    reference: tuple[bytes, int]  # torch's count of who has it open: a file in /dev/shm, and the place in it


class Members(msgspec.Struct, frozen=True):
    """Who belongs to the process group of a two-sided transport: trainer ranks first, then generator ranks."""

    trainers: tuple[int, ...]
    generators: tuple[int, ...]
    waves: tuple[int, ...]  # of each depth (see Copy): messages of one wave travel together


class Incoming(msgspec.Struct, frozen=True, array_like=True):
    """What a worker is to receive from one trainer rank, as one message."""

    source_rank: int
    tensor: str
    box: Box
    wave: int


class Offer(msgspec.Struct, frozen=True):
    """What an engine worker must know to open its memory to one transport. Each transport fills in what it needs."""

    protocol: str = ""  # of the network
    landing: list[tuple[str, Box]] = []  # boxes that are to be written in one piece, and then spread
    address: str = ""  # where the members of a group meet
    members: Members | None = None  # of that group
    incoming: list[Incoming] = []  # messages, in the order of the reshard map
    timeout_s: float = 0.0


class Endpoint(msgspec.Struct, frozen=True):
    """Where the weights of one generator rank can be written, by one kind of transport. Travels as JSON text."""

    rank: int  # generator rank
    kind: str  # of transport: a name in choice.TABLE, or an import path
    address: str  # a file to map, or there while the process is (cuda_ipc); of a group's store; mooncake.address_of
    size_bytes: int
    tensors: list[RemoteTensor]
    landings: list[Landing] = []
    allocations: list[Allocation] = []
    members: Members | None = None
    host: Host = Host()

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Endpoint:
        return msgspec.json.decode(text, type=cls)


@dataclass(frozen=True)
class Opening:
    """What the generator knows when it has the engines opened to one transport."""

    map: ReshardMap | None  # None: of memory that is only mapped
    writers: Mapping[int, Collection[int]]  # generator rank → trainer ranks that write to it by this transport; none: engines alone do
    hosts: Sequence[Host]  # of all trainer ranks and generator ranks
    address: str  # of this process, where all of them reach it
    timeout_s: float
    stores: list[dist.Store]  # that were opened for groups; they are there as long as somebody holds them


@dataclass(frozen=True)
class Live:
    """The live parameters of an engine worker, and where it runs."""

    rank: int  # generator rank
    kind: str  # of the transport that they are opened to
    host: Host
    address: str  # of this host, where the generator reaches it
    parameters: Mapping[str, torch.nn.Parameter]
    tensors: Callable[[], Mapping[str, torch.Tensor]]  # the parameters' memory, as it lies now, in the shapes of the reshard map


class Memory(abc.ABC):
    """The engine worker's end of a transport, one for each worker."""

    @abc.abstractmethod
    def open(self, live: Live, offer: Offer) -> Endpoint:
        """Lets others write to the live parameters, which stay where they are from now on. May be called again, for others."""

    def receive(self, tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: B027  most have nothing to do
        """Takes in what one update sends, if this end has to: into `tensors`, which are all the parameters."""

    def spread(self) -> None:  # noqa: B027
        """Puts what has landed where it belongs."""


class Transport(abc.ABC):
    """The trainer rank's end: its way to some generator ranks. Connected once, then used for every update.

    The methods of its instances raise TimeoutError or RuntimeError that name both ranks.
    """

    memory: ClassVar[type[Memory]]  # the other end
    one_sided: ClassVar[bool] = True  # workers do nothing while it writes; it can be opened anew at any time, and no lost engine blocks it
    same_host: ClassVar[bool] = False  # it serves ranks of one host alone
    lands: ClassVar[bool] = False  # some boxes land first, and are to be spread

    @staticmethod
    def found_here() -> tuple[str, ...]:
        """What this host has that decides whether the transport works: becomes a part of its Host."""
        return ()

    @staticmethod
    def hindrance(trainer: Host, generator: Host) -> str:
        """Why it cannot serve these two, to complete "trainer rank 0 and generator rank 0 …"; empty if nothing stands in the way."""
        return ""

    @classmethod
    def offers(cls, opening: Opening) -> dict[int, Offer]:
        """At the generator: what to tell the worker of each generator rank in `opening.writers`."""
        return {rank: Offer() for rank in opening.writers}

    def __init__(self, rank: int, timeout_s: float):
        """`rank`: the trainer rank, or the generator rank that passes tensors on."""
        self._rank, self._timeout_s = rank, timeout_s

    @abc.abstractmethod
    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        """Opens the way to the generator rank of each endpoint; all are of this transport."""

    @abc.abstractmethod
    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        """Before the first write of an update: values that are views of `sources` stay in place and unchanged until the fence."""

    @abc.abstractmethod
    def write(self, copy: Copy, values: torch.Tensor) -> None:
        """Puts `values`, of the box's shape and the destination's dtype, into the destination box. May return before it is there."""

    @abc.abstractmethod
    def fence(self) -> None:
        """Returns when everything written so far is in the destination's memory."""

    @abc.abstractmethod
    def close(self) -> None: ...


class OwnerGone(RuntimeError):
    """The engine process whose memory is mapped here has ended: what is written into it is lost."""


class PeerUnreachable(RuntimeError):
    """Generator ranks could not be written to; all others were. Their engines have ended, or the network to them is broken."""

    def __init__(self, message: str, ranks: Collection[int]):
        super().__init__(message)
        self.ranks = frozenset(ranks)
