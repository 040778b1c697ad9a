"""The loop that every process runs over its local executor (LlamaRL, Algorithm 1).

megarl.train_loop has both sides of it. The protocols here are what the loop asks of executors and
channels (sections 5.1.1 and 5.1.2). A channel is a directed link between two executors, and each
process holds its own executor's ends of it. What a channel asks of the executor beyond this stands
with the channel, in its `…Executor` protocol: to fetch what it sends, to hand over what it receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

E = TypeVar("E", contravariant=True)


class Executor(Protocol):
    """A self-contained unit on its own processes with its own parallelism.

    Every process holds one instance.
    """

    curr_step: int  # the step the executor is about to run
    # it has been told, in the place of its input, that there will be no more: the run is to stop
    stopped: bool

    def init(self) -> None: ...

    def set_step(self, step: int) -> None: ...

    def step(self) -> None: ...

    def save_checkpoint(self) -> None: ...

    def shutdown(self) -> None: ...


class SendingEnd(Protocol[E]):
    """A channel's end at its outbound executor."""

    def send(self, executor: E) -> None:
        """Sends what the executor's last step has made.

        Raises TimeoutError that names who waits for whom.
        """

    def close(self) -> None:
        """Returns when all that was sent has been taken."""


class ReceivingEnd(Protocol[E]):
    """A channel's end at its inbound executor."""

    def recv(self, executor: E) -> None:
        """Waits for what the executor's coming step needs.

        Raises TimeoutError that names who waits for whom.
        """


class Controller[E: Executor]:
    """SPMD controller: no process drives another; all run this loop, and meet in the channels.

    Per step: what comes in, the step, what goes out. Algorithm 1 runs all channels before the step;
    receiving before and sending after it is the same order one tick shifted, and lets a channel
    without any lag be the plain synchronous loop.

    What goes on beside the loop is the executor's own: generation, whose groups leave as they
    finish, and the taking of weights. It goes on while the loop waits, and its failure is raised
    there.

    A trainer that is asked to stop is given no batch, on all its ranks; its loop ends there. The
    others are ended by the launcher.

    Outgoing channels also send before the first step, and `initial` ones receive then and after the
    last (Algorithm 1's `init_communication_channels`): the weights the trainer starts from reach
    the generator whatever it was started with.
    """

    def __init__(
        self,
        executor: E,
        incoming: Sequence[ReceivingEnd[E]],
        outgoing: Sequence[SendingEnd[E]],
        max_steps: int,
        initial: Sequence[ReceivingEnd[E]] = (),
    ):
        self.executor = executor
        self.incoming = incoming
        self.outgoing = outgoing
        self.initial = initial
        self.max_steps = max_steps

    def run(self) -> None:
        """Consumes and produces one batch and one weight version a step, from the executor's
        current step to `max_steps`.
        """
        executor = self.executor
        executor.init()
        self._send()
        self._receive(self.initial)
        while executor.curr_step < self.max_steps:
            executor.set_step(executor.curr_step)
            self._receive(self.incoming)
            if executor.stopped:
                executor.save_checkpoint()
                break
            executor.step()
            self._send()
            executor.save_checkpoint()
        self._receive(self.initial)  # the last weights
        for channel in self.outgoing:
            channel.close()
        executor.shutdown()

    def _receive(self, channels: Sequence[ReceivingEnd[E]]) -> None:
        for channel in channels:
            channel.recv(self.executor)

    def _send(self) -> None:
        for channel in self.outgoing:
            channel.send(self.executor)
