"""The child processes of a run.

They start in their own sessions, and are watched and ended together.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megarl.base import processes
from megarl.base.files import log_tail
from megarl.config.errors import RunError
from megarl.observe.status import read_statuses

FILES = 65_536
LAST_WORDS = "the run ends: "  # in a log: the text after this is the whole message for the terminal
_WAITED = re.compile(r"^(?:\[rank\d+\]: )?TimeoutError: .* waited \d+ s for ", re.MULTILINE)
STACKS_S = 0.5  # time for all children to write their stacks
FORGOTTEN_S = 1.0
# a process that hangs in a system call (broken GPU, lost NFS server) outlives SIGKILL
KILLED_S = 30.0


TORCHRUN = frozenset(
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
)


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start. `name` is "<role>.<rank>"; its output goes to logs/<name>.log."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)  # in addition to the launcher's environment
    dumps_stacks: bool = False  # whether it writes its Python stacks on SIGUSR1


class ProcessFailed(RunError):
    """A child ended before its work was done.

    The message has its last words. Without last words it has the cause, as far as the host knows
    it, and the end of the child's log.
    """

    def __init__(self, name: str, returncode: int, log: Path, ended_before: int):
        """`ended_before`: see deaths.cause."""
        self.name = name
        self.ending = f"{name} {processes.ending(returncode)}"
        self.signalled = returncode < 0 or returncode > 128
        self.cause = processes.cause(returncode, ended_before)
        tail = log_tail(log)
        # whether it had waited for another process until a deadline
        self.waited = _WAITED.search(tail) is not None
        end = f"{self.ending} ({self.cause})" if self.cause else self.ending
        _, marker, last_words = tail.rpartition(LAST_WORDS)
        if marker:
            super().__init__(f"{last_words}\n({end}; its log is {log})")
        else:
            super().__init__(f"{end}; the end of {log}:\n{tail}")

    def begin(self, text: str) -> None:
        """Puts `text`, the cause of the failure, before the message."""
        self.args = (f"{text}\n{self}",)

    def add(self, text: str) -> None:
        """Appends `text` to the message."""
        self.args = (f"{self}\n{text}",)


def inherited() -> dict[str, str]:
    """The launcher's environment without torchrun's variables, which would make ranks use the
    agent's store for their own group.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC_") and name not in TORCHRUN
    }


