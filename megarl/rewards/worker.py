"""The process that verifies model output: small, without torch, and under limits of its own.

It reads requests from its standard input, one JSON array [text, answer] a line, and writes one JSON number a line,
in order. Started by megarl.rewards.pool, which also kills it when one answer takes too long.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1
_MAX_OPEN_FILES = 64
_LEAST_FREE_BYTES = 64 << 20  # an answer's own share of the memory limit
# Equal pairs that make SymPy load what it loads late, before the clock runs and side effects are forbidden.
_WARM_UP = {
    "math": [
        ("\\boxed{x^2+2x+1}", "(x+1)^2"),
        ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}"),
        ("\\boxed{\\{1,\\frac12\\}}", "\\{0.5,1\\}"),
        ("\\boxed{x<1}", "1>x"),
    ],
    "last_number": [("1,2", "2.0")],
}
# SymPy makes numbers from text by evaluating these; latex2sympy has it do so with what its grammar took for a number.
_NUMBER_SOURCE = re.compile(rb"from sympy import \*|[-+]?\s*(?:Integer|Float)\s*\(\s*'?[\d.]+(?:[eE][-+]?\d+)?'?\s*\)")
_FORBIDDEN_EVENTS = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "tempfile.", "urllib.", "sqlite3.", "signal.", "gc.")
_HARMLESS_EVENTS = ("os.listdir", "os.scandir", "os.walk", "ctypes.get_errno", "ctypes.set_errno", "ctypes.cdata")  # of Python's own import


def main(verifier: str, memory_mib: str, timeout_s: str, parent: str) -> None:
    """Serve until standard input closes. After running out of memory the process ends: a fresh one is cleaner."""
    _die_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)  # math-verify logs what it cannot parse: model output, in any quantity
    from megarl.rewards.verify import VERIFIERS

    verify = VERIFIERS[verifier]
    for text, answer in _WARM_UP[verifier]:
        if verify(text, answer) != 1.0:
            raise RuntimeError(f"verifier {verifier} does not find {text!r} equal to {answer!r}")
    _limit_resources(int(memory_mib))
    _forbid_side_effects()
    _write("ready")
    for line in sys.stdin.buffer:
        _limit_cpu(float(timeout_s))
        text, answer = json.loads(line)
        try:
            _write(json.dumps(score(verify, text, answer)))
        except MemoryError:
            _write("0.0")
            os._exit(1)


def score(verify: Callable[[str, str], float], text: str, answer: str) -> float:
    """The verifier's score, 0 if it fails on this text: a failure inside SymPy says that it is no answer. Raises: MemoryError."""
    try:
        return verify(text, answer)
    except MemoryError:
        raise
    except Exception as error:
        logging.getLogger(__name__).debug("verifier failed", exc_info=error)
        return 0.0


def _write(line: str) -> None:
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _limit_resources(memory_mib: int) -> None:
    """Raises: MemoryError if the limit leaves no room to verify anything, so that the worker does not start."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bytearray(_LEAST_FREE_BYTES)


def _limit_cpu(timeout_s: float) -> None:
    """CPU time allowed until the next request: the pool's deadline counts wall time, this one holds even without the pool."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed_s = int(usage.ru_utime + usage.ru_stime + timeout_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (allowed_s, resource.RLIM_INFINITY))


def _forbid_side_effects() -> None:
    """From here on: no new process, connection, deletion or written file, and no Python but numbers made from text by SymPy.

    A second line of defence: the first is that no answer is ever handed to anything that evaluates Python.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "compile":
            source = args[0]
            in_sympy_parser = sys._getframe(1).f_globals.get("__name__", "").startswith("sympy.parsing")
            if in_sympy_parser and not (isinstance(source, bytes) and _NUMBER_SOURCE.fullmatch(source)):
                raise PermissionError("evaluating Python from text is not allowed here")
        elif event == "open":
            if isinstance(args[1], str) and not args[1].startswith("r") or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                raise PermissionError("writing files is not allowed here")
        elif event.startswith(_FORBIDDEN_EVENTS) and event not in _HARMLESS_EVENTS:
            raise PermissionError(f"{event} is not allowed here")

    sys.addaudithook(hook)
