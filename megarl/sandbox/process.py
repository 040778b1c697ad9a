"""Shared code of a WorkerPool's processes: they end with their parent, keep within limits, and
answer in order.

Requests come on standard input, each a line with a JSON array of arguments; replies go to standard
output, each a line with a JSON object, {"result": …} or {"error": "why there is none", "kind":
CallFailed.kind}.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from megarl.base.processes import end_with_parent
from megarl.config.limits import attribute

_MOST_CHARS = 500  # limit of the exception's message, which may quote what a model wrote
_LIBRARIES = (
    str(Path(__file__).resolve().parents[1]),
    *set(map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))),
)


def own_line(error: BaseException) -> str:
    """An exception in a user's function, as its author needs it: the innermost line outside
    libraries (file, line, function, statement), then the exception.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frame = frames[-1]
    for caller in reversed(frames):
        if not caller.filename.startswith((*_LIBRARIES, "<")):
            frame = caller
            break
    message = str(error)[:_MOST_CHARS]
    return (
        f"{frame.filename}, line {frame.lineno}, in {frame.name}: "
        f"{frame.line}\n{type(error).__name__}: {message}"
    )


_MAX_OPEN_FILES = 64
MAX_REPLY_BYTES = 1 << 20  # most bytes of a reply, without the newline


def prepare(parent: str) -> None:
    """Makes this process end with `parent`, and ignore interrupts, which are meant for the parent.

    Call it first.
    """
    end_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def limit_resources(memory_mib: str, files_writable: bool) -> None:
    """Sets the limits.

    Memory is limited to `memory_mib` beyond what the process has now: torch alone reserves 3 GiB of
    addresses.
    """
    reserved_pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit_bytes = (int(memory_mib) << 20) + reserved_pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not files_writable:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def serve(function: Callable[..., Any], timeout_s: str) -> None:
    """Answers until standard input closes.

    After running out of memory the process ends, to be replaced by a fresh one.
    """
    requests, write = _own_ends()
    _write(write, "ready")
    for line in requests:
        _limit_cpu(float(timeout_s))
        try:
            answer = reply(function, json.loads(line))
            if len(answer) > MAX_REPLY_BYTES:
                answer = _failed("error", f"more than {MAX_REPLY_BYTES} bytes of result")
            _write(write, answer)
        except MemoryError:
            _write(write, _failed("memory", "it ran out of memory"))
            os._exit(1)


def _own_ends() -> tuple[BinaryIO, int]:
    """Standard input and output, reserved for requests and replies.

    The function and its children get others, so they cannot interfere.
    """
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, replies


def reply(function: Callable[..., Any], arguments: list[Any]) -> str:
    """The reply to a call.

    A ValueError is a result; other exceptions are mistakes, which are printed on standard error.
    """
    try:
        return json.dumps({"result": function(*arguments)})
    except ValueError as error:
        return _failed("error", str(error))
    except MemoryError:
        raise
    except Exception as error:
        traceback.print_exc()
        return _failed("error", f"it failed: {type(error).__name__}")


def _failed(kind: str, reason: str) -> str:
    return json.dumps({"error": reason, "kind": kind})


def _write(file: int, line: str) -> None:
    data = memoryview(line.encode() + b"\n")
    while data:
        data = data[os.write(file, data) :]


def _limit_cpu(timeout_s: float) -> None:
    """Limits CPU time until the next request.

    Unlike the pool's deadline, which counts wall time, this holds even without the pool.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed_s = int(usage.ru_utime + usage.ru_stime + timeout_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (allowed_s, resource.RLIM_INFINITY))


def main(path: str, memory_mib: str, timeout_s: str, parent: str) -> None:
    """Calls any function `path` (package.module:name) until standard input closes.

    It imports the function before limits and deadlines apply.
    """
    prepare(parent)
    function = attribute(path)
    limit_resources(memory_mib, files_writable=True)
    serve(function, timeout_s)