class ProcessGroup:
    """The processes of one run on this host.

    A context manager: leaving it ends all processes that still run.
    """

    def __init__(self, log_dir: Path):
        self.log_dir = log_dir
        self._children: dict[str, subprocess.Popen] = {}
        self._dumps_stacks: set[str] = set()
        self._ended_for_memory = processes.ended_for_memory()
        log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, spec: ProcessSpec) -> None:
        if spec.dumps_stacks:
            self._dumps_stacks.add(spec.name)
        # a restart: keeps the old log, and ends descendants of the old process
        again = spec.name in self._children
        if again:
            self._signal(self._children[spec.name], signal.SIGKILL)
        with open(self.log_path(spec.name), "ab" if again else "wb") as log:
            self._children[spec.name] = subprocess.Popen(
                spec.argv,
                env={**inherited(), **spec.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # so that its children end with it, and Ctrl-C reaches only the launcher
                start_new_session=True,
            )

    def log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def running(self) -> list[str]:
        return [name for name, child in self._children.items() if child.poll() is None]

    def process_ids(self) -> dict[str, int]:
        """Name -> process id of each running child."""
        return {name: self._children[name].pid for name in self.running()}

    @property
    def names(self) -> set[str]:
        return set(self._children)

    def kill(self, name: str) -> None:
        """Ends one child and its descendants at once."""
        self._signal(self._children[name], signal.SIGKILL)

    def failure(self, name: str) -> ProcessFailed | None:
        """The failure of a child that has ended; None while it runs."""
        code = self._children[name].poll()
        if code is None:
            return None
        return self._failed(name, code)

    def _failed(self, name: str, code: int) -> ProcessFailed:
        return ProcessFailed(name, code, self.log_path(name), self._ended_for_memory)

    def forget(self, name: str) -> None:
        """Ends the rest of a child's processes, and no longer counts the child."""
        self.kill(name)
        # reaps it, unless it hangs in the kernel; otherwise it would stay as a zombie
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._children.pop(name).wait(FORGOTTEN_S)

    def ask_to_stop(self, names: set[str]) -> None:
        """Sends SIGTERM to those of `names` that run."""
        for name in names & set(self.running()):
            self._children[name].send_signal(signal.SIGTERM)

    def check(
        self, may_finish: set[str] | frozenset[str] = frozenset(), among: set[str] | None = None
    ) -> None:
        """Raises ProcessFailed if a child (of `among`, if given) has died, or has ended well but is
        not in `may_finish`.

        If several children have died, it names the cause and not its consequences. A child with
        last words comes first, even if it has not ended yet. Then come children killed by a signal
        or by their own Python error, then children that lost a peer, and last those that died
        because they were asked for their stack while they were exiting.
        """
        dead = {
            name: child.returncode
            for name, child in self._children.items()
            if child.poll() is not None
        }
        watched = dead.keys() if among is None else dead.keys() & among
        failed = {name: dead[name] for name in watched if dead[name] != 0 or name not in may_finish}
        if failed:
            spoken = [
                name for name in self._children if LAST_WORDS in log_tail(self.log_path(name))
            ]
            first = min(
                spoken or failed,
                key=lambda name: (
                    failed.get(name) == -signal.SIGUSR1,
                    self.log_path(name).stat().st_mtime,
                ),
            )
            raise self._failed(first, failed.get(first, 1))

    def dump_stacks(self) -> dict[str, str]:
        """Makes children write their Python stacks to their logs.

        Returns what each has written after a moment.
        """
        names = self._dumps_stacks & set(self.running())
        before = {name: self.log_path(name).stat().st_size for name in names}
        for name in names:
            self._children[name].send_signal(signal.SIGUSR1)
        time.sleep(STACKS_S)
        return {
            name: self.log_path(name).read_bytes()[before[name] :].decode(errors="replace")
            for name in names
        }

    def stop(self, grace_s: float = 1.0) -> None:
        """Kills all children at once, and the remaining descendants after `grace_s`.

        At this point no process has anything to save. In the grace period, descendants end with
        their parents, or clean up after them (as multiprocessing's resource tracker does in
        /dev/shm). SIGTERM is not used, since engines would report a crash of their schedulers.
        """
        for child in self._children.values():
            child.kill()
        deadline = time.monotonic() + grace_s
        while any(map(_lives, self._children.values())) and time.monotonic() < deadline:
            time.sleep(0.02)
        for name, child in self._children.items():
            self._signal(child, signal.SIGKILL)
            try:
                child.wait(KILLED_S)
            except subprocess.TimeoutExpired:
                print(
                    f"{name}, process {child.pid}, has not ended {KILLED_S:.0f} s after SIGKILL: "
                    "something in the kernel holds it",
                    flush=True,
                )
        self._children.clear()

    def _signal(self, child: subprocess.Popen, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            # even if the child has ended, since descendants may be left
            os.killpg(child.pid, number)


def _lives(child: subprocess.Popen) -> bool:
    """Whether the child, or any process of its session, still runs."""
    if child.poll() is None:
        return True
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def raise_limits() -> None:
    """Raises the limits of this process and its children as far as the system allows.

    Open files: up to FILES, since each request to an engine has its own connection, and shells
    mostly start with 1024. Locked memory: RDMA needs it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(FILES, hard)), hard))
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


_ANY_ADDRESS = ("0.0.0.0", "::")


def occupied_ports(
    ports: Mapping[str, int], address: str, run_processes: Mapping[str, int]
) -> Iterator[str]:
    """A line for each of `ports` (purpose -> port) that was free when a launch chose it, and on
    which now a process listens at `address` that is not of the run.

    `run_processes`: name -> pid. Their descendants belong to the run too.
    """
    run_pids = {process.pid for pid in run_processes.values() for process in _family(pid)}
    purposes = {port: purpose for purpose, port in ports.items()}
    for connection in psutil.net_connections("tcp"):
        if not connection.laddr or connection.status != psutil.CONN_LISTEN:
            continue
        if connection.laddr.ip not in (address, *_ANY_ADDRESS) or connection.pid in run_pids:
            continue
        port = connection.laddr.port
        if port in purposes:
            yield (
                f"port {port}, chosen for {purposes[port]} when it was free, has "
                f"been taken by {_process_text(connection.pid)}"
            )


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _process_text(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        process = psutil.Process(pid)
        return f"process {pid} ({' '.join(process.cmdline())[:100] or process.name()})"
    except psutil.Error:
        return f"process {pid}"


# The stack that faulthandler writes on SIGUSR1 for the thread that got the signal, which is the
# main thread.
_STACK = re.compile(
    r"^Current thread .*\(most recent call first\):\n((?:  File .*\n)+)", re.MULTILINE
)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (\S+)')
# code in which a process waits for another
_WAITS = ("torch/distributed/", "megarl/messaging/", "selectors.py")
_OUTERMOST = ("<module>", "_run_module_as_main")  # the first frames of a program's main thread
_STOPPED = "is stopped (SIGSTOP, or a debugger)"


def process_report(running: Mapping[str, int], stacks: Mapping[str, str], run_dir: Path) -> str:
    """One line per process of the run, with its status line, state and stack, for a process that
    has waited for another until a deadline.

    `running`: name -> pid of the processes on this host. `stacks`: what each wrote when asked for
    its stack.

    Processes that neither wait for others nor serve come first and are marked, since the others may
    wait for them. A process that is ending (as after losing its peer), or that wrote no stack and
    so may be about to end, is marked only if no other is.
    """
    lines = {status.name: str(status) for status in read_statuses(run_dir)}
    busy = []
    ending = []
    waiting = []
    for name, pid in running.items():
        state = _state(pid)
        frames = _frames(stacks.get(name, ""))
        is_ending = name in stacks and not state and (not frames or _is_ending(stacks[name]))
        activity = state
        if not state and frames:
            activity = "was ending" if is_ending else _call(frames)
        elif not state and name in stacks:
            activity = "gave no stack"
        line = f"  {lines.pop(name, name)}{activity and f'; it {activity}'}"
        if is_ending:
            ending.append(line)
        elif state or (frames and not any(path in frames[0][1] for path in _WAITS)):
            busy.append(line)
        else:
            waiting.append(line)
    if not busy:
        busy = ending
        ending = []
    return "\n".join(
        [
            "what the others were doing:",
            *(f"{line}   <- not waiting" for line in busy),
            *ending,
            *waiting,
            *(f"  {line}" for line in lines.values()),
        ]
    )


def _frames(written: str) -> list[re.Match[str]]:
    """The frames of the main thread's stack, innermost first."""
    stack = _STACK.search(written)
    if stack is None:
        return []
    return [frame for frame in map(_FRAME.match, stack[1].splitlines()) if frame]


def _is_ending(written: str) -> bool:
    """Whether the main thread was printing an error, or running exit handlers of the interpreter,
    which no module's code calls.
    """
    stack = _STACK.search(written)
    assert stack is not None
    frames = _frames(written)
    # faulthandler stops at 100 frames
    is_complete = not written[stack.end() :].startswith("  ...")
    if is_complete and frames[-1][3] not in _OUTERMOST:
        return True
    return any(Path(frame[1]).name == "traceback.py" for frame in frames)


def _state(pid: int) -> str:
    """A text if a process or one of its descendants is stopped; otherwise empty."""
    try:
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            if member.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                if member == process:
                    return _STOPPED
                return f"has process {member.pid} ({member.name()}), which {_STOPPED}"
    except psutil.NoSuchProcess:
        pass  # the process has ended meanwhile
    return ""


def _call(frames: list[re.Match[str]]) -> str:
    """The innermost call, and the innermost call in MegaRL's own code."""
    for frame in frames:
        if "megarl/" in frame[1] and frame is not frames[0]:
            return f"was at {_frame_text(frames[0])}, called in {_frame_text(frame)}"
        if "megarl/" in frame[1]:
            break
    return f"was in {_frame_text(frames[0])}"


def _frame_text(frame: re.Match[str]) -> str:
    return f"{frame[3]} ({'/'.join(Path(frame[1]).parts[-2:])}:{frame[2]})"
