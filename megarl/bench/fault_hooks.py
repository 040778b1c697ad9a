"""A transport and a rollout for the run of `megarl bench faults`, which do wrong when an order tells them to (fault_orders)."""

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

FLIPPED = "model.layers.1.mlp.gate_up_proj.weight"  # orders are carried out before this tensor is written
REWARD_S = 1.0  # slows steps down, so that restarting engines get some of the machine's time


class OfAnotherVersion(msgspec.Struct, frozen=True, tag=True):
    """A message that the run does not know."""


def _the_peer() -> Peer:
    """This trainer rank's connection to the hub; transports are not given it."""
    return next(found for found in gc.get_objects() if isinstance(found, Peer))


class FaultyTransport(SharedMemoryTransport):
    """In the middle of a write it flips a bit, kills an engine or its own rank, or sends an unknown message, as ordered."""

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        folder = os.environ[ORDERS]
        if copy.destination_tensor == FLIPPED:
            if taken(folder, FLIP) is not None:
                values = values.clone()
                values.view(torch.uint8)[0, 5] ^= 4
            if pids := taken(folder, KILL_ENGINE):
                for pid in pids.split():
                    os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.2)  # until the kill has taken effect
            if taken(folder, DIE) is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            if taken(folder, GARBLE) is not None:
                _the_peer().send(OfAnotherVersion())  # pyright: ignore[reportArgumentType]  # that is the fault
        super().write(copy, values)


async def rollout(context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int, *, orders: str) -> list[Sample]:
    """Runs a tool that may be ordered to go wrong, then single_turn: a failing tool does not cost the prompt."""
    try:
        await context.run_in_worker(tool, orders)
    except ToolError as error:
        print(f"the tool failed: {error}", flush=True)
    await asyncio.sleep(REWARD_S)
    return await single_turn(context, prompt, sampling, n)
