"""The interface of transports, which carry boxes of values from a trainer rank into the live
tensors of engine workers.

Each transport is one file in this folder. It has both ends, and the generator's messages between
them. `choice.TABLE` lists the built-in ones. `weights.transport` takes any other by its import
path.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from megarl.base.geometry import Box
from megarl.messaging.host import Host
from megarl.reshard.deltas import Changes
from megarl.reshard.map import Copy, ReshardMap

SHARED_MEMORY = "shared_memory"
CUDA_IPC = "cuda_ipc"
MOONCAKE = "mooncake"
GLOO = "gloo"
NCCL = "nccl"
_encode = msgspec.msgpack.Encoder().encode


class RemoteTensor(msgspec.Struct, frozen=True):
    """One live parameter of an engine worker."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # float32 | bfloat16 | …
    strides: tuple[int, ...]  # in elements
    offset_bytes: int = 0  # in the endpoint's memory, if it has one
    allocation: int = 0  # which of the endpoint's allocations


def describe(
    name: str, parameter: torch.Tensor, offset_bytes: int = 0, allocation: int = 0
) -> RemoteTensor:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return RemoteTensor(
        name, tuple(parameter.shape), dtype, tuple(parameter.stride()), offset_bytes, allocation
    )


class Landing(msgspec.Struct, frozen=True, array_like=True):
    """A place in landing memory for the box of `tensor` that begins at `start`.

    It is written in one piece; then the worker spreads it.
    """

    tensor: str
    start: tuple[int, ...]
    offset_bytes: int  # in the endpoint's memory


class Allocation(msgspec.Struct, frozen=True):
    """One piece of GPU memory that another process of the host can open (cuda_ipc)."""

    handle: bytes
    size_bytes: int  # size up to the end of the last tensor in it
    # torch's reference count: a file in /dev/shm, and the offset in it
    reference: tuple[bytes, int]


class Inbox(msgspec.Struct, frozen=True, array_like=True):
    """Host memory of the worker into which one trainer rank writes changes (Mooncake)."""

    trainer: int
    offset_bytes: int  # in the endpoint's memory
    size_bytes: int


class GroupMembers(msgspec.Struct, frozen=True):
    """The members of the process group of a two-sided transport: trainer ranks first, then
    generator ranks.
    """

    trainers: tuple[int, ...]
    generators: tuple[int, ...]
    waves: tuple[int, ...]  # wave of each depth (see Copy): messages of one wave travel together


class Incoming(msgspec.Struct, frozen=True, array_like=True):
    """One message that a worker will receive from a trainer rank."""

    source_rank: int
    tensor: str
    box: Box
    wave: int


class Offer(msgspec.Struct, frozen=True):
    """Tells an engine worker what it needs to open its memory to one transport.

    Each transport fills in its own fields.
    """

    protocol: str = ""  # protocol of the network
    # boxes that are written in one piece to landing memory, then spread
    landing: list[tuple[str, Box]] = []
    address: str = ""  # address of the store where the members of the group meet
    members: GroupMembers | None = None  # members of that group
    # messages, or boxes that may come as changes (weights.delta), in the order of the reshard map
    incoming: list[Incoming] = []
    timeout_s: float = 0.0
    inboxes: list[tuple[int, int]] = []  # (trainer rank, bytes) of memory for changes


class Endpoint(msgspec.Struct, frozen=True):
    """Where one kind of transport can write the weights of one generator rank.

    Sent as JSON text.
    """

    rank: int  # generator rank
    kind: str  # kind of transport: a name in choice.TABLE, or an import path
    # a file to map, or that shows whether the process lives (cuda_ipc); a group's store; or
    # mooncake.address_of
    address: str
    size_bytes: int
    tensors: list[RemoteTensor]
    landings: list[Landing] = []
    inboxes: list[Inbox] = []
    allocations: list[Allocation] = []
    members: GroupMembers | None = None
    host: Host = Host()

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Endpoint:
        return msgspec.json.decode(text, type=cls)


