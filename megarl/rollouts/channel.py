"""The rollouts channel: groups from the generator as they finish, batches to every trainer rank.

    generator                                   trainer rank 0
    begins where the ledger ends       ←        GenerateFrom(first, skip), once
    GroupsStarted(ordinals, version)   →
    GroupReady(group)                  →        buffers it; makes a batch when asked for one
    generates them again               ←        Regenerate(ordinals) of groups found too old

The sending end decides how far the generator may run ahead, when it begins prompts (`admission`). The receiving end decides which groups
are used, and when (`buffer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from megarl.messaging.link import LOOK_UP_S, Hub, Peer
from megarl.messaging.members import members_only
from megarl.messaging.messages import GenerateFrom, GroupReady, GroupsStarted, Regenerate, WeightsWanted
from megarl.messaging.stopping import StopRequest
from megarl.observe.status import StatusBoard
from megarl.observe.trace import TraceWriter
from megarl.rollouts.buffer import RolloutBuffer
from megarl.types import Batch, Ordinal, Version

LATER_S = 600.0  # how much later rank 0 may come to a batch than the others, since it also reports the step before
BROADCAST_BYTES = 1 << 28  # the most GPU memory that the broadcast of a batch takes


class BatchExecutor(Protocol):
    """The trainer's executor, as the receiving end uses it."""

    rank: int
    curr_step: int
    device: torch.device
    status: StatusBoard
    trace: TraceWriter

    def put_batch(self, batch: Batch, waited_s: float) -> None: ...

    def stop(self) -> None: ...


class RolloutsSender:
    """The end at the generator. The rollout stream sends each group as soon as it finishes, whatever the controller's loop does."""

    def __init__(self, link: Hub):
        self.link = link

    async def first(self, timeout_s: float) -> GenerateFrom:
        return (await self.link.arrival(GenerateFrom, timeout_s, "trainer.0 to say which prompts are to be generated"))[1]

    async def rejected(self) -> list[Ordinal]:
        """Waits for the next rejection, without a deadline."""
        return (await self.link.arrival(Regenerate, None, "rejected groups"))[1].ordinals

    def begun(self, ordinals: list[Ordinal], version: Version) -> None:
        self.link.send("trainer.0", GroupsStarted(ordinals, version))

    def finished(self, group: GroupReady) -> None:
        self.link.send("trainer.0", group)


class _Resend(msgspec.Struct, frozen=True, tag=True):
    """Sent in place of a batch: all ranks have to offer their weights once more first."""


class _EncodedBatch(msgspec.Struct, frozen=True, tag="Batch"):
    """A Batch whose groups are still encoded; it looks the same on the wire."""

    step: int
    groups: list[msgspec.Raw]
    generate_s: float
    generator_wait_s: float
    due_wait_s: float
    rejected: int
    buffered: int


_decode_agreed = msgspec.msgpack.Decoder(Batch | _Resend | None).decode


