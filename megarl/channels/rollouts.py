"""The rollouts channel: finished batches, from the generator to every trainer rank."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from megarl.messaging.link import Hub, Peer
from megarl.messaging.messages import BatchReady
from megarl.protocols import ChannelType, Executor
from megarl.types import Batch


@dataclass
class RolloutsChannel:
    """Generator → trainer, one `Batch` a step.

    The generator's process sends each batch once, to trainer rank 0, which broadcasts its bytes over the trainer's own
    process group: every rank sees the whole batch (token ids and log-probs only: 64 MiB at 2048 samples of 8k tokens)
    and picks its data-parallel share itself, so that all ranks agree on denominators and microbatch counts without
    talking.

    How far the generator may run ahead is bounded where it takes weights: it starts batch s only with weights of
    version s - capacity or newer, so at most `capacity` finished batches are ever under way.
    """

    link: Hub | Peer
    capacity: int
    timeout_s: float
    name: str = "rollouts"
    outbound: str = "generator"
    inbound: str = "trainer"
    type: ChannelType = ChannelType.BROADCAST

    def send(self, executor: Executor) -> None:
        self.link.send("trainer.0", BatchReady(executor.get_output()))

    def recv(self, executor: Executor) -> None:
        """Hands the batch of `executor.curr_step` to the executor, with the seconds it waited for it."""
        started = time.monotonic()
        body = b""
        if executor.rank == 0:
            awaited = f"batch {executor.curr_step} from generator.0"
            with executor.status.waiting("generator.0", awaited):
                _, message = self.link.receive(BatchReady, self.timeout_s, awaited)
            if message.batch.step != executor.curr_step:
                raise RuntimeError(f"trainer.0 is at step {executor.curr_step} but was sent batch {message.batch.step}")
            body = msgspec.msgpack.encode(message.batch)
        body = broadcast_bytes(body, executor.device)
        executor.put_batch(msgspec.msgpack.decode(body, type=Batch), waited_s=time.monotonic() - started)

    def close(self) -> None:
        self.link.close()


def broadcast_bytes(body: bytes, device: torch.device) -> bytes:
    """The bytes of global rank 0, on every rank of the default process group. Collective."""
    size = torch.tensor([len(body)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        data.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    dist.broadcast(data, src=0)
    return data.cpu().numpy().tobytes()
