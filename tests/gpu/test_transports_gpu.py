"""Transports between GPU processes: CUDA IPC on one GPU and between two, NCCL between two.

Tests on the CPU cover the rest of the code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from remote_object import RemoteObject

from megarl.base.geometry import Box
from megarl.messaging.host import Host
from megarl.messaging.process_groups import open_store
from megarl.reshard.map import Copy
from megarl.weight_sync.transports import cuda_ipc
from megarl.weight_sync.transports.base import (
    NCCL,
    Endpoint,
    GroupMembers,
    Incoming,
    LiveParameters,
    Offer,
)
from megarl.weight_sync.transports.cuda_ipc import CudaIpcTransport, CudaMemory
from megarl.weight_sync.transports.nccl import NcclMemory, NcclTransport
from megarl.weight_sync.writing import send, shapes_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

TIMEOUT_S = 60.0
MEMBERS = GroupMembers(trainers=(0,), generators=(0,), waves=(0, 0, 1))
COPIES = [
    # rows with two strides
    Copy(
        0,
        "x",
        Box((0, 8), (512, 256)),
        0,
        "wide",
        Box((100, 0), (512, 256)),
        "identity",
        "bfloat16",
        0,
    ),
    # contiguous on both sides
    Copy(
        0,
        "x",
        Box((600, 0), (3, 1024)),
        0,
        "whole",
        Box((0, 0), (3, 1024)),
        "identity",
        "bfloat16",
        0,
    ),
    Copy(0, "y", Box((0,), (4097,)), 0, "cast", Box((1,), (4097,)), "cast", "bfloat16", 1),
    Copy(0, None, None, 0, "wide", Box((0, 0), (100, 512)), "zeros", "bfloat16", 2),
]


def sources(seed: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, 1024, generator=generator)
    y = torch.randn(4097, generator=generator)
    return {"x": x.bfloat16().to(device), "y": y.to(device)}


def expected(seed: int) -> dict[str, torch.Tensor]:
    tensors = sources(seed, "cpu")
    wide = torch.full((1000, 512), -1.0, dtype=torch.bfloat16)
    wide[100:612, :256] = tensors["x"][:512, 8:264]
    wide[:100] = 0
    cast = torch.full((5000,), -1.0, dtype=torch.bfloat16)
    cast[1:4098] = tensors["y"].bfloat16()
    return {"wide": wide, "whole": tensors["x"][600:603].clone(), "cast": cast}


class GpuEngine:
    """Parameters on a GPU: several share one allocation; one has a large one of its own."""

    def __init__(self, device: int):
        torch.cuda.set_device(device)
        self.parameters = {
            "wide": torch.full((1000, 512), -1.0, dtype=torch.bfloat16, device="cuda"),
            "whole": torch.full((3, 1024), -1.0, dtype=torch.bfloat16, device="cuda"),
            "cast": torch.full((5000,), -1.0, dtype=torch.bfloat16, device="cuda"),
            "large": torch.full((64 << 20,), 7, dtype=torch.uint8, device="cuda"),
        }

    def export(self) -> str:
        return cuda_ipc.export(self._live("cuda_ipc"), CudaMemory()).encode()

    def endpoint(self, address: str) -> str:
        incoming = [
            Incoming(0, copy.destination_tensor, copy.destination_box, MEMBERS.waves[copy.depth])
            for copy in COPIES
        ]
        self.receiver = NcclMemory()
        offer = Offer(address=address, members=MEMBERS, incoming=incoming, timeout_s=TIMEOUT_S)
        return self.receiver.open(self._live(NCCL), offer).encode()

    def _live(self, kind: str) -> LiveParameters:
        return LiveParameters(0, kind, Host(), "", {}, lambda: self.parameters)

    def receive(self) -> None:
        self.receiver.receive(self.parameters)

    def memory(self) -> dict[str, Any]:
        return {
            name: values.cpu().view(torch.uint8).numpy() for name, values in self.parameters.items()
        }


class GpuTrainer:
    def __init__(self, device: int):
        torch.cuda.set_device(device)

    def connect(self, kind: str, text: str) -> None:
        endpoint = Endpoint.decode(text)
        self.shapes = shapes_of([endpoint])
        self.transport = (NcclTransport if kind == NCCL else CudaIpcTransport)(0, TIMEOUT_S)
        self.transport.connect([endpoint])

    def write(self, seed: int) -> None:
        send(self.transport, COPIES, sources(seed, "cuda"), self.shapes, audit=False)


@pytest.fixture(params=[0, pytest.param(1, marks=two_gpus)], ids=["one GPU", "two GPUs"])
def pair(request):
    engine = RemoteObject(GpuEngine, request.param)
    trainer = RemoteObject(GpuTrainer, 0)
    try:
        yield engine, trainer
    finally:
        engine.kill()
        trainer.kill()


def check(engine: RemoteObject, seed: int) -> None:
    memory = engine.call("memory")
    for name, values in expected(seed).items():
        assert torch.equal(torch.from_numpy(memory[name]), values.view(torch.uint8)), name
    assert (memory["large"] == 7).all()


def test_cuda_ipc_writes_in_place(pair):
    engine, trainer = pair
    text = engine.call("export")
    allocations = Endpoint.decode(text).allocations
    assert len(allocations) < 4, "small parameters share an allocation"
    trainer.call("connect", "cuda_ipc", text)
    for seed in (1, 2, 3):
        trainer.call("write", seed)
        check(engine, seed)


@two_gpus
def test_nccl_receives_in_place():
    _store, address = open_store("127.0.0.1")
    engine = RemoteObject(GpuEngine, 1)
    trainer = RemoteObject(GpuTrainer, 0)
    try:
        text = engine.call("endpoint", address)
        trainer.start("connect", NCCL, text)
        for seed in (1, 2, 3):
            engine.start("receive")
            trainer.start("write", seed)
            if seed == 1:
                trainer.result()  # the result of connect
            trainer.result()
            engine.result()
            check(engine, seed)
    finally:
        engine.kill()
        trainer.kill()
