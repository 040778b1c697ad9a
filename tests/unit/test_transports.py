"""Shared memory between two ends in one process: boxes of any shape arrive at the right place, and
nothing else changes.
"""

from __future__ import annotations

import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.base.geometry import Box
from megarl.kernels.audit import MASK, hash_tensor
from megarl.messaging.host import Host
from megarl.reshard.execute import Payloads
from megarl.reshard.map import Copy
from megarl.weight_sync.transports import mooncake
from megarl.weight_sync.transports.base import Endpoint, LiveParameters, Offer, RemoteTensor
from megarl.weight_sync.transports.mooncake import MooncakeMemory, landing_memory
from megarl.weight_sync.transports.shared_memory import (
    MemoryFile,
    SharedMemoryTransport,
    aligned_offsets,
    view_at,
)
from megarl.weight_sync.writing import send, shapes_of

TENSORS = [
    RemoteTensor("a", (6, 5), "float32", (5, 1), 0),
    RemoteTensor("b", (7,), "bfloat16", (1,), 128),
]
SOURCES = {"x": torch.arange(40.0).view(5, 8), "y": torch.linspace(-3, 3, 7)}
COPIES = [
    # a column slice, not contiguous
    Copy(0, "x", Box((0, 3), (4, 2)), 0, "a", Box((1, 0), (4, 2)), "identity", "float32", 0),
    Copy(0, "x", Box((2, 0), (1, 3)), 0, "a", Box((5, 1), (1, 3)), "identity", "float32", 0),
    Copy(0, None, None, 0, "a", Box((0, 0), (1, 5)), "zeros", "float32", 0),
    Copy(0, "y", Box((0,), (7,)), 0, "b", Box((0,), (7,)), "cast", "bfloat16", 1),
]


def expected() -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.full((6, 5), -1.0)
    a[1:5, 0:2] = SOURCES["x"][0:4, 3:5]
    a[5, 1:4] = SOURCES["x"][2, 0:3]
    a[0] = 0
    return a, SOURCES["y"].bfloat16()


def covered(a: torch.Tensor) -> torch.Tensor:
    """`a` with zeros, which add nothing to a hash, where no copy wrote."""
    mask = torch.zeros_like(a, dtype=torch.bool)
    for copy in COPIES[:3]:
        mask[copy.destination_box.slices()] = True
    return torch.where(mask, a, 0)


def test_shared_memory_writes_boxes_in_place():
    descriptor = os.memfd_create("test")
    os.truncate(descriptor, 256)
    endpoint = Endpoint(0, "shared_memory", f"/proc/{os.getpid()}/fd/{descriptor}", 256, TENSORS)
    memory = torch.UntypedStorage.from_file(endpoint.address, shared=True, nbytes=256)
    a, b = (view_at(memory, tensor) for tensor in TENSORS)
    a.fill_(-1)
    transport = SharedMemoryTransport(0, 5)
    transport.connect([Endpoint.decode(endpoint.encode())])
    sent = send(transport, COPIES, SOURCES, shapes_of([endpoint]), audit=True)
    want_a, want_b = expected()
    assert torch.equal(a, want_a)
    assert torch.equal(b, want_b)
    assert sent.bytes == 4 * (8 + 3 + 5) + 2 * 7
    assert sent.shares == {0: {"a": hash_tensor(covered(want_a)) & MASK, "b": hash_tensor(want_b)}}
    os.close(descriptor)


@pytest.mark.parametrize("change", ["in place", "moved", "another stride"])
def test_payloads_follow_sources_that_change_between_updates(change):
    sources = {name: values.clone() for name, values in SOURCES.items()}
    payloads = Payloads()
    copies = [copy for copy in COPIES if copy.source_tensor == "x"]
    payloads.begin(sources)
    before = [payloads.of(copy) for copy in copies]
    if change == "in place":
        sources["x"] += 100
    elif change == "moved":
        sources["x"] = sources["x"] + 100
    else:
        sources["x"].set_(torch.stack([sources["x"] + 100, sources["x"]], dim=2)[:, :, 0])
    payloads.begin(sources)
    for copy, old in zip(copies, before):
        assert torch.equal(payloads.of(copy), SOURCES["x"][copy.source_box.slices()] + 100)
        assert (payloads.of(copy) is old) == (change == "in place")


