"""Forks the tests' processes from one that has already imported everything.

(The import of SGLang alone takes a core ten seconds.)

        nursery.py SOCKET PRELOAD…      Nursery starts this; a PRELOAD is a module to import, or module:function to call

Every process runs one function in a fork of its own, with its own environment, arguments and
output. All processes end with the nursery, and the nursery ends with the tests.

Whole runs are forks too (`ForkedRun`): the launcher is a fork of the nursery, and its workers and engines
are forks of the launcher. They have the same parents, sessions, output, environment and names as
separate programs, so that signals have the same effect.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import IO, Any

import psutil

from megarl.launch.worker import die_with_parent

PARENT = "(the nursery)"
STARTED_S = 400  # for the first process
LARGEST = 1 << 17  # bytes of a request, mostly the environment
# the tests' trainer ranks, in this folder
SCRIPTS = ("trainer_worker", "checkpoint_worker", "weights_worker")
# the modules that `ForkedRun` runs in forks
FORKED = ("megarl", "megarl.launch.worker", "megarl.generator.server", *SCRIPTS)
ENGINE = "megarl.generator.server"
MODULE = [sys.executable, "-P", "-m"]  # how a command that runs a module begins


class Nursery:
    """Starts with the first requested process, in that one's environment plus `own`.

    `preload`: see above.
    """

    def __init__(self, *preload: str, **environment: str):
        self._preload = preload
        self._environment = environment
        self._connection: socket.socket | None = None

    def start(
        self, function: str, argv: Sequence[str], env: Mapping[str, str], output: IO[bytes]
    ) -> psutil.Process:
        """Runs `module:function` in a child of the nursery.

        `env` is added to our environment; PARENT in it is the nursery's process id.
        """
        return psutil.Process(
            self.ask([function, list(argv), {**os.environ, **env}], [output.fileno()])
        )

    def ask(self, request: list[Any], descriptors: list[int]) -> int:
        """Requests a process, with the arguments of `_become` or of `_run_module`, and returns its
        id.
        """
        if self._connection is None:
            self._open(request[2])
        socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
        answer = self._connection.recv(LARGEST)
        assert answer, "the nursery has ended"
        return int(answer)

    def _open(self, environment: dict[str, str]) -> None:
        self._connection, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(STARTED_S)
        argv = [sys.executable, __file__, str(child_end.fileno()), *self._preload]
        with child_end:
            self._process = subprocess.Popen(
                argv,
                env=environment | self._environment,
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
            )


class _Forking(subprocess.Popen):
    """Runs `python -P -m NAME …` as a fork if NAME is among FORKED.

    Any other command runs as with subprocess.Popen.
    """

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *arguments: Any,
    ) -> None:
        if not isinstance(args, list) or args[:3] != MODULE or args[3] not in FORKED:
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *arguments
            )  # type: ignore[misc]
            return
        pipes = arguments[3:9]
        new_session = arguments[14]
        streams = [
            descriptor if descriptor != -1 else usual
            for usual, descriptor in enumerate((pipes[0], pipes[3], pipes[5]))
        ]
        self.pid = self._fork(
            args[3:],
            dict(os.environ if env is None else env),
            streams,
            str(cwd or os.getcwd()),
            new_session,
        )
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _fork(
        self,
        argv: list[str],
        environment: dict[str, str],
        streams: list[int],
        cwd: str,
        new_session: bool,
    ) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        # Python 3.12 warns of a fork beside threads, on the stderr that tests read. The threads
        # here are idle pools of libraries.
        warnings.filterwarnings(
            "ignore",
            message=r"This process \(pid=\d+\) is multi-threaded",
            category=DeprecationWarning,
        )
        child = os.fork()
        if child == 0:
            _run_module(argv, environment, streams, cwd, new_session)
        return child


class ForkedRun(_Forking):
    """Like subprocess.Popen for a command `python -P -m NAME …` with NAME among FORKED.

    The process is a fork of a nursery that has imported all parts of a run. Its parent is this
    process, which must adopt orphans (conftest.py).
    """

    def _fork(
        self,
        argv: list[str],
        environment: dict[str, str],
        streams: list[int],
        cwd: str,
        new_session: bool,
    ) -> int:
        child = _RUNS.ask([argv, os.getpid(), environment, cwd, new_session], streams)
        while psutil.Process(child).ppid() != os.getpid():  # wait until its first parent has ended
            time.sleep(0.001)
        return child


def script(name: str, *arguments: str) -> dict[str, Any]:
    """The command and environment of one of SCRIPTS, for `ForkedRun`."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "args": [*MODULE, name, *arguments],
        "env": {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    }


