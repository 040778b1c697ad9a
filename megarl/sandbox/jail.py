"""Runs a user's program as an episode's process: with limits on time, memory and files, and, by bubblewrap, without network and without the
host's files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from megarl.config.errors import ConfigError

AUTO, BWRAP, NAMESPACE, LIMITS = "auto", "bwrap", "namespace", "limits"
_INSIDE = Path(__file__).with_name("inside.py")
PYTHON = os.path.abspath(sys.executable)  # started by a relative path, it may lead through folders that a bwrap does not have
_INNER = (PYTHON, "-I", "-S", str(_INSIDE))
_SOCKET = "/run/endpoint.sock"
_PORT = 8000  # inside a sandbox, where nothing else listens
_WORK = "/tmp/work"
_LOOK_S = 0.5
_TAIL_BYTES = 4096
_MOST_FILES = 1024
_MOST_PROCESSES = 256
# In a bwrap. Whoever is root outside could write the kernel's settings in /proc/sys, one of which names a program that the kernel runs on
# the host; the other two are bwrap's own, of memory without a limit.
_READ_ONLY = ("/proc", "/dev", "/")
_NEEDED = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl", "/etc/localtime", "/etc/passwd")


class Ended(NamedTuple):
    """How a program ended. `why` is empty where it did so by itself and with exit status 0."""

    why: str
    kind: str  # "" | "exit" | "deadline" | "limits"
    output: str  # what it printed on standard output; the end of it, if that is more than `Jail.output_bytes`
    errors: str  # the end of its standard error


@dataclass
class _Running:
    files: Sequence[IO[bytes]]  # what it prints
    wrong: str = ""


@dataclass
class Jail:
    """`folder` can be read and is where the program starts; in a bwrap nothing else of the host can be, but its programs and libraries.
    There a program writes to /tmp and /dev/shm, which are its own and memory; otherwise to a new folder, its TMPDIR."""

    kind: str  # BWRAP | NAMESPACE: the host's files, but not its network | LIMITS: both
    memory_mib: int  # of all its processes together; looked at every half second. No process can ever have more than this
    file_mib: int  # of each file, and of /tmp and of /dev/shm as a whole in a bwrap
    deadline_s: float
    folder: Path | None = None
    paths: Sequence[Path] = ()  # more that can be read
    output_bytes: int = 1 << 20
    printed_bytes: int = 16 << 20  # on both outputs together, before it is ended
    _watched: dict[int, _Running] = field(default_factory=dict)  # by the ids of their first processes
    _watch: asyncio.Task[None] | None = None

    @property
    def networked(self) -> bool:
        """Whether programs have the host's network; otherwise there is nothing in theirs but the socket that they are run with."""
        return self.kind == LIMITS

    def base_url(self, port: int) -> str:
        """Where a program finds what the host has at the socket, or at this port of its own."""
        return f"http://127.0.0.1:{port if self.networked else _PORT}"

    async def run(self, command: Sequence[str], given: str, environment: Mapping[str, str], socket: Path | None) -> Ended:
        """`given`: on standard input. Ends all processes of the program whatever happens."""
        with tempfile.TemporaryDirectory(prefix="megarl-agent-") as own, _files(given) as (stdin, stdout, stderr):
            self._watch = self._watch or asyncio.create_task(self._keep_watch(), name="watch over agents' memory")
            if self._watch.done():
                self._watch.result()  # raises what ended it: without it nothing bounds the programs' memory
            home = "/tmp" if self.kind == BWRAP else own
            path = f"{Path(PYTHON).parent}:{os.environ.get('PATH', os.defpath)}"
            variables = {"PATH": path, "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home, **environment}
            process = await asyncio.create_subprocess_exec(
                *self._command(command, socket),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=self.folder or own,
                env=variables,
                start_new_session=True,
            )
            watched = self._watched[process.pid] = _Running((stdout, stderr))
            kind, why = "", ""
            try:
                async with asyncio.timeout(self.deadline_s):
                    status = await process.wait()
                if watched.wrong:
                    kind, why = "limits", watched.wrong
                elif status:
                    kind, why = "exit", f"exit status {status}"
            except TimeoutError:
                kind, why = "deadline", f"it took longer than {self.deadline_s:g} s"
            finally:
                del self._watched[process.pid]
                _kill(process.pid)
                await process.wait()
            return Ended(why, kind, _end(stdout, self.output_bytes), _end(stderr, _TAIL_BYTES))

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    def _command(self, command: Sequence[str], socket: Path | None) -> list[str]:
        limits = {
            "RLIMIT_DATA": self.memory_mib << 20,  # not RLIMIT_AS: some runtimes, Node's among them, reserve addresses by the gigabyte
            "RLIMIT_FSIZE": self.file_mib << 20,
            "RLIMIT_CPU": int(self.deadline_s) + 1,
            "RLIMIT_NOFILE": _MOST_FILES,
            "RLIMIT_CORE": 0,
        }
        inside = _SOCKET if self.kind == BWRAP and socket else str(socket or "")
        settings = {"limits": limits, "socket": inside, "port": _PORT, "network": self.kind == NAMESPACE}
        inner = [*_INNER, json.dumps(settings), *command]
        if self.kind != BWRAP:
            return inner
        bind = [*map(Path, _NEEDED), Path(sys.prefix), Path(sys.base_prefix), _INSIDE, *self.paths]
        there = dict.fromkeys(str(path) for path in [*bind, *([self.folder] if self.folder else [])] if path.exists())
        size_bytes = str(self.file_mib << 20)
        return [
            *(BWRAP, "--unshare-all", *_no_more_users(), "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *("--proc", "/proc", "--dev", "/dev", "--size", size_bytes, "--tmpfs", "/dev/shm"),
            *("--size", size_bytes, "--tmpfs", "/tmp", "--dir", _WORK),
            *(word for path in there for word in ("--ro-bind", path, path)),
            *(("--bind", str(socket), _SOCKET) if socket else ()),
            *(word for path in _READ_ONLY for word in ("--remount-ro", path)),
            *("--chdir", str(self.folder or _WORK), "--"),
            *inner,
        ]

    async def _keep_watch(self) -> None:
        """Ends programs whose processes have more memory together than they may, are too many, or print too much."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._watched:
                continue
            for pid, (processes, used_bytes) in (await asyncio.to_thread(_used_by, list(self._watched))).items():
                if (running := self._watched.get(pid)) is None:
                    continue
                if used_bytes > self.memory_mib << 20:
                    running.wrong = f"its processes had more than memory_mib={self.memory_mib} together"
                elif processes > _MOST_PROCESSES:
                    running.wrong = f"it had more than {_MOST_PROCESSES} processes"
                elif sum(os.fstat(file.fileno()).st_size for file in running.files) > self.printed_bytes:
                    running.wrong = f"it printed more than {self.printed_bytes >> 20} MiB"
                if running.wrong:
                    _kill(pid)


def kind_for(asked: str) -> str:
    """The best that there is on this machine, if AUTO is asked for. Raises ConfigError where programs cannot be run so."""
    if asked in (AUTO, BWRAP) and shutil.which(BWRAP) is not None:
        return BWRAP
    if asked == BWRAP:
        raise ConfigError("sandbox=bwrap: bubblewrap is not installed: bwrap is not in PATH")
    if asked == LIMITS:
        return LIMITS
    nothing = json.dumps({"limits": {}, "socket": "", "port": 0, "network": True})
    tried = subprocess.run([*_INNER, nothing, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        without = "and bubblewrap is not installed: install it, or" if asked == AUTO else "so"
        raise ConfigError(
            f"sandbox={asked}: the kernel allows no network of a program's own ({tried.stderr.strip().splitlines()[-1]}), {without} set "
            "sandbox=limits, which bounds time, memory and file sizes, but leaves programs the host's network and files"
        )
    return NAMESPACE


@contextlib.contextmanager
def _files(given: str):
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(given.encode())
        stdin.seek(0)
        yield stdin, stdout, stderr


@cache
def _no_more_users() -> tuple[str, ...]:
    """What keeps a program from namespaces of its own, in which it could mount memory without a limit, if bubblewrap can (from 0.8 on)."""
    offered = subprocess.run([BWRAP, "--help"], capture_output=True, text=True, check=False).stdout
    return ("--unshare-user", "--disable-userns") if "--disable-userns" in offered else ()


def _kill(pid: int) -> None:
    """Its whole session. In a bwrap, whose first process ends with it, that is everything; what else had left the session stays."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _end(file: IO[bytes], most_bytes: int) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
    return file.read(most_bytes).decode(errors="replace")


def _used_by(pids: list[int]) -> dict[int, tuple[int, int]]:
    """(processes, bytes) of each of these processes together with all its descendants. Memory that they share counts for each, files that
    are memory for one."""
    children: dict[int, list[tuple[int, int]]] = {}
    for process in psutil.process_iter(["pid", "ppid", "memory_info"]):
        memory = process.info["memory_info"]
        children.setdefault(process.info["ppid"], []).append((process.info["pid"], memory.rss if memory else 0))
    found = {}
    for pid in pids:
        processes, total, waiting = 0, 0, [pid]
        files: dict[int, int] = {}
        while waiting:
            for child, used_bytes in children.get(waiting.pop(), ()):
                processes, total = processes + 1, total + used_bytes
                files |= _memory_files(child)
                waiting.append(child)
        found[pid] = processes, total + sum(files.values())
    return found


def _memory_files(pid: int) -> dict[int, int]:
    """The bytes of the files made by memfd_create that it has open, by inode."""
    found = {}
    with contextlib.suppress(OSError):  # it ended meanwhile
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith("/memfd:"):
                    there = os.stat(entry.path)
                    found[there.st_ino] = there.st_blocks * 512
    return found
