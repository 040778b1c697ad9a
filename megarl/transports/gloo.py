"""Two-sided writes over gloo, where trainer and engines share no memory: each box is one message, received in place.

Trainer rank t is rank t of the group, generator rank g is rank trainer_ranks + g. Both sides walk the same reshard map in the
same order, so messages need no names.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Iterable, Sequence

import torch
import torch.distributed as dist

from megarl.reshard.map import Copy
from megarl.transports.base import GLOO, Endpoint

_TAG = 0  # messages between two ranks arrive in order


class GlooTransport:
    kind = GLOO

    def __init__(self, rank: int, timeout_s: float):
        self._rank, self._timeout_s = rank, timeout_s
        self._pending: list[tuple[Copy, dist.Work, torch.Tensor]] = []  # the tensor stays alive until it is sent

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        self._trainer_ranks = trainer_ranks(endpoints[0])
        self._group = join(endpoints[0].address, self._rank, self._trainer_ranks + len(endpoints), self._timeout_s)

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        """Nothing to do."""

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        message = as_bytes(values.contiguous())
        work = self._group.send([message], self._trainer_ranks + copy.destination_rank, _TAG)
        self._pending.append((copy, work, message))

    def fence(self) -> None:
        for copy, work, _ in self._pending:
            whereto = f"trainer rank {self._rank} to generator rank {copy.destination_rank}, {copy.destination_tensor}"
            wait(work, self._timeout_s, whereto)
        self._pending.clear()

    def close(self) -> None:
        self._pending.clear()
        self._group = None


def address_of(host: str, port: int, trainer_ranks: int) -> str:
    """Address of an Endpoint: host:port of the store, and how many trainer ranks come first in the group."""
    return f"{host}:{port}/{trainer_ranks}"


def trainer_ranks(endpoint: Endpoint) -> int:
    return int(endpoint.address.rpartition("/")[2])


def join(address: str, rank: int, size: int, timeout_s: float) -> dist.ProcessGroupGloo:
    """Meets the other ranks at the store. A group of its own: independent of the process's default group."""
    host, _, port = address.rpartition("/")[0].rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    except RuntimeError as error:
        raise RuntimeError(f"rank {rank} of {size} did not meet the others of the weight group at {address}: {error}") from error


def receive(group: dist.ProcessGroupGloo, target: torch.Tensor, source_rank: int) -> tuple[dist.Work, torch.Tensor]:
    """Starts to receive into `target`. Returns the work and the buffer: `target` itself if contiguous, else one to copy from."""
    buffer = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
    return group.recv([as_bytes(buffer)], source_rank, _TAG), buffer


def wait(work: dist.Work, timeout_s: float, what: str) -> None:
    """Raises RuntimeError that says what did not get through."""
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RuntimeError(f"weights from {what}: not through within {timeout_s:.0f} s: {error}") from error


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one row of bytes: gloo then need not know its dtype."""
    return tensor.view(-1).view(torch.uint8)
