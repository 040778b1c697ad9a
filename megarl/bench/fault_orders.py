"""What a run of `megarl bench faults` is told to do wrong, and the tool of it that is told so. Little is imported: tools start often.

Orders are files in one folder; whoever renames an order away carries it out, so that it is carried out once. The folder is named to
trainer ranks by an environment variable, and to the rollout by its argument.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

ORDERS = "MEGARL_FAULT_ORDERS"  # the folder
FLIP, KILL_ENGINE, DIE, GARBLE, TOOL = "flip_a_bit", "kill_an_engine", "die", "garble", "tool"


def order(folder: Path, name: str, text: str = "") -> None:
    part = folder / f"{name}.part"
    part.write_text(text)
    part.rename(folder / name)


def taken(folder: str | Path, name: str) -> str | None:
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


def tool(orders: str) -> str:
    """In a worker process of its own."""
    wrong = taken(orders, TOOL)
    if wrong == "crash":
        os._exit(3)
    if wrong == "crash twice":  # the call is tried once more, by another worker
        order(Path(orders), TOOL, "crash")
        os._exit(3)
    if wrong == "hang":
        time.sleep(3600)
    while wrong == "print":
        print("." * 80)
    return "." * (1 << 21) if wrong == "answer too much" else "done"
