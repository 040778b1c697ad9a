"""The loop that every process runs over its local executor (LlamaRL, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.protocols import Channel, Executor


class Controller:
    """SPMD controller: no process drives another; all run this loop, and meet in the channels.

    Per step: what comes in, the step, what goes out. Algorithm 1 runs all channels before the step; receiving before
    and sending after it is the same order one tick shifted, and lets capacity 0 be the plain synchronous loop.

    What goes on beside the loop, as generation and the taking of weights do, is the executor's own: it goes on while the loop
    waits there, and its failure is raised where the loop waits.

    A trainer that is asked to stop is given no batch, on all its ranks; its loop ends there. The others are ended by the launcher.

    `init_channels` run once before the first step (Algorithm 1's `init_communication_channels`): the weights the
    trainer starts from reach the generator whatever the generator was started with.
    """

    def __init__(self, executor: Executor, channels: Sequence[Channel], init_channels: Sequence[Channel], max_steps: int):
        self.executor = executor
        self.channels = channels
        self.init_channels = init_channels
        self.max_steps = max_steps

    def run(self) -> None:
        """Consumes and produces one batch and one weight version a step, from the executor's current step to `max_steps`."""
        executor = self.executor
        executor.init()
        self._send(self.init_channels)
        self._receive(self.init_channels)
        while executor.curr_step < self.max_steps:
            executor.set_step(executor.curr_step)
            self._receive(self.channels)
            if executor.stopped:
                executor.save_checkpoint()
                break
            executor.step()
            self._send(self.channels)
            executor.save_checkpoint()
        self._receive(self.init_channels)  # the last weights
        executor.shutdown()
        for channel in self.channels:
            channel.close()

    def _receive(self, channels: Sequence[Channel]) -> None:
        for channel in channels:
            if channel.inbound == self.executor.name:
                channel.recv(self.executor)

    def _send(self, channels: Sequence[Channel]) -> None:
        for channel in channels:
            if channel.outbound == self.executor.name:
                channel.send(self.executor)
