"""The writing side of a weight update: how boxes of values get from a trainer rank into the live tensors of generator ranks."""

from __future__ import annotations

import importlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Iterable, Mapping, Optional, Protocol, Sequence

import msgspec
import torch

from megarl.config.errors import ConfigError
from megarl.reshard.audit import MASK, hash_slice
from megarl.reshard.execute import payload
from megarl.reshard.map import Copy

SHARED_MEMORY, GLOO, MOONCAKE = "shared_memory", "gloo", "mooncake"
_BUILT_IN = {
    SHARED_MEMORY: "megarl.transports.shared_memory:SharedMemoryTransport",
    GLOO: "megarl.transports.gloo:GlooTransport",
    MOONCAKE: "megarl.transports.mooncake:MooncakeTransport",
}


class RemoteTensor(msgspec.Struct, frozen=True):
    """One live parameter of an engine worker."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # float32 | bfloat16 | …
    strides: tuple[int, ...]  # in elements
    offset_bytes: int = 0  # in the endpoint's memory, where it has one


class Landing(msgspec.Struct, frozen=True, array_like=True):
    """Where the box of `tensor` that begins at `start` is to be put in one piece; the worker then spreads it."""

    tensor: str
    start: tuple[int, ...]
    offset_bytes: int  # in the endpoint's memory


class Endpoint(msgspec.Struct, frozen=True):
    """Where the weights of one generator rank can be written. Travels as JSON text."""

    rank: int  # generator rank
    kind: str  # SHARED_MEMORY | GLOO | MOONCAKE
    address: str  # a file to map; the store where a group meets (gloo.address_of); a transfer engine (mooncake.address_of)
    size_bytes: int
    tensors: list[RemoteTensor]
    landings: list[Landing] = []

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Endpoint:
        return msgspec.json.decode(text, type=cls)


class Transport(Protocol):
    """One trainer rank's way to all generator ranks. Connected once, then used for every update.

    `kind` says what the engine workers must offer. All methods raise TimeoutError or RuntimeError that name both ranks.
    """

    kind: str

    def __init__(self, rank: int, timeout_s: float): ...

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        """Opens the way to every generator rank, by index."""
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
) -> Sent:
    """Carries out `copies`, all of one source rank, and fences.

    `sources` are its parameters by the names of the trainer layout, `shapes` the destination tensors' by rank and name. The
    shares are hashes of the values as they should arrive, taken from the source, so they witness the whole way.
    """
    shares: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    transport.prepare(sources.values())
    for copy in copies:
        source = None if copy.source_tensor is None else sources[copy.source_tensor].detach()
        values = payload(copy, source)
        transport.write(copy, values)
        if audit:
            of_rank, name = shares[copy.destination_rank], copy.destination_tensor
            shape = shapes[copy.destination_rank][name]
            of_rank[name] = (of_rank[name] + hash_slice(values, copy.destination_box, shape)) & MASK
    transport.fence()
    return Sent(sum(copy.bytes for copy in copies), {rank: dict(tensors) for rank, tensors in shares.items()})


def shapes_of(endpoints: Sequence[Endpoint]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Shape of every destination tensor, by generator rank and name."""
    return {endpoint.rank: {tensor.name: tensor.shape for tensor in endpoint.tensors} for endpoint in endpoints}


def transport_class(name: str, one_host: bool) -> type[Transport]:
    """The class behind `weights.transport`: auto | shared_memory | gloo | mooncake | package.module:Class.

    auto is shared memory where trainer and engines share one host, else gloo. Raises ConfigError for a path that does not import.
    """
    if name == "auto":
        name = SHARED_MEMORY if one_host else GLOO
    module, _, attribute = _BUILT_IN.get(name, name).partition(":")
    try:
        found: Optional[type] = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ConfigError(f"weights.transport = {name!r}: {error}") from error
    if not isinstance(found, type) or not hasattr(found, "kind"):
        raise ConfigError(f"weights.transport = {name!r}: no transport class of that name; built in: auto, {', '.join(_BUILT_IN)}")
    return found
