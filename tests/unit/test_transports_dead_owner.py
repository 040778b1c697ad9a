"""Shared memory stays mapped after its owner has ended. Writes to it must be detected."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from megarl.base.geometry import Box
from megarl.reshard.map import Copy
from megarl.weight_sync.transports.base import Endpoint, OwnerGone, RemoteTensor
from megarl.weight_sync.transports.choice import PairwiseTransport, this_host
from megarl.weight_sync.transports.shared_memory import SharedMemoryTransport

OWNER = (
    "import os, sys; f = os.memfd_create('test'); os.truncate(f, 256); print(f, flush=True); "
    "sys.stdin.read()"
)


def test_writes_to_memory_of_an_ended_process_are_an_error():
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    address = f"/proc/{owner.pid}/fd/{int(owner.stdout.readline())}"
    transport = SharedMemoryTransport(3, 5)
    transport.connect([Endpoint(2, "shared_memory", address, 256, [])])
    transport.prepare([])
    transport.fence()
    forgiving = PairwiseTransport("shared_memory", this_host(), 3, 5, may_lose=True)
    forgiving.connect([Endpoint(2, "shared_memory", address, 256, [], host=this_host())])
    owner.kill()  # not reaped yet: a zombie owns nothing
    for step in (lambda: transport.prepare([]), transport.fence):
        with pytest.raises(
            RuntimeError,
            match=f"trainer rank 3 to generator rank 2: the engine process that owned {address} "
            "has ended",
        ):
            until_it_raises(step)
    forgiving.prepare([])  # if a run can continue without an engine, its generator detects the loss
    forgiving.fence()
    owner.communicate()


def test_memory_of_a_process_that_ended_before_it_was_mapped():
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    address = f"/proc/{owner.pid}/fd/{int(owner.stdout.readline())}"
    owner.communicate()
    tensors = [RemoteTensor("w", (4, 8), "float32", (8, 1), offset_bytes=64)]
    endpoint = Endpoint(2, "shared_memory", address, 256, tensors, host=this_host())
    transport = SharedMemoryTransport(3, 5)
    transport.connect([endpoint])
    with pytest.raises(
        OwnerGone,
        match=f"trainer rank 3 to generator rank 2: the engine process that owned {address} has ended",
    ):
        transport.prepare([])
    forgiving = PairwiseTransport("shared_memory", this_host(), 3, 5, may_lose=True)
    forgiving.connect([endpoint])
    forgiving.prepare([])
    box = Box((1, 0), (2, 8))
    forgiving.write(Copy(3, "v", box, 2, "w", box, "identity", "float32", 0), torch.ones(2, 8))
    forgiving.fence()


def until_it_raises(step) -> None:
    """Repeats the call until it raises, since a kill takes a moment."""
    for _ in range(1000):
        step()
        time.sleep(0.01)
