"""Runs a user's program for an episode, with limits on time, memory and files.

With bubblewrap, the program has neither the network nor the host's files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

from megarl.config.errors import ConfigError
from megarl.sandbox import inside

AUTO = "auto"
BWRAP = "bwrap"
NAMESPACE = "namespace"
LIMITS = "limits"
_INSIDE = Path(inside.__file__)
# not a relative path, which may lead through folders that bwrap does not show
PYTHON = os.path.abspath(sys.executable)
_INNER = (PYTHON, "-I", "-S", str(_INSIDE))
_SOCKET = "/run/endpoint.sock"
_PORT = 8000  # inside a sandbox, where nothing else listens
_WORK = "/tmp/work"
_LOOK_S = 0.5
_TAIL_BYTES = 4096
_MOST_FILES = 1024
_MOST_PROCESSES = 256
# sockets, pipes and terminals: for each, up to 0.4 MiB of kernel memory count for no process
_MOST_CHANNELS = 2048
_MOST_THREADS = 4096
_INODE_BYTES = 1024  # memory of a file in memory, besides its contents
_THREAD_BYTES = 32 << 10  # kernel memory of a thread, such as its stack
_MAPPING_BYTES = 256
_OF_STATUS = ("VmRSS", "VmSwap", "VmPTE", "HugetlbPages")  # in /proc/PID/status
_LOOK_AGAIN_S = 0.05
_PIECE = 1 << 18
_MOST_LEFT = 16  # number of pieces, more than a pipe holds
_GRACE_S = 0.1
_ENDS_S = 5.0
# Read-only in a bwrap. In /proc/sys, the host's root could write the kernel's settings; one of them
# names a program that the kernel runs on the host. The other two are bwrap's own file systems, in
# memory without a limit.
_READ_ONLY = ("/proc", "/dev", "/")
_HIDDEN = ("/proc/keys", "/proc/key-users")
_NEEDED = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/ssl",
    "/etc/localtime",
    "/etc/passwd",
)


class ProgramEnd(NamedTuple):
    """How a program ended. `reason` is empty if it ended by itself with exit status 0."""

    reason: str
    kind: str  # "" | "exit" | "deadline" | "limits"
    output: str  # its standard output, or the last `Jail.output_bytes` of it
    errors: str  # the end of its standard error


class _Printed:
    """The end of a program's output.

    It is read from a pipe, since the size of a file that a program has open cannot be bounded.
    """

    def __init__(self, most_bytes: int, running: _Running):
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.writing, True)
        self._most_bytes = most_bytes
        self._running = running
        self._pieces = bytearray()
        asyncio.get_running_loop().add_reader(self._reading, self._read)

    def _read(self) -> bool:
        """Reads available output. Returns whether more may come."""
        try:
            piece = os.read(self._reading, _PIECE)
        except BlockingIOError:
            return False
        if not piece:
            asyncio.get_running_loop().remove_reader(self._reading)
            return False
        self._pieces += piece
        if len(self._pieces) > 2 * self._most_bytes:
            del self._pieces[: -self._most_bytes]
        self._running.note(piece)
        return True

    def close(self) -> str:
        """Reads the rest of the output, once the program has ended.

        Processes that have left its session may still run.
        """
        for _ in range(_MOST_LEFT):
            if not self._read():
                break
        asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)
        return self._pieces[-self._most_bytes :].decode(errors="replace")


class _Running:
    """A running program. If it must be killed, `wrong` is the reason, and `ended` is set."""

    def __init__(self, most_bytes: int, lines: int | None, line_s: float | None):
        self.wrong = ""
        self.late = False
        self.ended = asyncio.Event()
        self._left_bytes = most_bytes
        self._most_bytes = most_bytes
        self._lines = lines
        self.line_s = line_s
        self._timer: asyncio.TimerHandle | None = None

    def end(self, wrong: str) -> None:
        self.wrong = self.wrong or wrong
        self.ended.set()

    def note(self, piece: bytes) -> None:
        """Counts new text on standard output or standard error."""
        self._left_bytes -= len(piece)
        if self._left_bytes < 0:
            self.end(f"it printed more than {self._most_bytes >> 20} MiB")
        new_lines = piece.count(b"\n")
        if self.line_s is None or self._lines is None or not new_lines:
            return
        self._lines -= new_lines
        if self._lines <= 0:
            self.ended.set()
        self.stop_clock()
        self._timer = asyncio.get_running_loop().call_later(self.line_s, self._warn)

    def _warn(self) -> None:
        """Called at the deadline of a line.

        First lets the event loop read pending output, in case it was blocked.
        """
        self._timer = asyncio.get_running_loop().call_later(_GRACE_S, self._expire)

    def _expire(self) -> None:
        self.late = True
        self.ended.set()

    def stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@dataclass
class Jail:
    """A sandbox.

    The program starts in `folder`, which it can read. In a bwrap it can read only programs and
    libraries of the host besides, and writes to its own /tmp and /dev/shm in memory. In a namespace
    it can read the host's files, and writes to /dev/shm and a new folder, its TMPDIR, both in
    memory. With LIMITS it writes to such a folder and wherever its user can.
    """

    # BWRAP | NAMESPACE: reads the host's files, no network | LIMITS: files and network as its user
    # has them
    kind: str
    # of all its processes together, checked every half second; also the limit of each process
    memory_mib: int
    file_mib: int  # of each file; also of TMPDIR and of /dev/shm as a whole, if they are in memory
    deadline_s: float
    folder: Path | None = None
    paths: Sequence[Path] = ()  # further readable paths
    output_bytes: int = 1 << 20
    printed_bytes: int = 16 << 20  # most output on both streams together; more ends it
    # id of the first process -> the running program
    _watched: dict[int, _Running] = field(default_factory=dict)
    _watch: asyncio.Task[None] | None = None

    @property
    def networked(self) -> bool:
        """Whether programs have the host's network.

        Otherwise they can reach only the socket of their run.
        """
        return self.kind == LIMITS

    def base_url(self, port: int) -> str:
        """The URL at which a program reaches its endpoint: the host's socket, or `port`."""
        return f"http://127.0.0.1:{port if self.networked else _PORT}"

    async def run(
        self,
        command: Sequence[str],
        stdin: str,
        environment: Mapping[str, str],
        socket: Path | None,
        lines: int | None = None,
        line_s: float | None = None,
    ) -> ProgramEnd:
        """Runs a program.

        `stdin`: the text of its standard input. Kills all its processes at the end, whatever
        happens. It also ends when it has printed `lines` lines, or when one line takes longer than
        `line_s`.
        """
        self._watch = self._watch or asyncio.create_task(
            self._keep_watch(), name="watch over agents' memory"
        )
        if self._watch.done():
            # raises the error of the watch, without which memory is not limited
            self._watch.result()
        running = _Running(self.printed_bytes, lines, line_s)
        home = tempfile.mkdtemp(prefix="megarl-agent-")
        outputs = [_Printed(self.output_bytes, running), _Printed(_TAIL_BYTES, running)]
        texts: list[str] = []
        try:
            kind, reason = await self._run(
                command,
                stdin.encode(),
                self._variables(home, environment),
                socket,
                home,
                running,
                outputs,
            )
        finally:
            running.stop_clock()
            texts = [output.close() for output in outputs]
            await asyncio.to_thread(_remove, home)
        output, errors = texts
        return ProgramEnd(reason, kind, output, errors)

    def _variables(self, home: str, environment: Mapping[str, str]) -> dict[str, str]:
        if self.kind == BWRAP:
            home = "/tmp"
        path = f"{Path(PYTHON).parent}:{os.environ.get('PATH', os.defpath)}"
        return {"PATH": path, "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home, **environment}

    async def _run(
        self,
        command: Sequence[str],
        stdin: bytes,
        variables: dict[str, str],
        socket: Path | None,
        home: str,
        running: _Running,
        outputs: Sequence[_Printed],
    ) -> tuple[str, str]:
        """How it ended (ProgramEnd.kind, ProgramEnd.reason)."""
        reading, feeding = os.pipe2(os.O_CLOEXEC)
        with _filter_file() as filter_:
            process = await asyncio.create_subprocess_exec(
                *self._command(command, socket, home, filter_),
                stdin=reading,
                stdout=outputs[0].writing,
                stderr=outputs[1].writing,
                cwd=self.folder or home,
                env=variables,
                start_new_session=True,
                pass_fds=(filter_,) if self.kind == BWRAP else (),
            )
        for end in (reading, *(output.writing for output in outputs)):
            os.close(end)
        feeds = asyncio.create_task(_feed(feeding, stdin), name="a program's standard input")
        waits = asyncio.create_task(process.wait(), name="a program's end")
        ending = asyncio.create_task(running.ended.wait(), name="what a program is ended for")
        self._watched[process.pid] = running
        try:
            async with asyncio.timeout(self.deadline_s):
                await asyncio.wait({waits, ending}, return_when=asyncio.FIRST_COMPLETED)
            if running.wrong:
                return "limits", running.wrong
            if running.late:
                return "deadline", f"its next line took longer than {running.line_s:g} s"
            status = waits.result() if waits.done() else 0
            return ("exit", f"exit status {status}") if status else ("", "")
        except TimeoutError:
            return "deadline", f"it took longer than {self.deadline_s:g} s"
        finally:
            del self._watched[process.pid]
            for task in (ending, feeds):
                task.cancel()
            try:
                if self.kind == LIMITS and not waits.done():
                    # its first process then kills all others, even those that start meanwhile
                    process.terminate()
                    await asyncio.wait({waits}, timeout=_ENDS_S)
            finally:
                if not waits.done() or process.returncode:
                    self._kill(process.pid)
            await asyncio.wait({waits, feeds})

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    def _command(
        self, command: Sequence[str], socket: Path | None, home: str, filter_: int
    ) -> list[str]:
        limits = {
            # not RLIMIT_AS, since runtimes such as Node reserve gigabytes of addresses
            "RLIMIT_DATA": self.memory_mib << 20,
            "RLIMIT_FSIZE": self.file_mib << 20,
            "RLIMIT_CPU": int(self.deadline_s) + 1,
            "RLIMIT_NOFILE": _MOST_FILES,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
        }
        socket_path = _SOCKET if self.kind == BWRAP and socket else str(socket or "")
        settings = _settings(self.kind, limits, socket_path, home, self.file_mib << 20)
        inner = [*_INNER, settings, *command]
        if self.kind != BWRAP:
            return inner
        paths = [*map(Path, _NEEDED), Path(sys.prefix), Path(sys.base_prefix), _INSIDE]
        paths += self.paths
        if self.folder:
            paths.append(self.folder)
        size_bytes = str(self.file_mib << 20)
        outer = [BWRAP, "--unshare-all", *_no_more_users()]
        outer += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        if inside.system_call_filter():
            outer += ["--seccomp", str(filter_)]
        outer += ["--proc", "/proc", "--dev", "/dev"]
        outer += ["--size", size_bytes, "--tmpfs", "/dev/shm"]
        outer += ["--size", size_bytes, "--tmpfs", "/tmp", "--dir", _WORK]
        for path in dict.fromkeys(str(path) for path in paths if path.exists()):
            outer += ["--ro-bind", path, path]
        if socket:
            outer += ["--bind", str(socket), _SOCKET]
        for path in filter(os.path.exists, _HIDDEN):
            outer += ["--ro-bind", "/dev/null", path]
        for path in _READ_ONLY:
            outer += ["--remount-ro", path]
        outer += ["--chdir", str(self.folder or _WORK), "--"]
        return outer + inner

    async def _keep_watch(self) -> None:
        """Kills programs whose processes together use too much memory, or are too many."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._watched:
                continue
            usages = await asyncio.to_thread(_used_by, list(self._watched))
            for pid, used in usages.items():
                running = self._watched.get(pid)
                if running is None:
                    continue
                if used.memory_bytes > self.memory_mib << 20:
                    running.end(
                        f"its processes had more than memory_mib={self.memory_mib} together"
                    )
                elif used.processes > _MOST_PROCESSES:
                    running.end(f"it had more than {_MOST_PROCESSES} processes")
                elif used.threads > _MOST_THREADS:
                    running.end(f"it had more than {_MOST_THREADS} threads")
                elif len(used.channels) > _MOST_CHANNELS:
                    running.end(f"it had more than {_MOST_CHANNELS} sockets, pipes and terminals")
                elif used.hidden:
                    running.end(
                        "one of its processes hides what it has: its program's file cannot be read"
                    )

    def _kill(self, pid: int) -> None:
        """Kills the whole program.

        In a sandbox with its own processes these are the descendants of the first process.
        Otherwise these are its session, and its processes that have left the session.
        """
        for process in descendants(pid) if self.kind == LIMITS else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def unbounded(kind: str) -> str:
    """What a program can still do in this kind of sandbox on this machine, as a warning for the
    user.
    """
    warnings = [
        "memory_mib does not count buffers of its pipes and Unix sockets, file locks, watched "
        "events, and shared memory that no process "
        "maps any more; its processes may keep every core busy, each for deadline_s of CPU time"
    ]
    if kind == NAMESPACE:
        warnings.append("it reads the host's files as your user does, and can write to named pipes")
    if kind == LIMITS:
        warnings += [
            "it has the host's network, and files and processes as your user has them (as root "
            "without its capabilities)",
            "it can fill /dev/shm and disks",
            "if it ends the process that watches it, it can go on",
        ]
    if not inside.system_call_filter():
        machine = platform.machine()
        warnings.append(
            f"its system calls are not filtered on {machine}: System V IPC, io_uring, keyrings "
            "and files without names are open to it"
        )
    return "; ".join(warnings)


def kind_for(setting: str) -> str:
    """The kind of sandbox to use: that of the `setting`, or for AUTO the best on this machine.

    Raises ConfigError if programs cannot run in the kind that is set.
    """
    if setting in (AUTO, BWRAP) and shutil.which(BWRAP) is not None:
        return BWRAP
    if setting == BWRAP:
        raise ConfigError("sandbox=bwrap: bubblewrap is not installed: bwrap is not in PATH")
    if setting == LIMITS:
        return LIMITS
    with tempfile.TemporaryDirectory() as home:
        trial = subprocess.run(
            [*_INNER, _settings(NAMESPACE, {}, "", home, 1 << 20), "true"],
            capture_output=True,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    if trial.returncode:
        without = "and bubblewrap is not installed: install it, or" if setting == AUTO else "so"
        raise ConfigError(
            f"sandbox={setting}: the kernel allows no namespaces of a program's own "
            f"({trial.stderr.strip().splitlines()[-1]}), {without} set "
            "sandbox=limits, which bounds time, memory and file sizes, but leaves programs the "
            "host's network and files"
        )
    return NAMESPACE


def _settings(kind: str, limits: Mapping[str, int], socket: str, home: str, size_bytes: int) -> str:
    settings = {
        "kind": kind,
        "limits": limits,
        "socket": socket,
        "port": _PORT,
        "home": "" if kind == LIMITS else home,
        "size_bytes": size_bytes,
    }
    return json.dumps(settings)


@contextlib.contextmanager
def _filter_file() -> Iterator[int]:
    """A file descriptor from which bubblewrap reads the system call filter."""
    reading, writing = os.pipe()
    try:
        os.write(writing, inside.system_call_filter())
        os.close(writing)
        yield reading
    finally:
        os.close(reading)


async def _feed(writing: int, stdin: bytes) -> None:
    """Writes a program's standard input, as far as the program reads it, and closes it."""
    loop = asyncio.get_running_loop()
    remaining = memoryview(stdin)
    os.set_blocking(writing, False)
    try:
        while remaining:
            try:
                remaining = remaining[os.write(writing, remaining[:_PIECE]) :]
            except BlockingIOError:
                ready = loop.create_future()
                loop.add_writer(writing, lambda ready=ready: ready.done() or ready.set_result(None))
                try:
                    await ready
                finally:
                    loop.remove_writer(writing)
            except BrokenPipeError:
                return
            else:
                await asyncio.sleep(0)
    finally:
        os.close(writing)


@cache
def _no_more_users() -> tuple[str, ...]:
    """bubblewrap's arguments that keep a program from creating namespaces, in which it could mount
    memory without a limit. bubblewrap has them from 0.8 on.
    """
    offered = subprocess.run(
        [BWRAP, "--help"], capture_output=True, check=False, encoding="utf-8", errors="replace"
    ).stdout
    return ("--unshare-user", "--disable-userns") if "--disable-userns" in offered else ()


def descendants(pid: int) -> list[psutil.Process]:
    """All descendants of the process `pid`; none if it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@dataclass
class _Used:
    """The resources of several processes together.

    Shared memory counts once per process, a file in memory only once.
    """

    processes: int = 0
    threads: int = 0
    own_bytes: int = 0
    # file -> its bytes in memory that are counted nowhere else
    files: dict[object, int] = field(default_factory=dict)
    channels: set[str] = field(default_factory=set)  # sockets, pipes and terminals
    hidden: bool = False  # whether a process hides its files and mappings

    @property
    def memory_bytes(self) -> int:
        return self.own_bytes + sum(self.files.values())

    def add(self, pid: int, may_hide: bool) -> None:
        """Adds a process, including the kernel's memory for it: page tables, mappings, stacks of
        threads.
        """
        self.processes += 1
        files: dict[object, int] = {}
        try:
            text = Path(f"/proc/{pid}/status").read_text(errors="replace", encoding="utf-8")
            status: dict[str, str] = {}
            for line in text.splitlines():
                name, _, value = line.partition(":")
                status[name] = value
            threads = int(status["Threads"])
            kib = sum(int(status.get(name, "0").split()[0]) for name in _OF_STATUS)
            self.threads += threads
            self.own_bytes += (kib << 10) + threads * _THREAD_BYTES
            self.own_bytes += _memory_files(pid, files, self.channels) * _MAPPING_BYTES
        except (FileNotFoundError, ProcessLookupError):  # the process has ended meanwhile
            return
        except PermissionError:
            self.hidden = self.hidden or not (may_hide or _has_ended(pid))
        self.files |= files


def _used_by(pids: list[int]) -> dict[int, _Used]:
    """The resources of each of these processes together with all its descendants."""
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter(["pid", "ppid"]):
        children.setdefault(process.info["ppid"], []).append(process.info["pid"])
    usages = {}
    for pid in pids:
        used = _Used()
        waiting = [pid]
        while waiting:
            parent = waiting.pop()
            for child in children.get(parent, ()):
                # the direct child is the sandbox's own process
                used.add(child, may_hide=parent == pid)
                waiting.append(child)
        usages[pid] = used
    return usages


def _memory_files(pid: int, files: dict[object, int], channels: set[str]) -> int:
    """Adds to `files` the bytes of its files that are in memory and counted nowhere else, each file
    once: files from memfd_create, anonymous shared mappings, the overhead of files in memory, and
    unread data in its own network. Adds its sockets, pipes and terminals to `channels`. Returns its
    number of mappings. Raises OSError or PermissionError if they cannot be seen.
    """
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(entry.path)
            if target.startswith("/memfd:"):
                file = os.stat(entry.path)
                files[file.st_ino] = file.st_blocks * 512
            elif target.startswith(("socket:", "pipe:")):
                channels.add(target)
            elif target.endswith("/ptmx"):  # all terminals have the same name
                channels.add(f"{pid} {entry.name}")
    shared = list[list[str]]()
    mappings = 0
    with open(f"/proc/{pid}/maps", errors="replace", encoding="utf-8") as maps:
        for line in maps:
            mappings += 1
            if line.endswith("/dev/zero (deleted)\n"):
                shared.append(line.split())
    for ends, _, _, _, inode, *_ in shared:
        start, end = (int(number, 16) for number in ends.split("-"))
        files["shared", inode] = end - start
    for folder in ("/tmp", "/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            device = os.stat(f"/proc/{pid}/root{folder}").st_dev
            if device != os.stat(folder).st_dev:
                system = os.statvfs(f"/proc/{pid}/root{folder}")
                files["files", device] = (system.f_files - system.f_ffree) * _INODE_BYTES
    network = os.stat(f"/proc/{pid}/ns/net").st_ino
    if network != os.stat("/proc/self/ns/net").st_ino:
        sockets = [Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6", "udp", "udp6")]
        files["network", network] = sum(map(_waiting_bytes, sockets))
    return mappings


def _waiting_bytes(sockets: Path) -> int:
    """The bytes that were sent but not read, from the kernel's table of sockets (proc_net_tcp.rst).
    0 if there is no such table.
    """
    if not sockets.exists():
        return 0
    queues = [
        line.split()[4].split(":") for line in sockets.read_text(encoding="utf-8").splitlines()[1:]
    ]
    return sum(int(sent, 16) + int(received, 16) for sent, received in queues)


def _has_ended(pid: int) -> bool:
    """Whether the process has no memory any more.

    A process cannot be inspected during exec, so this waits for a moment.
    """
    time.sleep(_LOOK_AGAIN_S)
    with contextlib.suppress(OSError):
        os.scandir(f"/proc/{pid}/fd").close()
        return True  # it can be inspected next time
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").startswith("0 ")
    return True


def _remove(folder: str) -> None:
    """Removes a folder.

    A program may have nested folders too deeply for Python, or removed permissions from them.
    """
    try:
        os.rmdir(folder)  # most folders are empty
    except OSError:
        subprocess.run(
            ["sh", "-c", 'chmod -R u+rwx "$1"; rm -rf "$1"', "sh", folder],
            capture_output=True,
            check=False,
        )
