"""Child processes of a run: started in sessions of their own, watched together, ended together."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from megarl.files import log_tail

FILES = 65_536
KILLED_S = 30.0  # a process in a system call that does not return (a broken GPU, a lost NFS server) outlives SIGKILL


@dataclass(frozen=True)
class ProcessSpec:
    """What to start. `name` is "<role>.<rank>"; its output goes to logs/<name>.log."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)  # on top of the launcher's environment
    dumps_stacks: bool = False  # SIGUSR1 makes it write its Python stacks
    defers_termination: bool = False  # SIGTERM asks it to stop when it can, or is passed over; only SIGKILL ends it


class ProcessFailed(RuntimeError):
    """A child ended before its work was done. The message carries the end of its log."""

    def __init__(self, name: str, returncode: int, log: Path):
        how = f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exited with status {returncode}"
        super().__init__(f"{name} {how}; the end of {log}:\n{log_tail(log)}")
        self.name, self.how = name, f"{name} {how}"


class ProcessGroup:
    """The processes of one run on this host. A context manager: leaving it ends whatever still runs."""

    def __init__(self, log_dir: Path):
        self.log_dir = log_dir
        self._children: dict[str, subprocess.Popen] = {}
        self._dumps_stacks: set[str] = set()
        self._defers_termination: set[str] = set()
        log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, spec: ProcessSpec) -> None:
        if spec.dumps_stacks:
            self._dumps_stacks.add(spec.name)
        if spec.defers_termination:
            self._defers_termination.add(spec.name)
        again = spec.name in self._children  # then what its predecessor said stays, and that one's descendants go
        if again:
            self._signal(self._children[spec.name], signal.SIGKILL)
        with open(self.log_path(spec.name), "ab" if again else "wb") as log:
            self._children[spec.name] = subprocess.Popen(
                spec.argv,
                env={**os.environ, **spec.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its own children end with it, and Ctrl-C reaches the launcher alone
            )

    def log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def running(self) -> list[str]:
        return [name for name, child in self._children.items() if child.poll() is None]

    @property
    def names(self) -> set[str]:
        return set(self._children)

    def kill(self, name: str) -> None:
        """Ends one child and its descendants at once."""
        self._signal(self._children[name], signal.SIGKILL)

    def failure(self, name: str) -> ProcessFailed | None:
        """Of a child that has ended; None while it runs."""
        code = self._children[name].poll()
        return None if code is None else ProcessFailed(name, code, self.log_path(name))

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
        stack when it was about to end, and ended of that.
        """
        dead = {name: child.returncode for name, child in self._children.items() if child.poll() is not None}
        watched = dead.keys() if among is None else dead.keys() & among
        failed = {name: dead[name] for name in watched if dead[name] != 0 or name not in may_finish}
        if failed:
            first = min(failed, key=lambda name: (failed[name] == -signal.SIGUSR1, self.log_path(name).stat().st_mtime))
            raise ProcessFailed(first, failed[first], self.log_path(first))

    def dump_stacks(self) -> None:
        """Asks the children that can for their Python stacks, which land in their logs."""
        for name in self._dumps_stacks & set(self.running()):
            self._children[name].send_signal(signal.SIGUSR1)
        time.sleep(0.5)

    def stop(self, grace_s: float = 1.0) -> None:
        """Ends every child and all of their descendants: SIGTERM, then SIGKILL after `grace_s`. Those that defer SIGTERM get no grace.

        An engine has nothing to save; SGLang looks for a SIGTERM every 5 s only, so there is no use in waiting for it.
        """
        self._signal_all(signal.SIGTERM)
        for name in self._defers_termination & self._children.keys():
            self._signal(self._children[name], signal.SIGKILL)
        deadline = time.monotonic() + grace_s
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal_all(signal.SIGKILL)
        for name, child in self._children.items():
            try:
                child.wait(KILLED_S)
            except subprocess.TimeoutExpired:
                held = f"has not ended {KILLED_S:.0f} s after SIGKILL: something in the kernel holds it"
                print(f"{name}, process {child.pid}, {held}", flush=True)
        self._children.clear()

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self._children.values():
            self._signal(child, number)

    def _signal(self, child: subprocess.Popen, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)  # also when the child is gone: its descendants may be left


def raise_limits() -> None:
    """Of this process and its children, as far as the system admits. FILES files: each request to an engine is a connection of its own,
    thousands of them on the generator, and shells mostly begin with 1024. All memory that RDMA wants to lock."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(FILES, most)), most))
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))
