"""Two-sided writes: each box is a message, which the engine worker receives in place where the box is contiguous.

Trainer and generator ranks meet in a process group of their own, independent of either side's default group (see Members). Both
walk the same reshard map in the same order, so messages need no names. They travel wave by wave through the layers: at most two
waves are under way, so what is staged on either side stays small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from megarl.box import Box
from megarl.messaging.stores import connect_store
from megarl.reshard.map import Copy
from megarl.weight_sync.transports.base import Endpoint, Members

POLL_S = 0.0005


@dataclass(frozen=True)
class Message:
    peer: int  # rank in the group
    buffer: torch.Tensor  # bytes, in one piece, on the group's device; stays alive until it is through
    label: str  # "trainer rank 0 to generator rank 1, lm_head.weight"
    target: torch.Tensor | None = None  # receiving: where the buffer's content belongs, unless it is there already


class Incoming(msgspec.Struct, frozen=True, array_like=True):
    """What a worker is to receive from one trainer rank, as one message."""

    source_rank: int
    tensor: str
    box: Box
    wave: int


class Group(Protocol):
    """A process group of one backend. All methods raise RuntimeError or TimeoutError that names the message."""

    device: torch.device  # where messages lie

    def send(self, messages: Sequence[Message]) -> Any:
        """Starts to send; what it returns is to be given to `wait`."""
        ...

    def receive(self, messages: Sequence[Message]) -> Any: ...

    def wait(self, started: Any) -> None: ...

    def close(self) -> None: ...


OpenGroup = Callable[[dist.Store, int, int, str, float], Group]  # store, rank, size, address of the store, deadline in seconds


class TwoSidedTransport:
    """The sending end. Subclasses say by which backend."""

    kind: str
    open_group: OpenGroup
    coalesces: bool  # whether a wave's messages are started together, not one by one

    def __init__(self, rank: int, timeout_s: float):
        self._rank, self._timeout_s = rank, timeout_s
        self._waiting: list[Message] = []  # of the current wave, not started
        self._wave = -1
        self._started: list[tuple[int, Sequence[Message], Any]] = []  # by wave

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        members = endpoints[0].members
        assert members is not None
        self._members = members
        self._peers = {rank: len(members.trainers) + index for index, rank in enumerate(members.generators)}
        self._group = join(type(self).open_group, endpoints[0].address, members, f"trainer rank {self._rank}", self._timeout_s)

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        """Nothing to do."""

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        wave = self._members.waves[copy.depth]
        if wave != self._wave:
            self._start()
            self._finish(before=wave - 1)
            self._wave = wave
        label = _label(self._rank, copy.destination_rank, copy.destination_tensor)
        buffer = as_bytes(values.to(self._group.device).contiguous())
        self._waiting.append(Message(self._peers[copy.destination_rank], buffer, label))
        if not self.coalesces:
            self._start()

    def fence(self) -> None:
        self._start()
        self._finish(before=len(self._members.waves))
        self._wave = -1

    def close(self) -> None:
        self._waiting, self._started = [], []
        self._group.close()

    def _start(self) -> None:
        if self._waiting:
            self._started.append((self._wave, self._waiting, self._group.send(self._waiting)))
            self._waiting = []

    def _finish(self, before: int) -> None:
        """Waits for all waves older than `before`."""
        while self._started and self._started[0][0] < before:
            self._group.wait(self._started.pop(0)[2])


class TwoSidedReceiver:
    """The receiving end, in an engine worker. Joins the group at the first `receive`."""

    def __init__(self, open_group: OpenGroup, address: str, members: Members, rank: int, incoming: Sequence[Incoming], timeout_s: float):
        self._open, self._address, self._members, self._timeout_s = open_group, address, members, timeout_s
        self._rank, self._incoming = rank, incoming
        self._group: Group | None = None

    def receive(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes in what one update writes into `tensors`: all of it, and nothing else."""
        if self._group is None:
            self._group = join(self._open, self._address, self._members, f"generator rank {self._rank}", self._timeout_s)
        under_way: list[tuple[list[Message], Any]] = []
        for _, wave in groupby(self._incoming, key=lambda each: each.wave):
            messages = [self._message(each, tensors[each.tensor][each.box.slices()]) for each in wave]
            under_way.append((messages, self._group.receive(messages)))
            if len(under_way) > 1:
                self._finish(*under_way.pop(0))
        for messages, started in under_way:
            self._finish(messages, started)

    def _message(self, incoming: Incoming, target: torch.Tensor) -> Message:
        assert self._group is not None
        peer = self._members.trainers.index(incoming.source_rank)
        label = _label(incoming.source_rank, self._rank, incoming.tensor)
        if target.is_contiguous() and target.device == self._group.device:
            return Message(peer, as_bytes(target), label)
        staged = torch.empty(target.shape, dtype=target.dtype, device=self._group.device)
        return Message(peer, as_bytes(staged), label, target)

    def _finish(self, messages: Sequence[Message], started: Any) -> None:
        assert self._group is not None
        self._group.wait(started)
        for message in messages:
            if message.target is not None:
                message.target.copy_(message.buffer.view(message.target.dtype).view(message.target.shape))


def join(open_group: OpenGroup, address: str, members: Members, me: str, timeout_s: float) -> Group:
    """Meets the other members at the store. `me`: "trainer rank 3" or "generator rank 0". Raises RuntimeError naming who is missing."""
    names = [f"trainer rank {rank}" for rank in members.trainers] + [f"generator rank {rank}" for rank in members.generators]
    deadline = time.monotonic() + timeout_s
    try:
        store = connect_store(address, timeout_s)
        store.set(me, b"")
        while absent := [name for name in names if not store.check([name])]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{', '.join(absent)} did not come within {timeout_s:.0f} s")
            time.sleep(10 * POLL_S)
        return open_group(store, names.index(me), len(names), address, deadline - time.monotonic())
    except RuntimeError as error:  # torch's own errors among them
        raise RuntimeError(f"{me} did not meet the others of the weight group at {address}: {error}") from error


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one row of bytes: no backend then need know its dtype."""
    return tensor.view(-1).view(torch.uint8)


def _label(trainer_rank: int, generator_rank: int, tensor: str) -> str:
    return f"trainer rank {trainer_rank} to generator rank {generator_rank}, {tensor}"