_RUNS = Nursery("setproctitle:getproctitle", "nursery:import_run")


def import_run() -> None:
    """Imports all that trainers, generators and engines of a run on CPUs import, in an engine's
    environment.
    """
    from megarl.trainer import cpu_support as of_trainer

    of_trainer.install()
    from megarl.generator import cpu_support as of_engine
    from megarl.generator.server import EngineKeys, EngineSettings, server_command

    settings = EngineSettings(
        "", "float32", 0, context_length=1, max_running_requests=1, tp=1, device="cpu"
    )
    _, environment = server_command(settings, EngineKeys.generate())
    os.environ.update(
        {
            name: value
            for name, value in environment.items()
            if name.startswith(("SGLANG_USE", "SGLANG_EXTERNAL", "OMP_"))
        }
    )
    of_engine.install()
    for module in IMPORTED:
        importlib.import_module(module)


IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "megarl.executors.trainer",
    "megarl.trainer.step",
    "megarl.executors.generator",
    "megarl.launch.worker_roles",
    "megarl.launch.launcher",
    "transformers.models.auto.modeling_auto",
    "torch._dynamo",  # the first optimizer would import it
    "tensorboard",
    "matplotlib.pyplot",
    "datasets",
)


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else None


def main(connection: socket.socket, preload: list[str]) -> None:
    die_with_parent()
    for name in preload:
        function = _named(name)
        if function is not None:
            function()
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a fork would copy every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing here waits for children
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, LARGEST, 3)
        if not data:
            os._exit(0)
        request = json.loads(data)
        parent = os.getpid()
        child = os.fork()
        if child == 0 and isinstance(request[0], list):
            _orphan(connection, request, descriptors)
        elif child == 0:
            connection.close()
            _become(parent, *request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if not isinstance(request[0], list):
            connection.send(str(child).encode())


def _orphan(connection: socket.socket, request: list[Any], descriptors: list[int]) -> None:
    """Forks again and ends, so that the requesting process becomes the child's parent."""
    argv, adopter, environment, cwd, new_session = request
    child = os.fork()
    if child:
        connection.send(str(child).encode())
        os._exit(0)
    while os.getppid() != adopter:
        time.sleep(0.001)
    subprocess.Popen = _Forking  # type: ignore[misc]
    _run_module(argv, environment, descriptors, cwd, new_session)


def _become(
    parent: int, function: str, argv: list[str], environment: dict[str, str], output: int
) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(
        {name: str(parent) if value == PARENT else value for name, value in environment.items()}
    )
    sys.argv = [function, *argv]
    _end(_named(function))


def _run_module(
    argv: list[str], environment: dict[str, str], streams: list[int], cwd: str, new_session: bool
) -> None:
    """Runs `python -P -m argv` here, in a fork, and ends this process with its status."""
    _look_new(argv, environment, streams, cwd, new_session)
    _end(lambda: runpy.run_module(argv[0], run_name="__main__", alter_sys=True))


def _look_new(
    argv: list[str], environment: dict[str, str], streams: list[int], cwd: str, new_session: bool
) -> None:
    """Makes this fork look like a new interpreter, except for the imported modules."""
    import setproctitle

    if new_session:
        os.setsid()
    _take_streams(streams)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(":")), *_SITE]
    sys.argv = list(argv)
    if argv[0] != ENGINE:
        sys.meta_path[:] = [
            finder for finder in sys.meta_path if type(finder).__name__ != "_CpuFinder"
        ]
    setproctitle.setproctitle(" ".join([*MODULE, *argv]))
    warnings.filterwarnings(
        "ignore", message=".*found in sys.modules after import of package", category=RuntimeWarning
    )
    tempfile.tempdir = None
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # what the parent will remove
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    tracker = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    tracker._fd = tracker._pid = None
    gc.freeze()


_SITE = [folder for folder in sys.path if folder.startswith((sys.prefix, sys.base_prefix))]


def _take_streams(streams: list[int]) -> None:
    """Makes `streams` the descriptors 0 to 2 and Python's standard files, and closes all other
    descriptors.
    """
    copies = [os.dup(descriptor) for descriptor in streams]
    for number, descriptor in enumerate(copies):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open(
        2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
    )  # type: ignore[misc]


def _end(run: Callable[[], Any]) -> None:
    """Runs the function, and ends this process with the status that Python would have."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # threads that are no daemons are waited for
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
