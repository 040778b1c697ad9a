"""The loop that every process runs over its local executor (LlamaRL, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.protocols import Executor, ReceivingEnd, SendingEnd


class Controller[E: Executor]:
    """SPMD controller: no process drives another; all run this loop, and meet in the channels.

    Per step: what comes in, the step, what goes out. Algorithm 1 runs all channels before the step; receiving before
    and sending after it is the same order one tick shifted, and lets a channel without any lag be the plain synchronous loop.

    What goes on beside the loop is the executor's own: generation, whose groups leave as they finish, and the taking of weights. It goes
    on while the loop waits, and its failure is raised there.

    A trainer that is asked to stop is given no batch, on all its ranks; its loop ends there. The others are ended by the launcher.

    Outgoing channels also send before the first step, and `initial` ones receive then and after the last (Algorithm 1's
    `init_communication_channels`): the weights the trainer starts from reach the generator whatever it was started with.
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
        self.incoming, self.outgoing, self.initial = incoming, outgoing, initial
        self.max_steps = max_steps

    def run(self) -> None:
        """Consumes and produces one batch and one weight version a step, from the executor's current step to `max_steps`."""
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
