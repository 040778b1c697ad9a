"""Shared memory stays mapped when the process that owned it has ended: writes into it must not go unnoticed."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megarl.transports.base import Endpoint
from megarl.transports.choice import this_host
from megarl.transports.pairwise import PairwiseTransport
from megarl.transports.shared_memory import SharedMemoryTransport

OWNER = "import os, sys; f = os.memfd_create('test'); os.truncate(f, 256); print(f, flush=True); sys.stdin.read()"


def test_writes_to_the_memory_of_a_process_that_has_ended_are_an_error():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    address = f"/proc/{owner.pid}/fd/{int(owner.stdout.readline())}"
    transport = SharedMemoryTransport(3, 5)
    transport.connect([Endpoint(2, "shared_memory", address, 256, [])])
    transport.prepare([])
    transport.fence()
    forgiving = PairwiseTransport("shared_memory", this_host(), 3, 5, may_lose=True)
    forgiving.connect([Endpoint(2, "shared_memory", address, 256, [], host=this_host())])
    owner.kill()  # it is not waited for yet: a zombie owns nothing
    for step in (lambda: transport.prepare([]), transport.fence):
        with pytest.raises(RuntimeError, match=f"trainer rank 3 to generator rank 2: the engine process that owned {address} has ended"):
            until_it_raises(step)
    forgiving.prepare([])  # where a run can go on without an engine, its generator sees that it is lost
    forgiving.fence()
    owner.communicate()


def until_it_raises(step) -> None:
    """A kill takes its time."""
    for _ in range(1000):
        step()
        time.sleep(0.01)
