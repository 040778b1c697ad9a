"""Functions that test_workers.py calls in worker processes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path


def whose(name: str) -> list[object]:
    print("this is no reply")
    return [name, os.getpid()]


def wait_for(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.01)
    return "there"


def fail(mode: str) -> str:
    if mode == "value":
        raise ValueError("no such thing: \n\u00e9")
    if mode == "mistake":
        raise KeyError(mode)
    if mode == "memory":
        return str(len(bytearray(1 << 40)))
    if mode == "children":  # children that read standard input and write to standard output
        return str(len(subprocess.run("echo no reply; cat", shell=True).args))
    if mode == "odd":
        return {1, 2}
    if mode == "exit":
        os._exit(3)
    return "{" * int(mode)
