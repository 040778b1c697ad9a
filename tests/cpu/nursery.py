"""Processes of tests, forked from one that has imported what all of them need: SGLang is ten seconds of a core for each.

    nursery.py SOCKET PRELOAD…      what Nursery starts; a PRELOAD is a module to import, or module:function to call

Every process that it is asked for runs one function in a fork of its own, with its own environment, arguments and output. All end
with the nursery, and that with the tests.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import psutil

from megarl.launch.worker import die_with_parent

PARENT = "(the nursery)"
STARTED_S = 240  # until the first process is there
LARGEST = 1 << 17  # bytes of a request: mostly the environment


class Nursery:
    """Starts with the first process that is asked of it, in that one's environment. `preload` as above."""

    def __init__(self, *preload: str):
        self._preload = preload
        self._connection: socket.socket | None = None

    def start(self, function: str, argv: Sequence[str], env: Mapping[str, str], output: IO[bytes]) -> psutil.Process:
        """Runs `module:function` in a process whose parent is the nursery; `env` comes on top of ours, PARENT in it is the nursery's id."""
        environment = {**os.environ, **env}
        if self._connection is None:
            self._open(environment)
        socket.send_fds(self._connection, [json.dumps([function, list(argv), environment]).encode()], [output.fileno()])
        answer = self._connection.recv(LARGEST)
        assert answer, "the nursery has ended"
        return psutil.Process(int(answer))

    def _open(self, environment: dict[str, str]) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(STARTED_S)
        argv = [sys.executable, __file__, str(theirs.fileno()), *self._preload]
        with theirs:
            self._process = subprocess.Popen(argv, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else None


def main(connection: socket.socket, preload: list[str]) -> None:
    die_with_parent()
    for name in preload:
        if (function := _named(name)) is not None:
            function()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, LARGEST, 1)
        if not request:
            return
        parent, child = os.getpid(), os.fork()
        if child == 0:
            connection.close()
            _become(parent, *json.loads(request), *descriptors)
        os.close(*descriptors)
        connection.send(str(child).encode())


def _become(parent: int, function: str, argv: list[str], environment: dict[str, str], output: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update({name: str(parent) if value == PARENT else value for name, value in environment.items()})
    sys.argv = [function, *argv]
    status = 1
    try:
        run: Callable[[], None] = _named(function)
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
