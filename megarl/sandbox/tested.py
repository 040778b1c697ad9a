"""Runs a program on the inputs of tests, inside the sandbox, with a process for each.

It imports only the standard library.

Standard input: a JSON object with `code`, `function` (null: the program reads standard input),
`inputs`, `test_timeout_s`, `timeout_s` and `most_bytes` (of all results together). Standard output:
the line "ready", then a line for each test, up to the first without a result. A line is a JSON
list: the outcome ("done", "crashed", "slow", "long"), and the program's output or the function's
value as JSON. The right results are not known here, so a program cannot find them.
"""

import atexit
import contextlib
import json
import operator
import os
import select
import signal
import sys
import threading
import time
import types
from typing import Any

# LiveCodeBench imports these before every program (lcb_runner/evaluation/testing_util.py).
_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json builtins typing"
).split()
_PIECE = 1 << 16


def main() -> None:
    task = json.load(sys.stdin)
    # pickle, for example, looks here for the program's definitions
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    space = program.__dict__
    exec("\n".join(f"from {name} import *" for name in _MODULES), space)
    exec(
        "\n".join(f"import {name}" for name in _MODULES if name not in ("typing", "builtins")),
        space,
    )
    sys.setrecursionlimit(50_000)
    sys.set_int_max_str_digits(50_000)
    _tell("ready")
    end = time.monotonic() + task["timeout_s"]
    room = task["most_bytes"]
    for test_input in task["inputs"]:
        test_end = min(end, time.monotonic() + task["test_timeout_s"])
        outcome, output = _run(task, test_input, space, test_end, room)
        _tell(json.dumps([outcome, output.decode(errors="replace")], ensure_ascii=False))
        room -= len(output)
        if outcome != "done":
            return


def _tell(line: str) -> None:
    data = memoryview(line.encode() + b"\n")
    while data:
        data = data[os.write(1, data) :]


def _run(task: dict, test_input: Any, space: dict, end: float, room: int) -> "tuple[str, bytes]":
    reading, writing = os.pipe()
    source = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    if isinstance(test_input, str):
        with os.fdopen(os.dup(source), "wb") as file:
            file.write(test_input.encode(errors="replace"))
        os.lseek(source, 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:
        _be_the_test(task, test_input, space, source, writing)
    os.close(writing)
    os.close(source)
    pidfd = os.pidfd_open(child)
    try:
        outcome, output = _read(reading, pidfd, end, room)
    finally:
        for group in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                group(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(reading)
        os.close(pidfd)
    if outcome != "done":
        return outcome, b""
    return ("crashed", b"") if status else ("done", output)


def _read(reading: int, pidfd: int, end: float, room: int) -> "tuple[str, bytes]":
    """Reads until the process has ended, even if another process still has its output open."""
    pieces = bytearray()
    os.set_blocking(reading, False)
    waited_for = [reading, pidfd]
    while True:
        ready, _, _ = select.select(waited_for, [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return "slow", b""
        try:
            piece = os.read(reading, _PIECE)
        except BlockingIOError:
            piece = b""
        pieces += piece
        if len(pieces) > room:
            return "long", b""
        if not piece:
            if pidfd in ready:
                return "done", bytes(pieces)
            waited_for = [pidfd]  # its output is closed, so only its end is awaited


def _be_the_test(task: dict, test_input: Any, space: dict, source: int, writing: int) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        nowhere = os.open(os.devnull, os.O_RDWR)
        called = task["function"] is not None
        result = os.dup(writing)
        os.dup2(nowhere if called else source, 0)
        os.dup2(nowhere if called else writing, 1)
        os.dup2(nowhere, 2)
        os.dup2(result, 3)
        os.closerange(4 if called else 3, 256)
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="replace", closefd=False)
        sys.stdout = sys.__stdout__ = open(
            1, "w", encoding="utf-8", errors="replace", closefd=False
        )
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, encoding="utf-8")
        # the names that `from sys import *` gives
        space |= {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
        try:
            exec(compile(task["code"], "<program>", "exec"), space)
            if called:
                if "Solution" in space:
                    function = getattr(space["Solution"](), task["function"])
                else:
                    function = space[task["function"]]
                value = _plain(function(*test_input), True)
                with open(3, "wb", closefd=False) as file:
                    file.write(json.dumps(value).encode())
        except SystemExit:
            if called:
                raise
        _finish()
        status = 0
    finally:
        os._exit(status)


def _finish() -> None:
    """Does what the interpreter does at its end: waits for threads, calls exit handlers, and
    flushes output.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.__stdout__):
        flush = getattr(file, "flush", lambda: None)
        with contextlib.suppress(OSError, ValueError):  # the stream is closed or detached
            flush()


def _plain(value: Any, outermost: bool = False) -> Any:
    """A value that JSON represents exactly.

    A tuple is allowed only as the whole result. Raises TypeError.
    """
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list) or (outermost and isinstance(value, tuple)):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return operator.index(value)
    if not all(isinstance(key, str) for key in value):
        raise TypeError("JSON has texts as keys alone")
    return {key: _plain(item) for key, item in value.items()}


if __name__ == "__main__":
    main()
