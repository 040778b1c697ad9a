"""One-sided writes on one host: the engine worker's parameters lie in a memory file, and the trainer rank maps it."""

from __future__ import annotations

from typing import Iterable, Sequence

import torch

from megarl.reshard.map import Copy
from megarl.transports.base import SHARED_MEMORY, Endpoint, RemoteTensor

_ALIGNMENT = 64  # bytes


class SharedMemoryTransport:
    kind = SHARED_MEMORY

    def __init__(self, rank: int, timeout_s: float):
        self._rank = rank
        self._tensors: list[dict[str, torch.Tensor]] = []  # [generator rank]
        self._places: dict[tuple[int, str, tuple[int, ...]], torch.Tensor] = {}  # a box where it lies: cut once, used every update

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        self._tensors, self._places = [self._map(endpoint) for endpoint in endpoints], {}

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        """Nothing to do."""

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        key = copy.destination_rank, copy.destination_tensor, copy.destination_box.start
        if (place := self._places.get(key)) is None:
            place = self._places[key] = self._tensors[key[0]][key[1]][copy.destination_box.slices()]
        place.copy_(values)

    def fence(self) -> None:
        """Nothing to wait for: a store to shared memory is in place, and the message that follows orders it."""

    def close(self) -> None:
        self._tensors, self._places = [], {}

    def _map(self, endpoint: Endpoint) -> dict[str, torch.Tensor]:
        try:
            storage = torch.UntypedStorage.from_file(endpoint.address, shared=True, nbytes=endpoint.size_bytes)
        except RuntimeError as error:
            ranks = f"trainer rank {self._rank} cannot map the weights of generator rank {endpoint.rank}"
            raise RuntimeError(f"{ranks} ({endpoint.address}): do they share a host? {error}") from error
        return {tensor.name: view_at(storage, tensor) for tensor in endpoint.tensors}


def view_at(storage: torch.UntypedStorage, tensor: RemoteTensor) -> torch.Tensor:
    """The tensor that lies in `storage` where `tensor` says."""
    dtype = getattr(torch, tensor.dtype)
    return torch.empty(0, dtype=dtype).set_(storage, tensor.offset_bytes // dtype.itemsize, tensor.shape, tensor.strides)


def aligned_offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """(offset of each block, total) for blocks of `sizes` bytes laid out one after the other."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end
