"""One-sided writes on one host: the engine worker's parameters are in a memory file, which the
trainer rank maps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence

import torch

from megarl.messaging.host import Host
from megarl.reshard.deltas import Changes, spread
from megarl.reshard.map import Copy
from megarl.weight_sync.transports.base import (
    Endpoint,
    LiveParameters,
    Memory,
    Offer,
    OwnerGone,
    RemoteTensor,
    Transport,
    describe,
)

# this process has no permission to see the file, so it cannot tell whether the file still exists
_HIDDEN = (0, 0)
_ALIGNMENT = 64  # bytes


class Owners:
    """The owners of the endpoints to which trainer rank `rank` writes.

    Each address is a file in /proc that its process has open.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._files: list[tuple[Endpoint, tuple[int, int] | None]] = []

    def note(self, endpoints: Sequence[Endpoint]) -> None:
        """Notes the endpoints that are mapped now."""
        self._files = [(endpoint, file_at(endpoint.address)) for endpoint in endpoints]

    def check(self) -> None:
        """Raises OwnerGone if a process has ended, even before `note`."""
        for endpoint, file in self._files:
            if file is None or file_at(endpoint.address) != file:
                ranks = f"trainer rank {self._rank} to generator rank {endpoint.rank}"
                raise OwnerGone(
                    f"weights from {ranks}: the engine process that owned {endpoint.address} has "
                    "ended"
                )


def file_at(address: str) -> tuple[int, int] | None:
    """(device, inode) of a file; None if it does not exist."""
    try:
        status = os.stat(address)
    except PermissionError:
        return _HIDDEN
    except OSError:
        return None
    return status.st_dev, status.st_ino


class SharedMemory(Memory):
    def __init__(self) -> None:
        self._file: MemoryFile | None = None

    def open(self, live: LiveParameters, offer: Offer) -> Endpoint:
        """When it is called again, the parameters stay in the file and mapped."""
        if self._file is None or not self._file.holds(live.parameters.values()):
            old_file = self._file
            self._file = MemoryFile(live.parameters)
            if old_file is not None:
                old_file.close()
        return self._file.endpoint(live)


