"""The writing side of a weight update: how boxes of values get from a trainer rank into the live tensors of generator ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from megarl.kernels.audit import MASK, hash_slice
from megarl.messaging.host import Host
from megarl.reshard.execute import AmaxTable, Payloads
from megarl.reshard.map import Copy

SHARED_MEMORY, CUDA_IPC, MOONCAKE, GLOO, NCCL = "shared_memory", "cuda_ipc", "mooncake", "gloo", "nccl"
TWO_SIDED = (GLOO, NCCL)  # the engine workers must receive what is sent


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


class Endpoint(msgspec.Struct, frozen=True):
    """Where the weights of one generator rank can be written, by one kind of transport. Travels as JSON text."""

    rank: int  # generator rank
    kind: str  # of transport
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


class Transport(Protocol):
    """One trainer rank's way to some generator ranks. Connected once, then used for every update.

    `kind` says what the engine workers must offer. All methods raise TimeoutError or RuntimeError that name both ranks.
    """

    kind: str

    def __init__(self, rank: int, timeout_s: float): ...

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        """Opens the way to the generator rank of each endpoint; all are of this transport's kind."""
        ...

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        """Before the first write of an update: values that are views of `sources` stay in place and unchanged until the fence."""
        ...

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        """Puts `values`, of the box's shape and the destination's dtype, into the destination box. May return before it is there."""
        ...

    def fence(self) -> None:
        """Returns when everything written so far is in the destination's memory."""
        ...

    def close(self) -> None: ...


class OwnerGone(RuntimeError):
    """The engine process whose memory is mapped here has ended: what is written into it is lost."""


class PeerUnreachable(RuntimeError):
    """Generator ranks could not be written to; all others were. Their engines have ended, or the network to them is broken."""

    def __init__(self, message: str, ranks: Collection[int]):
        super().__init__(message)
        self.ranks = frozenset(ranks)


@dataclass(frozen=True)
class Sent:
    bytes: int
    shares: dict[int, dict[str, int]]  # generator rank → tensor → this sender's share of its audit hash; empty without audit


def send(
    transport: Transport,
    copies: Sequence[Copy],
    sources: Mapping[str, torch.Tensor],
    shapes: Mapping[int, Mapping[str, tuple[int, ...]]],
    audit: bool,
    amax: AmaxTable | None = None,
    payloads: Payloads | None = None,
) -> Sent:
    """Carries out `copies`, all of one source rank, and fences.

    `sources` are its parameters by the names of the trainer layout, `shapes` the destination tensors' by rank and name, `amax`
    that of tiles which the copies cut; `payloads` to be kept from one update to the next. The shares are hashes of the values as they
    should arrive, taken from the source, so they witness the whole way.
    """
    shares: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    payloads = payloads or Payloads()
    payloads.begin(sources)
    transport.prepare(sources.values())
    for copy in copies:
        values = payloads.of(copy, amax)
        transport.write(copy, values)
        if audit:
            of_rank, name = shares[copy.destination_rank], copy.destination_tensor
            shape = shapes[copy.destination_rank][name]
            of_rank[name] = (of_rank[name] + hash_slice(values, copy.destination_box, shape)) & MASK
    transport.fence()
    return Sent(sum(copy.bytes for copy in copies), {rank: dict(tensors) for rank, tensors in shares.items()})


def landing_first(copies: Iterable[Copy], endpoints: Iterable[Endpoint]) -> tuple[list[Copy], list[Copy]]:
    """(those of `copies` whose boxes land, all others)"""
    landings = {(endpoint.rank, landing.tensor, landing.start) for endpoint in endpoints for landing in endpoint.landings}
    parts: tuple[list[Copy], list[Copy]] = [], []
    for copy in copies:
        lands = (copy.destination_rank, copy.destination_tensor, copy.destination_box.start) in landings
        parts[0 if lands else 1].append(copy)
    return parts


def shapes_of(endpoints: Sequence[Endpoint]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Shape of every destination tensor, by generator rank and name."""
    return {endpoint.rank: {tensor.name: tensor.shape for tensor in endpoint.tensors} for endpoint in endpoints}
