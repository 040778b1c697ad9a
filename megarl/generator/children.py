"""Each process of an engine watches its children, and ends when one of them has died.

Without data-parallel attention SGLang notices a scheduler that dies before it is ready; but the error it raises then does not end the
process, since Python waits for the remaining children.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.process import BaseProcess

from megarl.deaths import cause, ended_for_memory, how

LOOK_S = 0.05  # a child that dies sooner after its start may be reaped before it is known here, and its exit status is lost
GRACE_S = 0.5  # for SGLang to end all processes of the engine itself, as it does for failures that it recognises


class Children:
    """The children of this process."""

    def __init__(self) -> None:
        self._ended_before = ended_for_memory()
        self._known: dict[int, BaseProcess] = {}
        self._telling, self._told = threading.Lock(), False

    def watch(self) -> None:
        """Starts to watch them, in a thread."""
        threading.Thread(target=self._watch, name="children", daemon=True).start()

    def end_with_the_dead(self, wait_s: float) -> None:
        """Ends this process too, saying why, if a child has died or dies within `wait_s`; otherwise returns."""
        deadline = time.monotonic() + wait_s
        while (dead := self._dead()) is None:
            if time.monotonic() > deadline:
                return
            time.sleep(LOOK_S / 5)
        self._tell(*dead)
        code = dead[1]
        os._exit(128 - code if code < 0 else code)

    def _watch(self) -> None:
        while (dead := self._dead()) is None:
            time.sleep(LOOK_S)
        self._tell(*dead)  # now, since SGLang may kill this process too
        time.sleep(GRACE_S)
        self.end_with_the_dead(0.0)

    def _tell(self, pid: int, code: int) -> None:
        """Why this process ends, once."""
        with self._telling:
            if not self._told:
                self._told, why = True, cause(code, self._ended_before)
                print(f"process {pid} of this engine {how(code)}{why and f': {why}'}", file=sys.stderr, flush=True)

    def _dead(self) -> tuple[int, int] | None:
        """The pid and exit code of the first child that has failed; None if none has."""
        self._known |= {child.pid: child for child in multiprocessing.active_children() if child.pid is not None}
        return next(((pid, code) for pid, child in list(self._known.items()) if (code := child.exitcode)), None)
