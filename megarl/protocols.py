"""What the controller's loop asks of executors and channels (LlamaRL, sections 5.1.1 and 5.1.2).

A channel is a directed link between two executors; each process holds its own executor's ends of it. What a channel asks of the executor
beyond this, to fetch what it sends and to hand over what it receives, stands with the channel (its `…Executor` protocol).
"""

from __future__ import annotations

from typing import Protocol, TypeVar

E = TypeVar("E", contravariant=True)


class Executor(Protocol):
    """A self-contained unit on its own processes with its own parallelism. Every process holds one instance."""

    curr_step: int  # the step the executor is about to run
    stopped: bool  # it has been told, in the place of its input, that there will be no more: the run is to stop

    def init(self) -> None: ...

    def set_step(self, step: int) -> None: ...

    def step(self) -> None: ...

    def save_checkpoint(self) -> None: ...

    def shutdown(self) -> None: ...


class SendingEnd(Protocol[E]):
    """A channel's end at its outbound executor."""

    def send(self, executor: E) -> None:
        """Sends what the executor's last step has made. Raises TimeoutError that names who waits for whom."""

    def close(self) -> None:
        """Returns when all that was sent has been taken."""


class ReceivingEnd(Protocol[E]):
    """A channel's end at its inbound executor."""

    def recv(self, executor: E) -> None:
        """Waits for what the executor's coming step needs. Raises TimeoutError that names who waits for whom."""