def test_tensors_that_no_view_can_show_are_copied():
    """A column's values in the shape of a row of experts: reshaping copies them."""
    source = {"x": torch.arange(40.0).view(5, 8)}
    copy = Copy(0, "x", Box((0, 3), (5, 2)), 0, "c", Box((0,), (10,)), "identity", "float32", 0)
    payloads = Payloads()
    for _ in range(2):
        payloads.begin(source)
        assert torch.equal(payloads.of(copy), source["x"][:, 3:5].reshape(10))
        source["x"] += 1


def test_zeros_are_on_the_device_of_the_sources():
    """A GPU's stream copies from there, and only memory of that GPU can be recorded on it."""
    payloads = Payloads()
    payloads.begin({name: values.to("meta") for name, values in SOURCES.items()})
    values = payloads.of(COPIES[2])
    assert (values.device.type, values.shape, values.dtype) == ("meta", (1, 5), torch.float32)


def test_unmappable_memory_is_an_error_with_ranks_and_reason():
    """(test_transports_dead_owner.py tests memory that is gone.)"""
    transport = SharedMemoryTransport(3, 5)
    message = (
        r"trainer rank 3 cannot map the weights of generator rank 2 \(/proc/self\): .*Is a "
        r"directory"
    )
    with pytest.raises(RuntimeError, match=message):
        transport.connect([Endpoint(2, "shared_memory", "/proc/self", 64, TENSORS)])


def test_offsets_are_aligned_and_disjoint():
    assert aligned_offsets([3, 64, 65, 0, 1]) == ([0, 64, 128, 256, 256], 320)


def test_memory_file_keeps_values_strides_and_sharing():
    matrix = torch.arange(24.0).view(4, 6)
    model = torch.nn.ParameterDict(
        {"whole": torch.nn.Parameter(matrix), "other": torch.nn.Parameter(torch.ones(3).bfloat16())}
    )
    model["turned"] = torch.nn.Parameter(matrix.t())
    parameters = dict(model.named_parameters())
    before = {name: parameter.data.clone() for name, parameter in parameters.items()}
    file = MemoryFile(parameters)
    endpoint = file.endpoint(
        LiveParameters(
            5,
            "shared_memory",
            Host(),
            "",
            parameters,
            lambda: {name: value.data for name, value in parameters.items()},
        )
    )
    assert endpoint.rank == 5
    memory = torch.UntypedStorage.from_file(
        endpoint.address, shared=True, nbytes=endpoint.size_bytes
    )
    for tensor in endpoint.tensors:
        assert torch.equal(parameters[tensor.name], before[tensor.name])
        assert parameters[tensor.name].stride() == tensor.strides
        assert torch.equal(view_at(memory, tensor), before[tensor.name])
    parameters["whole"].data[1, 2] = -1
    assert parameters["turned"][2, 1] == -1
    file.close()


def test_too_little_memory_to_land_in_names_the_setting():
    with pytest.raises(
        RuntimeError,
        match=r"needs 1073741824.00 GiB for boxes .* lower generator.mem_fraction \(.*allocate",
    ):
        landing_memory(1 << 60, torch.device("cpu"))


def test_landing_memory_is_freed_before_it_is_opened_again(monkeypatch):
    """It takes the memory that SGLang leaves free, and is opened again whenever engines come or go."""
    alive: list[weakref.ref] = []

    def allocate(size: int, device: torch.device) -> torch.Tensor:
        assert not any(ref() is not None for ref in alive)
        memory = landing_memory(size, device)
        alive.append(weakref.ref(memory))
        return memory

    engine: Any = SimpleNamespace(get_rpc_port=lambda: 1, batch_register_memory=lambda *_: 0)
    monkeypatch.setattr(mooncake, "open_engine", lambda *_: engine)
    monkeypatch.setattr(mooncake, "landing_memory", allocate)
    parameters = {"a": torch.zeros(6, 5)}
    memory = MooncakeMemory()
    live = LiveParameters(0, "mooncake", Host(), "10.0.0.1", parameters, lambda: parameters)
    for rows in (4, 3):
        endpoint = memory.open(live, Offer(landing=[("a", Box((1, 0), (rows, 2)))]))
        assert [landing.tensor for landing in endpoint.landings] == ["a"]
    assert len(alive) == 2
