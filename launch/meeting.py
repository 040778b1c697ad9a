"""The launchers of one launch meet in a folder on their shared file system, which checkpoints need
anyway.

    meeting.announce(report)              every node, once: tells where it can be reached
    meeting.reports()                     every node: waits for all reports
    meeting.publish / await_rendezvous    the head decides, the others read
    meeting.poll()                        every node, repeatedly: shows that it is alive; raises if
                                          another node failed or fell silent
    meeting.ask_to_stop()                 any node; the others learn of it by asked_to_stop()
    meeting.finish()                      every node with work, when it is done; nodes that only
                                          serve wait for all_finished()

Files appear by rename, so nobody reads half of one. Signs of life are overwritten in place, since
NFS fails if a file is replaced while it is read.

Hundreds of launchers may look at this folder on one file server. So each only lists it, at most
twice a second. (Listing also makes NFS ask the server. For a single file, NFS may answer from a
cache that is a minute old.) The head listens to all nodes, all others to the head.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megarl.config.errors import ConfigError, RunError
from megarl.launch.nodes import Node
from megarl.messaging.rendezvous import Rendezvous, rendezvous_path

# errors if another process holds the lock
LOCK_TAKEN = (errno.EACCES, errno.EAGAIN)
# errors if the file system or its mount has no locks
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


# held by threads of this process, which a record lock does not tell apart
_locks_of_process: set[Path] = set()


@contextlib.contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Holds the lock file `path` against every process on every host that shares its file system,
    and every thread of this one, so that only one launch of a command at a time is in a run's
    folder.

    It is a POSIX record lock, which children do not inherit. However the holder ends, the kernel
    releases it, or the file server if the host is gone. Raises ConfigError if another process holds
    it: `refusal`, and which process that is.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    resolved = path.resolve()
    if resolved in _locks_of_process:
        raise ConfigError(f"{refusal}, in another thread of this program; end it first")
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "by another launch"
            _not_locked(error, path, f"{refusal}, {holder}; end it first")
        else:
            file.truncate(0)
            file.write(
                f"process {os.getpid()} on {socket.gethostname()} since "
                f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}\n"
            )
            file.flush()
        _locks_of_process.add(resolved)
        try:
            yield
        finally:
            _locks_of_process.remove(resolved)


def is_locked(path: Path) -> bool:
    """Whether a process on any host holds the lock file `path`.

    Also true if the file system has no locks.
    """
    if path.resolve() in _locks_of_process:
        return True  # without opening the file: to close it would release the lock
    with open(path, "rb") as file:
        try:
            os.lockf(file.fileno(), os.F_TEST, 0)
        except OSError as error:
            if error.errno not in (*LOCK_TAKEN, *NO_LOCKS):
                raise
            return True
        return False


def _not_locked(error: OSError, path: Path, refusal: str) -> None:
    if error.errno in LOCK_TAKEN:
        raise ConfigError(refusal) from None
    if error.errno not in NO_LOCKS:
        raise error
    print(
        f"megarl: {path}: no locks on this file system; a second launch would not be noticed",
        file=sys.stderr,
        flush=True,
    )


_PREFIX = "megarl-"
_LOCK = "lock"
# bytes: the limit of a Unix socket's path, minus what multiprocessing adds
_LONGEST = 107 - len("/pymp-12345678/listener-12345678")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder under TMPDIR for sockets, stores and caches of this node's part of a launch.

    It is on the node's own disk, since some shared file systems lack sockets and locks. Only this
    user can access it. It is removed with the launch, or after a killed launcher by the next launch
    on the node.
    """
    try:
        base = Path(tempfile.gettempdir())
    except FileNotFoundError as error:  # also if all of them are full
        tmpdir = os.environ.get("TMPDIR", "")
        raise ConfigError(
            f"TMPDIR={tmpdir}: no folder for temporary files can be written to: {error.strerror}"
        ) from error
    if len(os.fsencode(base)) + len(f"/{_PREFIX}12345678") > _LONGEST:
        base = Path("/tmp")
    _remove_leftovers(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    with open(folder / f".{_LOCK}", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, folder / _LOCK)  # under its final name, now that the lock is held
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(base: Path) -> None:
    """Removes the folders of this user's killed launchers, whose locks the kernel has released."""
    for path in base.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # of another user, still locked, or already removed
            if path.parent.lstat().st_uid == os.getuid():
                with open(path, "rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent)


POLL_S = 0.1
LOOK_S = 0.5
BEAT_S = 2.0
# in the folder where launchers meet: the file that asks all of them to bring the run to a stop
STOP = "stop"


class NodeReport(msgspec.Struct, frozen=True):
    """A node's report to the others about itself."""

    node: int
    host: str
    address: str
    gpus: int
    # purpose -> port: hub, trainer, engine.3 (engine.3.1: its second part), engine.3.group
    ports: dict[str, int]
    versions: dict[str, str]
    problems: list[str]  # reasons why this node cannot take part
    infiniband: dict[str, bool] = {}  # port -> whether it is up


class PeerFailed(RunError):
    """Another node has ended the run. The message is from that node."""


class Meeting:
    """One node's view of the meeting.

    `timeout_s` bounds every wait for a node. `silence_s`: how long a node may give no sign of life.
    """

    def __init__(self, folder: Path, node: Node, timeout_s: float, silence_s: float):
        self.folder = Path(folder)
        self.node = node
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._beats = 0
        self._beat_at = 0.0
        # node -> its last beat, and when this process first saw it
        self._last_beats: dict[int, tuple[str, float]] = {}
        self._names: set[str] = set()  # names of the files in the folder
        self._looked_at = -math.inf
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def announce(self, report: NodeReport) -> None:
        """Reports this node.

        Raises ConfigError if the name of the launch was used before, since old files would count as
        this launch's.
        """
        if self.node.count > 1 and self._path_of_report(self.node.rank).exists():
            raise ConfigError(
                f"{self.folder}: launch {self.node.launch} was used before; torchrun needs a new "
                "--rdzv-id for every launch, srun a step of its own"
            )
        self._write(self._path_of_report(self.node.rank).name, msgspec.json.encode(report))

    def reports(self) -> list[NodeReport]:
        """The reports of all nodes, in order. Raises TimeoutError that names missing nodes."""
        deadline = time.monotonic() + self._timeout_s
        reports: dict[int, NodeReport] = {}
        while len(reports) < self.node.count:
            missing = [rank for rank in range(self.node.count) if rank not in reports]
            names = self._file_names()
            announced = [rank for rank in missing if self._path_of_report(rank).name in names]
            for rank in announced:
                reports[rank] = read_report(self.folder, rank)
            if not announced:
                self._wait(
                    deadline,
                    f"node {', '.join(map(str, missing))} of {self.node.count} to announce itself "
                    f"in {self.folder}: do all nodes share that file system?",
                )
        return [reports[rank] for rank in range(self.node.count)]

    def publish(self, rendezvous: Rendezvous) -> None:
        rendezvous.save(self.folder)

    def await_rendezvous(self) -> Rendezvous:
        deadline = time.monotonic() + self._timeout_s
        while rendezvous_path(self.folder).name not in self._file_names():
            self._wait(deadline, f"node 0 to publish {rendezvous_path(self.folder)}")
        return Rendezvous.load(self.folder)

    def poll(self) -> None:
        """Shows that this node is alive.

        Raises PeerFailed if another node has failed, or given no sign of life for `silence_s`.
        """
        now = time.monotonic()
        if self.node.count == 1 or now - self._beat_at < BEAT_S:
            return
        self._beat_at = now
        self._beats = self._beats + 1
        self._path_of_beats(self.node.rank).write_text(str(self._beats), encoding="utf-8")
        failure = self.failure()
        if failure is not None:
            raise PeerFailed(failure)
        ranks = range(self.node.count) if self.node.is_head else (0,)
        for rank in ranks:
            self._listen(rank, now)

    def _listen(self, rank: int, now: float) -> None:
        last, since = self._last_beats.setdefault(rank, ("", now))
        # no news: the file does not exist yet, or cannot be read now
        with contextlib.suppress(OSError):
            beat = self._path_of_beats(rank).read_text(encoding="utf-8")
            if beat != last:
                self._last_beats[rank] = (beat, now)
                return
        if (
            now - since > self._silence_s
            and self._path_of_finished(rank).name not in self._file_names()
        ):
            raise PeerFailed(
                f"node {rank} has shown no sign of life for {self._silence_s:.0f} s; its launcher "
                "or its host is gone"
            )

    def fail(self, message: str) -> None:
        """Reports a failure.

        Only the first one counts, since later ones are mostly its consequences. If the folder
        cannot be written to (a full disk), the other nodes will notice this node's silence.
        """
        with contextlib.suppress(OSError):  # FileExistsError: another node was first
            path = self.folder / f".failure.{self.node.rank}"
            path.write_text(message, encoding="utf-8")
            os.link(path, self.folder / "failure")

    def failure(self) -> str | None:
        if "failure" in self._file_names():
            return (self.folder / "failure").read_text(encoding="utf-8")
        return None

    def ask_to_stop(self) -> None:
        """Asks the launchers of all nodes to bring the run to a stop."""
        self._write(STOP, b"")

    def asked_to_stop(self) -> bool:
        return STOP in self._file_names()

    def finish(self) -> None:
        self._write(self._path_of_finished(self.node.rank).name, b"")

    def all_finished(self, nodes: list[int], now: bool = False) -> bool:
        """Whether all of `nodes` are done.

        `now`: looks into the folder now instead of using the last look.
        """
        if now:
            self._looked_at = -math.inf
        return all(self._path_of_finished(rank).name in self._file_names() for rank in nodes)

    def _path_of_report(self, rank: int) -> Path:
        return _path_of_report(self.folder, rank)

    def _path_of_finished(self, rank: int) -> Path:
        return self.folder / f"finished.{rank}"

    def _path_of_beats(self, rank: int) -> Path:
        return self.folder / f"alive.{rank}"

    def _file_names(self) -> set[str]:
        """The names of the files in the folder, at most LOOK_S old.

        This node's own files are always included.
        """
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._names = set(os.listdir(self.folder))
            self._looked_at = now
        return self._names

    def _write(self, name: str, body: bytes) -> None:
        half = self.folder / f".{name}.{self.node.rank}"
        half.write_bytes(body)
        half.rename(self.folder / name)
        self._names.add(name)

    def _wait(self, deadline: float, awaited: str) -> None:
        failure = self.failure()
        if failure is not None:
            raise PeerFailed(failure)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"node {self.node.rank} waited {self._timeout_s:.0f} s for {awaited}"
            )
        time.sleep(POLL_S)


def read_report(folder: Path, rank: int) -> NodeReport:
    path = _path_of_report(folder, rank)
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeReport)
    except msgspec.DecodeError as error:
        raise RuntimeError(
            f"{path}: is damaged ({error}); it belongs to this launch alone: start again"
        ) from error


def _path_of_report(folder: Path, rank: int) -> Path:
    return folder / f"node.{rank}.json"
