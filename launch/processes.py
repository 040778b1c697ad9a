"""Child processes of a run: started in sessions of their own, watched together, ended together."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from megarl import deaths
from megarl.files import log_tail

FILES = 65_536
LAST_WORDS = "the run ends: "  # in a log, what comes after it is for the terminal, and says all
_WAITED = re.compile(r"^(?:\[rank\d+\]: )?TimeoutError: .* waited \d+ s for ", re.MULTILINE)
STACKS_S = 0.5  # until all have written them
KILLED_S = 30.0  # a process in a system call that does not return (a broken GPU, a lost NFS server) outlives SIGKILL


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
    """What to start. `name` is "<role>.<rank>"; its output goes to logs/<name>.log."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)  # on top of the launcher's environment
    dumps_stacks: bool = False  # SIGUSR1 makes it write its Python stacks


class ProcessFailed(RuntimeError):
    """A child ended before its work was done. The message carries its last words, or else what its host knows of the cause, and the end
    of its log."""

    def __init__(self, name: str, returncode: int, log: Path, ended_before: int):
        """`ended_before`: see deaths.cause."""
        self.name, self.how, self.signalled = name, f"{name} {deaths.how(returncode)}", returncode < 0 or returncode > 128
        self.cause = deaths.cause(returncode, ended_before)
        tail, why = log_tail(log), f" ({self.cause})" if self.cause else ""
        self.waited = _WAITED.search(tail) is not None  # in vain, for another
        _, told, words = tail.rpartition(LAST_WORDS)
        super().__init__(f"{words}\n({self.how}{why}; its log is {log})" if told else f"{self.how}{why}; the end of {log}:\n{tail}")

    def add(self, text: str) -> None:
        """To the message."""
        self.args = (f"{self}\n{text}",)


def inherited() -> dict[str, str]:
    """The launcher's environment, but for what torchrun told it: by that a rank would look to the agent's store for its own group's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_") and name not in TORCHRUN}


class ProcessGroup:
    """The processes of one run on this host. A context manager: leaving it ends whatever still runs."""

    def __init__(self, log_dir: Path):
        self.log_dir = log_dir
        self._children: dict[str, subprocess.Popen] = {}
        self._dumps_stacks: set[str] = set()
        self._ended_for_memory = deaths.ended_for_memory()
        log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, spec: ProcessSpec) -> None:
        if spec.dumps_stacks:
            self._dumps_stacks.add(spec.name)
        again = spec.name in self._children  # then what its predecessor said stays, and that one's descendants go
        if again:
            self._signal(self._children[spec.name], signal.SIGKILL)
        with open(self.log_path(spec.name), "ab" if again else "wb") as log:
            self._children[spec.name] = subprocess.Popen(
                spec.argv,
                env={**inherited(), **spec.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its own children end with it, and Ctrl-C reaches the launcher alone
            )

    def log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def running(self) -> list[str]:
        return [name for name, child in self._children.items() if child.poll() is None]

    def process_ids(self) -> dict[str, int]:
        """Of those that run."""
        return {name: self._children[name].pid for name in self.running()}

    @property
    def names(self) -> set[str]:
        return set(self._children)

    def kill(self, name: str) -> None:
        """Ends one child and its descendants at once."""
        self._signal(self._children[name], signal.SIGKILL)

    def failure(self, name: str) -> ProcessFailed | None:
        """Of a child that has ended; None while it runs."""
        code = self._children[name].poll()
        return None if code is None else self._failed(name, code)

    def _failed(self, name: str, code: int) -> ProcessFailed:
        return ProcessFailed(name, code, self.log_path(name), self._ended_for_memory)

    def forget(self, name: str) -> None:
        """Ends what is left of a child, and counts it no more."""
        self.kill(name)
        del self._children[name]

    def ask_to_stop(self, names: set[str]) -> None:
        """Sends SIGTERM to those of `names` that run."""
        for name in names & set(self.running()):
            self._children[name].send_signal(signal.SIGTERM)

    def check(self, may_finish: set[str] | frozenset[str] = frozenset(), among: set[str] | None = None) -> None:
        """Raises ProcessFailed if a child (one of `among`, where given) died, or ended well although it is not among `may_finish`.

        Of several dead children the one that died of itself is named, not those that fell with it: a process killed by
        a signal or with a Python error of its own comes before one that only lost its peer, and last comes one that was asked for its
        stack when it was about to end, and ended of that. First of all comes one with last words: it may still be about to end.
        """
        dead = {name: child.returncode for name, child in self._children.items() if child.poll() is not None}
        watched = dead.keys() if among is None else dead.keys() & among
        failed = {name: dead[name] for name in watched if dead[name] != 0 or name not in may_finish}
        if failed:
            spoken = [name for name in self._children if LAST_WORDS in log_tail(self.log_path(name))]
            first = min(spoken or failed, key=lambda name: (failed.get(name) == -signal.SIGUSR1, self.log_path(name).stat().st_mtime))
            raise self._failed(first, failed.get(first, 1))

    def dump_stacks(self) -> dict[str, str]:
        """Asks the children that can for their Python stacks, which land in their logs. What each wrote there within a moment."""
        asked = self._dumps_stacks & set(self.running())
        before = {name: self.log_path(name).stat().st_size for name in asked}
        for name in asked:
            self._children[name].send_signal(signal.SIGUSR1)
        time.sleep(STACKS_S)
        return {name: self.log_path(name).read_bytes()[before[name] :].decode(errors="replace") for name in asked}

    def stop(self, grace_s: float = 1.0) -> None:
        """Ends every child at once, and what is left of its descendants after `grace_s`.

        Nobody has anything to save by now. Descendants that die with their parent have done so by then, and those that tidy up after it
        (multiprocessing's, of what lies in /dev/shm) have done that. SIGTERM to all would have engines report a crash of their schedulers.
        """
        for child in self._children.values():
            child.kill()
        deadline = time.monotonic() + grace_s
        while any(_lives(child) for child in self._children.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for name, child in self._children.items():
            self._signal(child, signal.SIGKILL)
            try:
                child.wait(KILLED_S)
            except subprocess.TimeoutExpired:
                held = f"has not ended {KILLED_S:.0f} s after SIGKILL: something in the kernel holds it"
                print(f"{name}, process {child.pid}, {held}", flush=True)
        self._children.clear()

    def _signal(self, child: subprocess.Popen, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)  # also when the child is gone: its descendants may be left


def _lives(child: subprocess.Popen) -> bool:
    """It, or any process of the session that it leads."""
    if child.poll() is None:
        return True
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def raise_limits() -> None:
    """Of this process and its children, as far as the system admits. FILES files: each request to an engine is a connection of its own,
    thousands of them on the generator, and shells mostly begin with 1024. All memory that RDMA wants to lock."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(FILES, most)), most))
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))
