"""A test's object in a process of its own, whose methods are called through a pipe.

(multiprocessing's spawn would run pytest's own script again in the child.)
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


class RemoteObject:
    """`kind(*arguments)` in another process.

    The arguments travel as JSON; what methods take and return is pickled: arrays, not tensors.
    """

    def __init__(self, kind: type, *arguments: Any, timeout_s: float = 120.0):
        self._pipe, child_end = Pipe()
        self._timeout_s = timeout_s
        call = [inspect.getfile(kind), kind.__name__, json.dumps(arguments)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(child_end.fileno()), *call],
            pass_fds=[child_end.fileno()],
        )
        child_end.close()

    def start(self, method: str, *arguments: Any) -> None:
        """Calls a method without waiting. Answers come in the order of the calls."""
        self._pipe.send((method, arguments))

    def result(self) -> Any:
        assert self._pipe.poll(self._timeout_s), f"no answer within {self._timeout_s:.0f} s"
        succeeded, answer = self._pipe.recv()
        assert succeeded, answer
        return answer

    def call(self, method: str, *arguments: Any) -> Any:
        self.start(method, *arguments)
        return self.result()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptor, file, kind, arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(file).parent))
    served = getattr(importlib.import_module(Path(file).stem), kind)(*json.loads(arguments))
    pipe = Connection(int(descriptor))
    while True:
        try:
            method, call_arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(served, method)(*call_arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
