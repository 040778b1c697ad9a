"""Two-sided writes.

Each box is a message, which the engine worker receives in place if the box is contiguous.

Trainer and generator ranks share a separate process group, independent of the default group of
either side (see Members). Both process the same reshard map in the same order, so messages need no
names. They travel in waves, layer by layer. At most two waves are in flight, so staging buffers on
either side stay small.

Changes since the last update (weights.delta) come as one blob from each trainer rank. First the
sizes of all are sent, then the blobs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megarl.messaging.process_groups import connect_store, open_store
from megarl.reshard.deltas import Changes, make_blob, spread_blob
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.schedule import waves
from megarl.weight_sync.transports.base import (
    Endpoint,
    GroupMembers,
    Incoming,
    LiveParameters,
    Memory,
    Offer,
    Opening,
    Transport,
    describe,
)

POLL_S = 0.0005
CHANGES = "changes"  # instead of a tensor's name
LONGEST_BYTES = 256 << 20  # limit of a message with a part of a blob


@dataclass(frozen=True)
class Message:
    peer: int  # rank in the group
    # contiguous bytes on the group's device; kept until the message has arrived
    buffer: torch.Tensor
    label: str  # "trainer rank 0 to generator rank 1, lm_head.weight"
    # when receiving: destination of the buffer, unless it was received in place
    target: torch.Tensor | None = None


class TransferGroup(Protocol):
    """A process group of one backend.

    All methods raise RuntimeError or TimeoutError that names the message.
    """

    device: torch.device  # device of messages

    def send(self, messages: Sequence[Message]) -> Any:
        """Starts to send. Pass the result to `wait`."""
        ...

    def receive(self, messages: Sequence[Message]) -> Any: ...

    def wait(self, started: Any) -> None: ...

    def close(self) -> None: ...


# arguments: store, rank, size, address of the store, deadline in seconds
OpenGroup = Callable[[dist.Store, int, int, str, float], TransferGroup]


class TwoSidedTransport(Transport):
    """The sending end. Subclasses choose the backend."""

    one_sided = False
    open_group: OpenGroup
    coalesces: bool  # whether a wave's messages are started together instead of one by one

    @classmethod
    def offers(cls, opening: Opening) -> dict[int, Offer]:
        assert opening.map is not None
        store, address = open_store(opening.address)
        opening.stores.append(store)
        trainers = sorted({rank for writers in opening.writers.values() for rank in writers})
        members = GroupMembers(tuple(trainers), tuple(sorted(opening.writers)), waves(opening.map))
        result: dict[int, Offer] = {}
        for rank, of_rank in opening.writers.items():
            result[rank] = Offer(
                address=address,
                members=members,
                incoming=_incoming(opening.map, rank, of_rank, members),
                timeout_s=opening.timeout_s,
            )
        return result

    def __init__(self, rank: int, timeout_s: float):
        super().__init__(rank, timeout_s)
        self._waiting: list[Message] = []  # messages of the current wave, not started
        self._wave = -1
        self._started: list[tuple[int, Sequence[Message], Any]] = []  # with the wave of each
        self._blobs: list[tuple[int, torch.Tensor]] = []  # (generator rank, blob), not sent

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        members = endpoints[0].members
        assert members is not None
        self._members = members
        self._peers = {
            rank: len(members.trainers) + index for index, rank in enumerate(members.generators)
        }
        self._group = join(
            type(self).open_group,
            endpoints[0].address,
            members,
            f"trainer rank {self._rank}",
            self._timeout_s,
        )

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        """Nothing to do."""

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        wave = self._members.waves[copy.depth]
        if wave != self._wave:
            self._start()
            self._finish(end_wave=wave - 1)
            self._wave = wave
        label = _label(self._rank, copy.destination_rank, copy.destination_tensor)
        buffer = as_bytes(values.to(self._group.device).contiguous())
        self._waiting.append(Message(self._peers[copy.destination_rank], buffer, label))
        if not self.coalesces:
            self._start()

    def room(self, rank: int) -> float:
        return math.inf

    def write_changes(self, rank: int, changes: Changes, version: int) -> None:
        self._blobs.append(
            (rank, make_blob([delta for _, delta in changes], version).to(self._group.device))
        )

    def fence(self) -> None:
        sizes = []
        parts = []
        for rank, blob in self._blobs:
            peer = self._peers[rank]
            label = _label(self._rank, rank, CHANGES)
            size = torch.tensor([len(blob)], device=blob.device)
            sizes.append(Message(peer, as_bytes(size), label))
            for part in blob.split(LONGEST_BYTES):
                parts.append(Message(peer, as_bytes(part), label))
        self._blobs = []
        for messages in (sizes, parts):
            self._waiting += messages
            self._start()
            self._finish(end_wave=len(self._members.waves))
        self._wave = -1

    def close(self) -> None:
        self._waiting = []
        self._started = []
        self._blobs = []
        self._group.close()

    def _start(self) -> None:
        if self._waiting:
            self._started.append((self._wave, self._waiting, self._group.send(self._waiting)))
            self._waiting = []

    def _finish(self, end_wave: int) -> None:
        """Waits for all waves older than `end_wave`."""
        while self._started and self._started[0][0] < end_wave:
            self._group.wait(self._started.pop(0)[2])


class TwoSidedMemory(Memory):
    """The receiving end.

    It joins the group at the first `receive`. Subclasses choose the backend.
    """

    open_group: OpenGroup

    def open(self, live: LiveParameters, offer: Offer) -> Endpoint:
        assert offer.members is not None
        self._rank = live.rank
        self._offer = offer
        self._members = offer.members
        self._group = None
        tensors = [describe(name, values) for name, values in live.tensors().items()]
        return Endpoint(
            live.rank, live.kind, offer.address, 0, tensors, members=offer.members, host=live.host
        )

    def receive(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Receives all messages of one update of `tensors`."""
        group = self._join()
        started_waves: list[tuple[list[Message], Any]] = []
        for _, wave in groupby(self._offer.incoming, key=lambda incoming: incoming.wave):
            messages = []
            for incoming in wave:
                if incoming.tensor in tensors:
                    target = tensors[incoming.tensor][incoming.box.slices()]
                    messages.append(self._message(incoming, target))
            if not messages:
                continue
            started_waves.append((messages, group.receive(messages)))
            if len(started_waves) > 1:
                self._finish(*started_waves.pop(0))
        for messages, started in started_waves:
            self._finish(messages, started)

    def receive_changes(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        group = self._join()
        trainers = sorted({incoming.source_rank for incoming in self._offer.incoming})
        sizes = [torch.zeros(1, dtype=torch.int64, device=group.device) for _ in trainers]
        self._receive_from(trainers, [[size] for size in sizes])
        blobs = [torch.empty(int(size), dtype=torch.uint8, device=group.device) for size in sizes]
        self._receive_from(trainers, [blob.split(LONGEST_BYTES) for blob in blobs])
        for trainer, blob in zip(trainers, blobs):
            boxes = []
            for incoming in self._offer.incoming:
                if incoming.source_rank == trainer:
                    boxes.append(tensors[incoming.tensor][incoming.box.slices()])
            spread_blob(blob, version, boxes, f"trainer rank {trainer}")

    def _receive_from(
        self, trainers: Sequence[int], buffers: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        messages = []
        for trainer, parts in zip(trainers, buffers):
            place = self._members.trainers.index(trainer)
            label = _label(trainer, self._rank, CHANGES)
            for part in parts:
                messages.append(Message(place, as_bytes(part), label))
        group = self._join()
        group.wait(group.receive(messages))

    def _join(self) -> TransferGroup:
        if self._group is None:
            opens = type(self).open_group
            offer = self._offer
            self._group = join(
                opens, offer.address, self._members, f"generator rank {self._rank}", offer.timeout_s
            )
        return self._group

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
                message.target.copy_(
                    message.buffer.view(message.target.dtype).view(message.target.shape)
                )


def _incoming(
    map: ReshardMap, rank: int, trainers: Collection[int], members: GroupMembers
) -> list[Incoming]:
    result: list[Incoming] = []
    for copy in map.writes_to(rank):
        if copy.source_rank in trainers:
            result.append(
                Incoming(
                    copy.source_rank,
                    copy.destination_tensor,
                    copy.destination_box,
                    members.waves[copy.depth],
                )
            )
    return result


def join(
    open_group: OpenGroup, address: str, members: GroupMembers, me: str, timeout_s: float
) -> TransferGroup:
    """Meets the other members at the store.

    `me`: "trainer rank 3" or "generator rank 0". Raises RuntimeError with the names of absent
    members.
    """
    names = [f"trainer rank {rank}" for rank in members.trainers]
    names += [f"generator rank {rank}" for rank in members.generators]
    deadline = time.monotonic() + timeout_s
    try:
        store = connect_store(address, timeout_s)
        store.set(me, "")
        while absent := [name for name in names if not store.check([name])]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{', '.join(absent)} did not come within {timeout_s:.0f} s")
            time.sleep(10 * POLL_S)
        return open_group(store, names.index(me), len(names), address, deadline - time.monotonic())
    except RuntimeError as error:  # also torch's own errors
        raise RuntimeError(
            f"{me} did not meet the others of the weight group at {address}: {error}"
        ) from error


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one row of bytes, because backends do not know every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _label(trainer_rank: int, generator_rank: int, tensor: str) -> str:
    return f"trainer rank {trainer_rank} to generator rank {generator_rank}, {tensor}"
