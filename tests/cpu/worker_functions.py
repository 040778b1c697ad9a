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


def fail(how: str) -> str:
    if how == "value":
        raise ValueError("no such thing: \n\u00e9")
    if how == "mistake":
        raise KeyError(how)
    if how == "memory":
        return str(len(bytearray(1 << 40)))
    if how == "children":  # children that read standard input and write to standard output
        return str(len(subprocess.run("echo no reply; cat", shell=True).args))
    if how == "odd":
        return {1, 2}
    if how == "exit":
        os._exit(3)
    return "{" * int(how)
