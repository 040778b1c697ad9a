"""What runs inside a run of `megarl bench faults`: a transport and a rollout that do wrong when they are told to.

Orders are files in one folder; whoever renames an order away carries it out, so that it is carried out once. The folder is named to
trainer ranks by an environment variable, and to the rollout by its argument.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Optional

import torch

from megarl.environments.base import RolloutContext, ToolError
from megarl.environments.single_turn import single_turn
from megarl.generator.client import Sampling
from megarl.reshard.map import Copy
from megarl.transports.shared_memory import SharedMemoryTransport
from megarl.types import Prompt, Sample

ORDERS = "MEGARL_FAULT_ORDERS"  # the folder
FLIP, KILL_ENGINE, DIE, TOOL = "flip_a_bit", "kill_an_engine", "die", "tool"
FLIPPED = "model.layers.1.mlp.gate_up_proj.weight"  # in what the flipping rank writes of it
REWARD_S = 0.3  # so that steps leave engines that start again some of the machine's time


def order(folder: Path, name: str, text: str = "") -> None:
    part = folder / f"{name}.part"
    part.write_text(text)
    part.rename(folder / name)


def taken(folder: str | Path, name: str) -> Optional[str]:
    """The order's text; None where there is none, or another process has taken it."""
    path, mine = Path(folder, name), Path(folder, f"{name}.taken.{os.getpid()}")
    if not path.exists():
        return None
    try:
        path.rename(mine)
    except FileNotFoundError:
        return None
    text = mine.read_text()
    mine.unlink()
    return text


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
        super().write(copy, values)


async def rollout(context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int, *, orders: str) -> list[Sample]:
    """single_turn, after a tool that may be told to go wrong. Such a tool is no reason to lose the prompt."""
    try:
        await context.run_in_worker(tool, orders)
    except ToolError as error:
        print(f"the tool failed: {error}", flush=True)
    await asyncio.sleep(REWARD_S)
    return await single_turn(context, prompt, sampling, n)


def tool(orders: str) -> str:
    """In a worker process of its own."""
    wrong = taken(orders, TOOL)
    if wrong == "crash":
        os._exit(3)
    if wrong == "crash twice":  # its worker is replaced after the first
        order(Path(orders), TOOL, "crash")
        os._exit(3)
    if wrong == "hang":
        time.sleep(3600)
    while wrong == "print":
        print("." * 80)
    return "." * (1 << 21) if wrong == "answer too much" else "done"