class Form(msgspec.Struct, frozen=True, array_like=True):
    """A tensor without its place in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]


class PackedEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """An Endpoint as it is sent.

    Replicas have the same forms of tensors, and the forms take far more bytes than the places.
    """

    endpoint: Endpoint  # without its tensors
    digest: bytes  # digest of the tensors' forms, sorted by name
    forms: list[Form]  # empty if the other side knows them
    offsets: bytes  # int64, in the same order
    allocations: bytes  # int32; empty if all are 0


def forms_of(tensors: Iterable[RemoteTensor]) -> list[Form]:
    """The forms of the tensors, sorted by name."""
    return sorted(
        [Form(t.name, t.shape, t.dtype, t.strides) for t in tensors], key=lambda form: form.name
    )


def digest_of(forms: Sequence[Form]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(forms), digest_size=16).digest()


def pack(endpoint: Endpoint, known_digest: bytes = b"") -> PackedEndpoint:
    """Packs an endpoint. `known_digest`: of the forms that the other side already has."""
    tensors = sorted(endpoint.tensors, key=lambda tensor: tensor.name)
    forms = forms_of(tensors)
    offsets = np.array([tensor.offset_bytes for tensor in tensors], dtype=np.int64)
    allocations = np.array([tensor.allocation for tensor in tensors], dtype=np.int32)
    digest = digest_of(forms)
    return PackedEndpoint(
        endpoint=msgspec.structs.replace(endpoint, tensors=[]),
        digest=digest,
        forms=[] if digest == known_digest else forms,
        offsets=offsets.tobytes(),
        allocations=allocations.tobytes() if allocations.any() else b"",
    )


def unpack(packed: PackedEndpoint, forms: Sequence[Form]) -> Endpoint:
    offsets = np.frombuffer(packed.offsets, np.int64).tolist()
    allocations = np.frombuffer(packed.allocations, np.int32).tolist() or [0] * len(offsets)
    tensors = []
    for form, *place in zip(forms, offsets, allocations, strict=True):
        tensors.append(RemoteTensor(form.name, form.shape, form.dtype, form.strides, *place))
    return msgspec.structs.replace(packed.endpoint, tensors=tensors)


class EndpointTable(msgspec.Struct, frozen=True, array_like=True):
    """Endpoints for one writing rank, as they are sent: common parts only once."""

    forms: list[list[Form]]
    members: list[GroupMembers]
    # which of `forms`, which of `members` (-1: none), and the rest
    endpoints: list[tuple[int, int, PackedEndpoint]]


_decode_ways = msgspec.msgpack.Decoder(EndpointTable).decode


def decode_endpoints(ways: bytes) -> list[Endpoint]:
    """Decodes the result of `Endpoints.towards`. Empty bytes give no endpoints."""
    if not ways:
        return []
    table = _decode_ways(ways)
    result: list[Endpoint] = []
    for form_index, members_index, packed in table.endpoints:
        members = table.members[members_index] if members_index >= 0 else None
        endpoint = unpack(packed, table.forms[form_index])
        result.append(msgspec.structs.replace(endpoint, members=members))
    return result


class Endpoints:
    """All endpoints of the engines, at the generator, which sends parts of them to other ranks."""

    def __init__(self, packed: Sequence[PackedEndpoint], forms: Mapping[bytes, Sequence[Form]]):
        """`forms`: digest -> forms that the workers did not send."""
        self.packed = list(packed)
        self._forms = dict(forms)
        self._encoded: dict[bytes, list[msgspec.Raw]] = {}
        for endpoint in packed:
            digest = endpoint.digest
            if endpoint.forms:
                self._forms[digest] = endpoint.forms
            if digest not in self._encoded:
                self._encoded[digest] = [msgspec.Raw(_encode(form)) for form in self._forms[digest]]
        self._numbers: dict[bytes, dict[str, int]] = {}  # digest -> name -> its number
        self._offsets = [np.frombuffer(endpoint.offsets, np.int64) for endpoint in packed]
        self._allocations = [np.frombuffer(endpoint.allocations, np.int32) for endpoint in packed]

    def __iter__(self) -> Iterator[Endpoint]:
        return (unpack(packed, self._forms[packed.digest]) for packed in self.packed)

    def numbers(self, index: int, names: Collection[str]) -> np.ndarray:
        """The numbers of these tensors, sorted by name, at endpoint number `index` of the list."""
        digest = self.packed[index].digest
        if digest not in self._numbers:
            self._numbers[digest] = {
                form.name: number for number, form in enumerate(self._forms[digest])
            }
        return np.array(sorted(self._numbers[digest][name] for name in names), dtype=np.int64)

    def towards(
        self, requests: Iterable[tuple[int, np.ndarray | None]], trainer: int | None = None
    ) -> bytes:
        """Bytes for `decode_endpoints`: for each of `requests` (index of an endpoint, numbers of
        its tensors or None for all) that endpoint with only these tensors. Boxes and inboxes are
        restricted to these tensors and to the rank `trainer`.
        """
        tables: dict[tuple[bytes, bytes], int] = {}
        forms: list[list[msgspec.Raw]] = []
        groups: dict[GroupMembers, int] = {}
        rows = []
        for index, numbers in requests:
            packed = self.packed[index]
            endpoint = self.packed[index].endpoint
            encoded = self._encoded[packed.digest]
            offsets = self._offsets[index]
            allocations = self._allocations[index]
            numbers = np.arange(len(encoded)) if numbers is None else numbers
            key = packed.digest, numbers.tobytes()
            if key not in tables:
                tables[key] = len(forms)
                forms.append([encoded[number] for number in numbers.tolist()])
            if endpoint.landings or endpoint.inboxes or endpoint.members:
                names = {self._forms[packed.digest][number].name for number in numbers.tolist()}
                landings = []
                for landing in endpoint.landings:
                    if landing.tensor in names:
                        landings.append(landing)
                inboxes = []
                for inbox in endpoint.inboxes:
                    if inbox.trainer == trainer:
                        inboxes.append(inbox)
                restricted = msgspec.structs.replace(
                    endpoint, landings=landings, inboxes=inboxes, members=None
                )
            else:
                restricted = endpoint
            if endpoint.members is None:
                group = -1
            else:
                group = groups.setdefault(endpoint.members, len(groups))
            row = PackedEndpoint(
                endpoint=restricted,
                digest=b"",
                forms=[],
                offsets=offsets[numbers].tobytes(),
                allocations=allocations[numbers].tobytes() if len(allocations) else b"",
            )
            rows.append((tables[key], group, row))
        return _encode((forms, list(groups), rows))


@dataclass(frozen=True)
class Opening:
    """What the generator knows when it opens the engines to one transport."""

    map: ReshardMap | None  # None if memory is only mapped
    # generator rank -> trainer ranks that write to it by this transport; empty if only engines do
    writers: Mapping[int, Collection[int]]
    hosts: Sequence[Host]  # of all trainer ranks and generator ranks
    address: str  # of this process, as all ranks reach it
    timeout_s: float
    # opened for groups; kept here, since a store closes when it has no references
    stores: list[dist.Store]
    deltas: bool = False  # whether updates may come as changes


@dataclass(frozen=True)
class LiveParameters:
    """The live parameters of an engine worker, and its host."""

    rank: int  # generator rank
    kind: str  # transport that the parameters are opened to
    host: Host
    address: str  # of this host, as the generator reaches it
    parameters: Mapping[str, torch.Tensor]
    # the parameters' current memory, in the shapes of the reshard map
    tensors: Callable[[], Mapping[str, torch.Tensor]]


class Memory(abc.ABC):
    """The engine worker's end of a transport. Each worker has one."""

    @abc.abstractmethod
    def open(self, live: LiveParameters, offer: Offer) -> Endpoint:
        """Lets others write to the live parameters, which must not move from now on.

        May be called again for other writers.
        """

    def receive(self, tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: B027  most transports have nothing to do
        """Receives one update of `tensors`, if the transport is two-sided."""

    def spread(self, selects: Callable[[str], bool] | None = None) -> None:  # noqa: B027
        """Copies landed boxes to their parameters.

        `selects`: only for these tensors, if others have not landed.
        """

    def receive_changes(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:  # noqa: B027
        """Like `receive`, for the changes to `version` that `write_changes` sends."""

    def spread_changes(self, version: int) -> None:  # noqa: B027
        """Like `spread`, for changes.

        Raises RuntimeError if the landed changes lead to another version.
        """


class Transport(abc.ABC):
    """The trainer rank's end: writes to some generator ranks.

    It is connected once, then used for every update.

    Its methods raise TimeoutError or RuntimeError that name both ranks.
    """

    memory: ClassVar[type[Memory]]  # the other end
    # workers are passive; memory can be opened again at any time, and a lost engine does not block
    # others
    one_sided: ClassVar[bool] = True
    same_host: ClassVar[bool] = False  # serves only ranks of one host
    lands: ClassVar[bool] = False  # some boxes land first and must be spread

    @classmethod
    def lands_at(cls, endpoint: Endpoint) -> bool:
        """Whether full updates land at `endpoint` and must be spread."""
        return cls.lands

    @staticmethod
    def found_here() -> tuple[str, ...]:
        """The properties of this host that decide whether the transport works.

        They become a part of the Host.
        """
        return ()

    @staticmethod
    def hindrance(trainer: Host, generator: Host) -> str:
        """The reason why it cannot serve these two, which completes "trainer rank 0 and generator
        rank 0 …"; empty if it can. It may depend only on `cuda` and `has` of both, and on whether
        they share memory or network. It is called once for all pairs that agree in these.
        """
        return ""

    @classmethod
    def offers(cls, opening: Opening) -> dict[int, Offer]:
        """Called at the generator.

        Returns the offer for the worker of each generator rank in `opening.writers`.
        """
        return {rank: Offer() for rank in opening.writers}

    def __init__(self, rank: int, timeout_s: float):
        """`rank`: the trainer rank, or the generator rank that passes on tensors."""
        self._rank = rank
        self._timeout_s = timeout_s

    @abc.abstractmethod
    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        """Connects to the generator rank of each endpoint. All endpoints are of this transport."""

    @abc.abstractmethod
    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        """Called before the first write of an update.

        Values that are views of `sources` stay in place and unchanged until the fence.
        """

    @abc.abstractmethod
    def write(self, copy: Copy, values: torch.Tensor) -> None:
        """Writes `values`, of the box's shape and the destination's dtype, into the destination
        box. May return before they have arrived.
        """

    def room(self, rank: int) -> float:
        """The most bytes (deltas.blob_bytes) that `write_changes` can send to a generator rank. 0:
        updates are always full.
        """
        return 0.0

    def write_changes(self, rank: int, changes: Changes, version: int) -> None:
        """Called instead of `write`, once for each generator rank.

        Writes only the changes, which bring the rank to `version`.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def fence(self) -> None:
        """Returns once everything written so far is in the destination's memory."""

    @abc.abstractmethod
    def close(self) -> None: ...


class OwnerGone(RuntimeError):
    """The engine process that owned memory mapped here has ended, so writes to it are lost."""


class PeerUnreachable(RuntimeError):
    """Some generator ranks could not be written to; all others were.

    Their engines have ended, or the network is broken.
    """

    def __init__(self, message: str, ranks: Collection[int]):
        super().__init__(message)
        self.ranks = frozenset(ranks)
