"""Two-sided writes over NCCL, between hosts with GPUs on which Mooncake is not installed.

All messages of a wave are one NCCL group, and so one launch for all peers. A message is in the same
wave on both sides, and waves have the same order everywhere, so ranks cannot deadlock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.base.shared_gpu import SHARES
from megarl.messaging.host import Host
from megarl.weight_sync.transports.base import NCCL
from megarl.weight_sync.transports.two_sided import (
    POLL_S,
    Message,
    TwoSidedMemory,
    TwoSidedTransport,
)

Started = tuple[dist.Work, Sequence[Message], float] | None  # the last is the deadline


class NcclGroup:
    """Messages are on the current GPU of this process. No two ranks may share a GPU."""

    def __init__(self, store: dist.Store, rank: int, size: int, address: str, timeout_s: float):
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._timeout_s = timeout_s
        options = dist.ProcessGroupNCCL.Options()
        # torch's watchdog ends the process when this expires. The deadline in `wait` is earlier,
        # and names the messages that are stuck.
        options._timeout = timedelta(seconds=2 * timeout_s + 60)
        self._backend: Any = dist.ProcessGroupNCCL(
            dist.PrefixStore(NCCL, store), rank, size, options
        )
        # one communicator for all, not one for each pair at its first message
        self._backend.eager_connect_single_device(self.device)

    def send(self, messages: Sequence[Message]) -> Started:
        return self._start(self._backend.send, messages)

    def receive(self, messages: Sequence[Message]) -> Started:
        return self._start(self._backend.recv, messages)

    def wait(self, started: Started) -> None:
        """Polls, because Work.wait only makes the current stream wait for the kernel."""
        if started is None:
            return
        work, messages, deadline = started
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._backend.abort()
                raise TimeoutError(
                    f"weights from {_labels(messages)}: not through within {self._timeout_s:.0f} s "
                    "by NCCL"
                )
            time.sleep(POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"weights from {_labels(messages)}: NCCL failed: {error}") from error

    def close(self) -> None:
        self._backend.abort()  # shutdown would wait for the peers, which may have ended

    def _start(
        self,
        operation: Callable[[list[torch.Tensor], int, int], dist.Work],
        messages: Sequence[Message],
    ) -> Started:
        if not messages:
            return None
        self._backend._start_coalescing()
        for message in messages:
            operation([message.buffer], message.peer, 0)
        return self._backend._end_coalescing(), messages, time.monotonic() + self._timeout_s


class NcclMemory(TwoSidedMemory):
    open_group = NcclGroup


class NcclTransport(TwoSidedTransport):
    memory = NcclMemory
    open_group = NcclGroup
    coalesces = True

    @staticmethod
    def found_here() -> tuple[str, ...]:
        if SHARES in os.environ:
            return (SHARES,)
        return ()

    @staticmethod
    def hindrance(trainer: Host, generator: Host) -> str:
        if SHARES in trainer.has and SHARES in generator.has:
            return "may share a GPU, and NCCL refuses two ranks of a communicator on one GPU"
        if trainer.cuda and generator.cuda:
            return ""
        return "do not both have CUDA"


def _labels(messages: Sequence[Message]) -> str:
    suffix = f", and {len(messages) - 1} more of its wave" if len(messages) > 1 else ""
    return messages[0].label + suffix