class SharedMemoryTransport(Transport):
    memory = SharedMemory
    same_host = True
    most_noted_bytes = 16 << 20  # copied by one call; limits the memory of quantised values

    @staticmethod
    def hindrance(trainer: Host, generator: Host) -> str:
        return maps_no_memory(trainer, generator, on_gpu=False)

    def __init__(self, rank: int, timeout_s: float):
        super().__init__(rank, timeout_s)
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}  # generator rank -> its tensors
        # views of destination boxes, kept for all updates
        self._places: dict[tuple[int, str, tuple[int, ...]], torch.Tensor] = {}
        self._owners = Owners(rank)
        # still to be copied: places and their values
        self._noted: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._noted_bytes = 0

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        self._tensors = {endpoint.rank: self._map(endpoint) for endpoint in endpoints}
        self._places = {}
        self._owners.note(endpoints)

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        self._owners.check()

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        self._noted[0].append(self._place(copy))
        self._noted[1].append(values)
        self._noted_bytes += values.nbytes
        if self._noted_bytes >= self.most_noted_bytes:
            self._copy()

    def room(self, rank: int) -> float:
        return math.inf

    def write_changes(self, rank: int, changes: Changes, version: int) -> None:
        for copy, delta in changes:
            spread(delta, self._place(copy))

    def fence(self) -> None:
        """Copies what is still noted.

        The values are then in shared memory; the message that follows orders them for the reader.
        """
        self._copy()
        self._owners.check()

    def _place(self, copy: Copy) -> torch.Tensor:
        key = copy.destination_rank, copy.destination_tensor, copy.destination_box.start
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._tensors[key[0]][key[1]][copy.destination_box.slices()]
        return place

    def _copy(self) -> None:
        places, values = self._noted
        self._noted = ([], [])
        self._noted_bytes = 0
        if places:
            self._put(places, values)

    def _put(self, places: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Copies everything in one call, since each long copy evicts Python's memory from the
        cache, which slows the work between copies.
        """
        torch._foreach_copy_(places, values)

    def close(self) -> None:
        self._tensors = {}
        self._places = {}

    def _map(self, endpoint: Endpoint) -> dict[str, torch.Tensor]:
        """Maps the endpoint's tensors.

        If its process has ended, they are on the meta device. Writes then do nothing, and
        `Owners.check` raises, as for a process that ends later.
        """
        try:
            storage = _mapped(endpoint.address, endpoint.size_bytes)
        except RuntimeError as error:
            if file_at(endpoint.address) is not None:
                ranks = (
                    f"trainer rank {self._rank} cannot map the weights of generator rank "
                    f"{endpoint.rank}"
                )
                raise RuntimeError(f"{ranks} ({endpoint.address}): {error}") from error
            storage = torch.UntypedStorage(endpoint.size_bytes, device="meta")
        return {tensor.name: view_at(storage, tensor) for tensor in endpoint.tensors}


class MemoryFile:
    """Moves all parameters of this process to one memory file, which other processes of this user
    can map.

    Whole storages are moved, so that parameters which share one still share it.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        storages = {}
        for storage in (parameter.untyped_storage() for parameter in parameters.values()):
            storages[storage.data_ptr()] = storage
        offsets, self._size = aligned_offsets(storage.nbytes() for storage in storages.values())
        offset_of = dict(zip(storages, offsets))
        # An anonymous file, because a killed engine then leaves no name in /dev/shm, and the size
        # of /dev/shm is no limit. Others open it through /proc, which permits only this user. It
        # exists as long as its descriptor is open.
        self._file = os.memfd_create("megarl-weights")
        # fails now if there is too little memory, instead of with SIGBUS at the first write
        os.posix_fallocate(self._file, 0, self._size)
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._memory = _mapped(self._path, self._size)
        moved_values = {}
        for name, parameter in parameters.items():
            offset = (
                offset_of[parameter.untyped_storage().data_ptr()]
                + int(parameter.storage_offset()) * parameter.itemsize
            )
            moved_values[name] = view_at(self._memory, describe(name, parameter, offset))
            moved_values[name].copy_(parameter.data)
        for name, values in moved_values.items():
            parameters[name].data = values

    def holds(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all of them are in this file."""
        return all(
            parameter.untyped_storage().data_ptr() == self._memory.data_ptr()
            for parameter in parameters
        )

    def endpoint(self, live: LiveParameters) -> Endpoint:
        base = self._memory.data_ptr()
        places = []
        for name, values in live.tensors().items():
            places.append(describe(name, values, values.data_ptr() - base))
        return Endpoint(live.rank, live.kind, self._path, self._size, places, host=live.host)

    def close(self) -> None:
        """Prevents new mappings. Existing ones stay valid."""
        os.close(self._file)


def _mapped(path: str, size_bytes: int) -> torch.UntypedStorage:
    """The file at `path`, mapped into this process."""
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=size_bytes)
    assert isinstance(storage, torch.UntypedStorage)
    return storage


def maps_no_memory(trainer: Host, generator: Host, on_gpu: bool) -> str:
    """The reason why the generator's memory, CPU or GPU, cannot be mapped; empty if it can."""
    if trainer.memory != generator.memory:
        return "share no memory: other machine, or container"
    if on_gpu and not trainer.cuda:
        return "share no GPU memory: the trainer runs without CUDA"
    if on_gpu != generator.cuda:
        return (
            "share no memory of that kind: the engine's parameters lie on the "
            f"{'GPU' if generator.cuda else 'CPU'}"
        )
    return ""


def view_at(storage: torch.UntypedStorage, tensor: RemoteTensor) -> torch.Tensor:
    """A view of `storage` at the place that `tensor` describes."""
    values = torch.empty(0, dtype=getattr(torch, tensor.dtype), device=storage.device)
    return values.set_(
        storage, tensor.offset_bytes // values.itemsize, tensor.shape, tensor.strides
    )


def aligned_offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """(offset of each block, total size) for aligned blocks of `sizes` bytes that follow each
    other.
    """
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end
