"""What runs inside a run of `megarl bench faults`: a transport and a rollout that do wrong when they are told to (fault_orders)."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time

import msgspec
import torch

from megarl.bench.fault_orders import DIE, FLIP, GARBLE, KILL_ENGINE, ORDERS, taken, tool
from megarl.generator.completions import Sampling
from megarl.messaging.link import Peer
from megarl.reshard.map import Copy
from megarl.rollouts.environments.base import RolloutContext, ToolError
from megarl.rollouts.environments.single_turn import single_turn
from megarl.types import Prompt, Sample
from megarl.weight_sync.transports.shared_memory import SharedMemoryTransport

FLIPPED = "model.layers.1.mlp.gate_up_proj.weight"  # in what the flipping rank writes of it
REWARD_S = 1.0  # so that steps leave engines that start again some of the machine's time


class OfAnotherVersion(msgspec.Struct, frozen=True, tag=True):
    """No message of the run."""


def _the_peer() -> Peer:
    """This trainer rank's connection to the hub, which no transport is given."""
    return next(found for found in gc.get_objects() if isinstance(found, Peer))


class FaultyTransport(SharedMemoryTransport):
    """In the middle of a write: a flipped bit, an engine's end, or the rank's own."""

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        folder = os.environ[ORDERS]
        if copy.destination_tensor == FLIPPED:
            if taken(folder, FLIP) is not None:
                values = values.clone()
                values.view(torch.uint8)[0, 5] ^= 4
            if pids := taken(folder, KILL_ENGINE):
                for pid in pids.split():
                    os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.2)  # a kill takes its time
            if taken(folder, DIE) is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            if taken(folder, GARBLE) is not None:
                _the_peer().send(OfAnotherVersion())  # pyright: ignore[reportArgumentType]  # that is the fault
        super().write(copy, values)


async def rollout(context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int, *, orders: str) -> list[Sample]:
    """single_turn, after a tool that may be told to go wrong. Such a tool is no reason to lose the prompt."""
    try:
        await context.run_in_worker(tool, orders)
    except ToolError as error:
        print(f"the tool failed: {error}", flush=True)
    await asyncio.sleep(REWARD_S)
    return await single_turn(context, prompt, sampling, n)
