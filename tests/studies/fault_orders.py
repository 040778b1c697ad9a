"""Orders with which `python tests/studies faults` makes parts of its run fail, and a tool that
obeys them.

An order is a file in one folder. The process that renames it away carries it out, so it is carried
out once. Trainer ranks get the folder from an environment variable, and the rollout from an
argument. This module imports little, because tools start often and have a memory limit.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

ORDERS = "MEGARL_FAULT_ORDERS"  # the folder
FLIP = "flip_a_bit"
KILL_ENGINE = "kill_an_engine"
DIE = "die"
GARBLE = "garble"
TOOL = "tool"


def order(folder: Path, name: str, text: str = "") -> None:
    part = folder / f"{name}.part"
    part.write_text(text)
    part.rename(folder / name)


def take_order(folder: str | Path, name: str) -> str | None:
    """Takes an order and returns its text.

    Returns None if there is no such order, or another process has taken it.
    """
    path = Path(folder, name)
    taken_file = Path(folder, f"{name}.taken.{os.getpid()}")
    if not path.exists():
        return None
    try:
        path.rename(taken_file)
    except FileNotFoundError:
        return None
    text = taken_file.read_text()
    taken_file.unlink()
    return text


def ordered_tool(orders: str) -> str:
    """Runs in a worker process.

    An order can make it crash, hang, print for ever or answer too much.
    """
    wrong = take_order(orders, TOOL)
    if wrong == "crash":
        os._exit(3)
    if wrong == "crash twice":  # after a crash another worker repeats the call once
        order(Path(orders), TOOL, "crash")
        os._exit(3)
    if wrong == "hang":
        time.sleep(3600)
    while wrong == "print":
        print("." * 80)
    return "." * (1 << 21) if wrong == "answer too much" else "done"