class RolloutsReceiver:
    """The end at every trainer rank. `buffer` is None except on rank 0.

    Rank 0 broadcasts a batch's bytes. Every rank sees the whole batch (only token ids and log-probs: 64 MiB at 2048 samples of 8k tokens;
    routing replay adds a byte for each expert of a token) and picks its data-parallel share itself, so that all ranks agree on
    denominators and microbatch counts without communicating. Each rank decodes the groups once. The other ranks wait for the batch's size
    while rank 0 waits for rollouts, longer than any other collective may take. So the size is sent in a process group of its own, over
    gloo, where no GPU spins meanwhile.

    When the run is to stop, rank 0 broadcasts that there is no batch, so that all ranks stop after the same step.
    """

    def __init__(
        self,
        link: Peer,
        timeout_s: float,
        buffer: RolloutBuffer | None = None,
        stop: StopRequest | None = None,
        resend: Callable[[Any], None] = lambda executor: None,
    ):
        self.link = link
        self._timeout_s, self._buffer, self._stop = timeout_s, buffer, stop or StopRequest()
        self._resend = resend  # sends the weights again, for an engine that has come back
        self._idle_s = 0.0  # of the generator, up to the previous batch
        self._patient: dist.ProcessGroup | None = None  # None until the first batch is asked for
        if buffer is not None:
            ledger = buffer.ledger()
            held = sorted([*ledger.consumed_beyond, *(group.ordinal for group in ledger.groups)])
            link.send(GenerateFrom(ledger.consumed_below, held))

    def recv(self, executor: BatchExecutor) -> None:
        """Hands the executor the batch of `executor.curr_step` and the seconds it waited for it. Time spent sending weights again is not
        among them: `WeightsSender.send` reports it."""
        waited_s, began = 0.0, time.monotonic()
        while isinstance(batch := self._agreed(executor), _Resend):
            waited_s += time.monotonic() - began
            self._resend(executor)
            began = time.monotonic()
        if batch is None:
            executor.stop()
        else:
            executor.put_batch(batch, waited_s=waited_s + time.monotonic() - began)

    def _agreed(self, executor: BatchExecutor) -> Batch | _Resend | None:
        """Returns rank 0's answer on every rank. Collective."""
        if self._patient is None:  # rank 0's own deadline comes first, and says what it waits for
            with members_only():
                group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s + LATER_S), group_desc="batches")
            assert isinstance(group, dist.ProcessGroup)  # all ranks are members
            self._patient = group
        body = msgspec.msgpack.encode(self._next_batch(executor)) if executor.rank == 0 else b""
        return _decode_agreed(broadcast_bytes(body, executor.device, self._patient))

    def ledger(self) -> bytes:
        """The ledger for a checkpoint, encoded, with everything that has arrived by now."""
        self._take_in()
        return self._rank_0_buffer.ledger().encode()

    @property
    def _rank_0_buffer(self) -> RolloutBuffer:
        assert self._buffer is not None, "only rank 0 has a buffer"
        return self._buffer

    def _next_batch(self, executor: BatchExecutor) -> _EncodedBatch | _Resend | None:
        """Waits for the batch of this step, and has groups that are too old generated again. Returns None when the run is to stop."""
        step, buffer = executor.curr_step, self._rank_0_buffer
        deadline, full_since, rejected = time.monotonic() + self._timeout_s, None, 0
        awaited = f"batch {step} from generator.0"
        with executor.status.waiting("generator.0", awaited), executor.trace.span(f"wait for batch {step}"):
            while True:
                if self._stop.asked:
                    return None
                wanted = self.link.poll(WeightsWanted)
                if wanted is not None and wanted[1].version == step:  # otherwise a newer version has been sent meanwhile
                    return _Resend()
                self._take_in()
                if stale := buffer.reject(step):
                    self.link.send(Regenerate(stale))
                    rejected += len(stale)
                groups = buffer.take(step)
                if groups is not None:
                    break
                if full_since is None and buffer.full():
                    full_since = time.monotonic()
                left_s = deadline - time.monotonic()
                if not self.link.wait(min(left_s, LOOK_UP_S)) and left_s <= 0:
                    raise TimeoutError(f"trainer.0 waited {self._timeout_s:.0f} s for {awaited}; {buffer}")
        now = time.monotonic()
        due_wait_s = now - full_since if full_since is not None else 0.0
        return self._encoded(step, groups, due_wait_s, rejected)

    def _take_in(self) -> None:
        """Puts everything that has arrived into the buffer. A group is announced before it finishes, and messages go on arriving: so
        finished groups are collected first, and the announcements collected after them include theirs."""
        ready = self.link.drain(GroupReady)
        for started in self.link.drain(GroupsStarted):
            self._rank_0_buffer.begin(started.ordinals, started.version)
        for group in ready:
            self._rank_0_buffer.finish(group)

    def _encoded(self, step: int, groups: list[GroupReady], due_wait_s: float, rejected: int) -> _EncodedBatch:
        timed = [group for group in groups if group.ended_s > 0]
        generate_s = max(group.ended_s for group in timed) - min(group.started_s for group in timed) if timed else 0.0
        idle_s = max([self._idle_s, *(group.idle_s for group in timed)])
        waited_s, self._idle_s = idle_s - self._idle_s, idle_s
        buffered = self._rank_0_buffer.finished
        return _EncodedBatch(step, [group.group for group in groups], generate_s, waited_s, due_wait_s, rejected, buffered)


def broadcast_bytes(body: bytes, device: torch.device, patient: dist.ProcessGroup) -> bytes:
    """Returns rank 0's bytes on every rank of the default process group. Collective. `patient` is a gloo group of the same ranks, with a
    timeout long enough to wait for rank 0."""
    size = torch.tensor([len(body)])
    dist.broadcast(size, src=0, group=patient)
    whole = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(int(size), dtype=torch.uint8)
    for piece in whole.split(BROADCAST_BYTES):
        data = piece.to(device)
        dist.broadcast(data, src=0)
        piece.copy_(data)
    return whole.numpy().tobytes()
