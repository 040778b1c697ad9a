"""Two-sided writes over gloo, the transport that always works, also between hosts without CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.messaging.host import address_towards
from megarl.messaging.members import admit_no_more, new_listeners
from megarl.weight_sync.transports.base import GLOO
from megarl.weight_sync.transports.two_sided import Message, TwoSidedMemory, TwoSidedTransport

_TAG = 0  # messages between two ranks arrive in order
Started = list[tuple[dist.Work, str]]


class GlooGroup:
    """Messages are in CPU memory.

    `address` is that of the store, and determines the network by which members reach each other.
    """

    device = torch.device("cpu")

    def __init__(self, store: dist.Store, rank: int, size: int, address: str, timeout_s: float):
        self._timeout_s = timeout_s
        self._backend: Any = open_backend(
            dist.PrefixStore(GLOO, store), rank, size, address, timeout_s
        )

    def send(self, messages: Sequence[Message]) -> Started:
        return self._start(self._backend.send, messages)

    def receive(self, messages: Sequence[Message]) -> Started:
        return self._start(self._backend.recv, messages)

    def wait(self, started: Started) -> None:
        for work, label in started:
            try:
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                raise TimeoutError(
                    f"weights from {label}: not through within {self._timeout_s:.0f} s: {error}"
                ) from error

    def close(self) -> None:
        del self._backend

    def _start(
        self,
        operation: Callable[[list[torch.Tensor], int, int], dist.Work],
        messages: Sequence[Message],
    ) -> Started:
        result = []
        for message in messages:
            result.append((operation([message.buffer], message.peer, _TAG), message.label))
        return result


class GlooMemory(TwoSidedMemory):
    open_group = GlooGroup


class GlooTransport(TwoSidedTransport):
    memory = GlooMemory
    open_group = GlooGroup
    coalesces = False  # each message is sent while the next is made


def open_backend(
    store: dist.Store, rank: int, size: int, address: str, timeout_s: float
) -> dist.ProcessGroupGloo:
    """`address`: that of the group's store (messaging.stores).

    Without it, gloo would use the address to which the host's name resolves.
    """
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  torch's stubs leave it out
    with new_listeners() as listeners:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(address))]
    options._timeout = timedelta(seconds=timeout_s)
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    admit_no_more(listeners)
    return backend
