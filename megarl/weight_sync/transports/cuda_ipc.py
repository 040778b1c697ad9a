"""One-sided writes inside a node: the trainer rank opens the GPU memory of an engine worker's
parameters, and copies into it.

torch's allocator cuts large allocations into many tensors, and CUDA shares only whole allocations.
So an endpoint lists each allocation once, with its handle, and has the position of every parameter
in it. The trainer rank opens each handle once and keeps it. The endpoint's address is an empty file
that the engine's process has open, so that it exists as long as the process does.

The engine's GPU need not be visible to the trainer process. A handle is opened on the trainer's own
current device. This device accesses the memory over NVLink or PCIe (CUDA enables peer access), or
directly if both share a GPU.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from megarl.messaging.host import Host
from megarl.reshard.deltas import Changes
from megarl.weight_sync.transports.base import (
    Allocation,
    Endpoint,
    LiveParameters,
    Memory,
    Offer,
    RemoteTensor,
    describe,
)
from megarl.weight_sync.transports.shared_memory import (
    SharedMemoryTransport,
    file_at,
    maps_no_memory,
    view_at,
)

_POLL_S = 0.0001


class DeviceMemory(Protocol):
    """The operations that need CUDA."""

    def export(self, storage: torch.UntypedStorage) -> tuple[Allocation, int]:
        """The allocation that holds `storage`, up to the end of `storage`, and the offset of
        `storage` in it, in bytes.
        """
        ...

    def open(self, allocation: Allocation) -> torch.UntypedStorage:
        """Maps another process's allocation into this process."""
        ...

    def copy(self, places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Starts to copy each of `values` to its place, after all earlier work on the device."""
        ...

    def finish(self, timeout_s: float) -> bool:
        """Waits for all copies. Returns False if they did not end in time."""
        ...


class CudaMemory:
    """Uses the current device, and torch's sharing of storages (torch/csrc/StorageSharing.cpp)."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def export(self, storage: torch.UntypedStorage) -> tuple[Allocation, int]:
        _, handle, size, offset, count, index, _, _ = storage._share_cuda_()
        torch.cuda.synchronize()  # makes the event of the handle unnecessary
        return Allocation(handle, offset + size, (count, index)), offset

    def open(self, allocation: Allocation) -> torch.UntypedStorage:
        device = torch.cuda.current_device()
        count, index = allocation.reference
        return torch.UntypedStorage._new_shared_cuda(
            device, allocation.handle, allocation.size_bytes, 0, count, index, b"", False
        )

    def copy(self, places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Copies on a separate stream, while the next values are quantised."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for place, value in zip(places, values):
                place.copy_(value, non_blocking=True)
                # otherwise its memory could be reused before the copy has read it
                value.record_stream(self._stream)

    def finish(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        event = self._stream.record_event()
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


class DeviceMemoryOfWorker(Memory):
    def open(self, live: LiveParameters, offer: Offer) -> Endpoint:
        return export(live, CudaMemory())


class CudaIpcTransport(SharedMemoryTransport):
    """Starts many copies at a time.

    If they were started one by one, most would take the GPU less time than the CPU needs to change
    streams.
    """

    memory = DeviceMemoryOfWorker
    most_noted_bytes = 128 << 20
    make_memory: type[DeviceMemory] = CudaMemory

    @staticmethod
    def hindrance(trainer: Host, generator: Host) -> str:
        return maps_no_memory(trainer, generator, on_gpu=True)

    def __init__(self, rank: int, timeout_s: float):
        super().__init__(rank, timeout_s)
        self._memory = self.make_memory()

    def write_changes(self, rank: int, changes: Changes, version: int) -> None:
        super().write_changes(rank, changes, version)
        self._memory.copy([], [])  # so that `finish` waits for them

    def fence(self) -> None:
        self._copy()
        if not self._memory.finish(self._timeout_s):
            ranks = ", ".join(map(str, self._tensors))
            problem = f"not through within {self._timeout_s:.0f} s by CUDA IPC"
            raise TimeoutError(
                f"weights from trainer rank {self._rank} to generator rank {ranks}: {problem}"
            )
        self._owners.check()

    def _put(self, places: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        self._memory.copy(places, values)

    def _map(self, endpoint: Endpoint) -> dict[str, torch.Tensor]:
        """Maps the endpoint's tensors.

        If its process has ended, they are on the meta device, and `Owners.check` raises.
        """
        try:
            storages = list(map(self._memory.open, endpoint.allocations))
        except RuntimeError as error:
            if file_at(endpoint.address) is None:
                storages = []
                for allocation in endpoint.allocations:
                    storages.append(torch.UntypedStorage(allocation.size_bytes, device="meta"))
                return _tensors(storages, endpoint)
            ranks = (
                f"trainer rank {self._rank} cannot open the GPU memory of generator rank "
                f"{endpoint.rank} on {endpoint.host.name}"
            )
            advice = (
                "CUDA IPC needs peer access between the GPUs, and one container or "
                "--ipc=host; weights.transport=nccl does not"
            )
            raise RuntimeError(f"{ranks}: {error}. {advice}") from error
        return _tensors(storages, endpoint)


def _tensors(
    storages: Sequence[torch.UntypedStorage], endpoint: Endpoint
) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for tensor in endpoint.tensors:
        result[tensor.name] = view_at(storages[tensor.allocation], tensor)
    return result


@functools.cache
def _sign_of_life() -> str:
    """The path of a file that exists as long as this process does."""
    return f"/proc/{os.getpid()}/fd/{os.memfd_create('megarl-alive')}"


def export(live: LiveParameters, memory: DeviceMemory) -> Endpoint:
    parameters = live.tensors()
    # handle -> allocation; all parts of an allocation share its handle
    allocations: dict[bytes, Allocation] = {}
    # address of a storage → handle of its allocation, offset in it
    places: dict[int, tuple[bytes, int]] = {}
    for parameter in parameters.values():
        storage = parameter.untyped_storage()
        if storage.data_ptr() not in places:
            allocation, offset = memory.export(storage)
            places[storage.data_ptr()] = allocation.handle, offset
            longest = allocations.setdefault(allocation.handle, allocation)
            if allocation.size_bytes > longest.size_bytes:
                allocations[allocation.handle] = allocation
    index_of = {handle: index for index, handle in enumerate(allocations)}
    tensors: list[RemoteTensor] = []
    for name, parameter in parameters.items():
        handle, begin = places[parameter.untyped_storage().data_ptr()]
        offset = begin + int(parameter.storage_offset()) * parameter.itemsize
        tensors.append(describe(name, parameter, offset, index_of[handle]))
    size = sum(allocation.size_bytes for allocation in allocations.values())
    return Endpoint(
        live.rank,
        live.kind,
        _sign_of_life(),
        size,
        tensors,
        allocations=list(allocations.values()),
        host=live.host,
    )
