"""CUDA IPC without CUDA: everything except the two calls that export and open memory, which
tests/gpu runs.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from megarl.base.geometry import Box
from megarl.messaging.host import Host
from megarl.reshard.map import Copy
from megarl.weight_sync.transports.base import Allocation, Endpoint, LiveParameters, OwnerGone
from megarl.weight_sync.transports.cuda_ipc import CudaIpcTransport, export
from megarl.weight_sync.writing import send, shapes_of

HOST = Host(name="gpu-node")


class FakeDeviceMemory:
    """Allocations that are cut into storages, as by torch's allocator.

    The opener sees the same bytes at another address.
    """

    allocations: dict[bytes, bytearray] = {}
    slow = False

    def __init__(self) -> None:
        self.opened: list[bytes] = []
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def allocate(cls, handle: bytes, size: int) -> bytearray:
        cls.allocations[handle] = bytearray(size)
        return cls.allocations[handle]

    def export(self, storage: torch.UntypedStorage) -> tuple[Allocation, int]:
        for handle, memory in self.allocations.items():
            begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            if begin <= storage.data_ptr() < begin + len(memory):
                offset = storage.data_ptr() - begin
                return Allocation(
                    handle, offset + storage.nbytes(), (b"count of " + handle, offset)
                ), offset
        raise AssertionError("not of any allocation")

    def open(self, allocation: Allocation) -> torch.UntypedStorage:
        if allocation.handle not in self.allocations:
            raise RuntimeError("invalid device context")
        self.opened.append(allocation.handle)
        return torch.frombuffer(self.allocations[allocation.handle], dtype=torch.uint8)[
            : allocation.size_bytes
        ].untyped_storage()

    def copy(self, places: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        self.pending += zip(places, values)

    def finish(self, timeout_s: float) -> bool:
        for target, values in self.pending:
            target.copy_(values)
        self.pending.clear()
        return not self.slow


class FakeCudaIpcTransport(CudaIpcTransport):
    make_memory = FakeDeviceMemory


def cut(
    memory: bytearray, offset: int, *shape: int, dtype: torch.dtype = torch.float32
) -> torch.nn.Parameter:
    """A parameter with a storage of its own inside an allocation."""
    numel = torch.Size(shape).numel()
    return torch.nn.Parameter(
        torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset).view(shape)
    )


def live(parameters: dict[str, torch.nn.Parameter]) -> LiveParameters:
    return LiveParameters(
        3,
        "cuda_ipc",
        HOST,
        "",
        parameters,
        lambda: {name: parameter.data for name, parameter in parameters.items()},
    )


@pytest.fixture
def parameters() -> dict[str, torch.nn.Parameter]:
    first = FakeDeviceMemory.allocate(b"one", 4096)
    second = FakeDeviceMemory.allocate(b"two", 4096)
    tensors = {
        "a": cut(first, 512, 6, 5),
        "b": cut(first, 1024, 7, dtype=torch.bfloat16),
        "c": cut(second, 0, 4, 4),
    }
    tensors["rows_of_a"] = torch.nn.Parameter(tensors["a"].data[2:4])  # shares its storage
    tensors["turned"] = torch.nn.Parameter(tensors["c"].data.t())
    return tensors


def test_one_handle_per_allocation(parameters):
    endpoint = export(live(parameters), FakeDeviceMemory())
    assert [(allocation.handle, allocation.size_bytes) for allocation in endpoint.allocations] == [
        (b"one", 1024 + 14),
        (b"two", 64),
    ]
    places = {
        tensor.name: (tensor.allocation, tensor.offset_bytes, tensor.strides)
        for tensor in endpoint.tensors
    }
    assert places == {
        "a": (0, 512, (5, 1)),
        "b": (0, 1024, (1,)),
        "c": (1, 0, (4, 1)),
        "rows_of_a": (0, 512 + 2 * 5 * 4, (5, 1)),
        "turned": (1, 0, (1, 4)),
    }
    assert Endpoint.decode(endpoint.encode()) == endpoint  # handles survive their transfer as text


def test_boxes_are_in_place_after_the_fence(parameters):
    endpoint = Endpoint.decode(export(live(parameters), FakeDeviceMemory()).encode())
    transport = FakeCudaIpcTransport(0, 5)
    transport.connect([endpoint])
    assert transport._memory.opened == [b"one", b"two"]
    sources = {"x": torch.arange(40.0).view(5, 8), "y": torch.linspace(-3, 3, 7)}
    copies = [
        Copy(0, "x", Box((0, 3), (4, 2)), 3, "a", Box((1, 0), (4, 2)), "identity", "float32", 0),
        Copy(0, "y", Box((0,), (7,)), 3, "b", Box((0,), (7,)), "cast", "bfloat16", 1),
        Copy(
            0, "x", Box((0, 0), (4, 4)), 3, "turned", Box((0, 0), (4, 4)), "identity", "float32", 2
        ),
    ]
    send(transport, copies, sources, shapes_of([endpoint]), audit=False)
    expected = torch.zeros(6, 5)
    expected[1:5, 0:2] = sources["x"][:4, 3:5]
    assert torch.equal(parameters["a"], expected)
    assert torch.equal(parameters["b"], sources["y"].bfloat16())
    assert torch.equal(parameters["c"], sources["x"][:4, :4].t())


def test_a_fence_that_ends_too_late_names_both_ranks(parameters, monkeypatch):
    transport = FakeCudaIpcTransport(2, 5)
    transport.connect([export(live(parameters), FakeDeviceMemory())])
    monkeypatch.setattr(FakeDeviceMemory, "slow", True)
    with pytest.raises(
        TimeoutError, match="from trainer rank 2 to generator rank 3: not through within 5 s"
    ):
        transport.fence()


def test_memory_that_does_not_open_names_ranks_and_remedy(parameters):
    endpoint = export(live(parameters), FakeDeviceMemory())
    FakeDeviceMemory.allocations.clear()
    message = (
        "trainer rank 2 cannot open the GPU memory of generator rank 3 on gpu-node: invalid "
        "device context.*weights.transport=nccl"
    )
    with pytest.raises(RuntimeError, match=message):
        FakeCudaIpcTransport(2, 5).connect([endpoint])


def test_memory_of_an_ended_process_has_its_own_error(parameters):
    """Before it is opened, or after.

    On this error a run continues without the engine, if it can.
    """
    code = "import os, sys; print(os.memfd_create('x'), flush=True); sys.stdin.read()"
    owner = subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    address = f"/proc/{owner.pid}/fd/{int(owner.stdout.readline())}"
    endpoint = msgspec.structs.replace(
        export(live(parameters), FakeDeviceMemory()), address=address
    )
    opened = FakeCudaIpcTransport(2, 5)
    too_late = FakeCudaIpcTransport(2, 5)
    opened.connect([endpoint])
    opened.prepare([])
    owner.communicate()
    FakeDeviceMemory.allocations.clear()
    too_late.connect([endpoint])
    too_late.write(
        Copy(2, "x", Box((0,), (7,)), 3, "b", Box((0,), (7,)), "identity", "bfloat16", 0),
        torch.ones(7, dtype=torch.bfloat16),
    )
    for transport in (opened, too_late):
        for step in (lambda: transport.prepare([]), transport.fence):
            with pytest.raises(
                OwnerGone,
                match="trainer rank 2 to generator rank 3: the engine process that owned "
                f"{address} has ended",
            ):
                step()
