"""The two roles everything is wired from: executors and channels (LlamaRL, sections 5.1.1 and 5.1.2)."""

from __future__ import annotations

import enum
from typing import Any, Protocol


class ChannelType(enum.Enum):
    """How a channel's data is distributed over the inbound executor's processes (LlamaRL, section 5.1.2)."""

    BROADCAST = "broadcast"
    SCATTER = "scatter"
    GATHER = "gather"
    DDMA_WEIGHTS_UPDATE = "ddma_weights_update"


class Executor(Protocol):
    """A self-contained unit on its own processes with its own parallelism.

    Every process holds one executor instance and runs the controller's loop over it:
    `init`, then per step `set_step`, the channels, `step`, `save_checkpoint`; at the end `shutdown`.
    """

    name: str  # "trainer", "generator", …
    rank: int  # rank of this process within the executor
    curr_step: int  # the step the executor is about to run
    stopped: bool  # it has been told, in the place of its input, that there will be no more: the run is to stop

    def init(self) -> None: ...

    def set_step(self, step: int) -> None: ...

    def step(self) -> None: ...

    def save_checkpoint(self) -> None: ...

    def get_model(self) -> Any: ...

    def shutdown(self) -> None: ...


class Channel(Protocol):
    """A directed, named link. Asynchrony is nothing but `capacity`: 0 synchronous, 1 one step behind, K a bounded
    queue, None unbounded.

    `send` runs on the outbound executor's processes, `recv` on the inbound executor's. Each blocks only until its
    deadline, and then raises an error that names who waits for whom.
    """

    name: str
    outbound: str  # executor name
    inbound: str  # executor name
    type: ChannelType

    @property
    def capacity(self) -> int | None: ...

    def send(self, executor: Executor) -> None: ...

    def recv(self, executor: Executor) -> None: ...

    def close(self) -> None: ...
