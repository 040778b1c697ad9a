"""How the processes of a run find each other: addresses, keys, and the checkpoint to resume
from.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megarl.messaging.host import family_of, with_port
from megarl.messaging.link import RunKey

LOWEST_PORT = 10_000
END_OF_PORTS = 65_536  # well-known services have lower ports
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Purpose:
    """What engines are for."""

    prefix: str  # of their processes' names
    text: str  # their name in messages
    section: str = "generator"  # config section with their sizes
    driver: str = ""  # worker role that brings them the run's weights; empty: they are frozen
    spare: bool = False  # whether training goes on without them


ROLLOUTS = Purpose(prefix="engine", text="engines", driver="generator")
EVALUATION = Purpose(
    prefix="eval_engine", text="evaluation engines", driver="evaluator", spare=True
)
PURPOSES = (ROLLOUTS, EVALUATION)  # of engines with the run's weights
GENERATOR = f"{ROLLOUTS.driver}.0"


class EngineAddress(msgspec.Struct, frozen=True):
    host: str
    port: int
    group_port: int  # where the parts of the engine on several nodes meet

    @property
    def url(self) -> str:
        return f"http://{with_port(self.host, self.port)}"


class Rendezvous(msgspec.Struct, frozen=True):
    """The launcher writes this file before it starts processes.

    Only this user can read it, since it holds the engines' keys.
    """

    hub_host: str
    hub_ports: dict[str, int]  # worker role of a driver of engines -> port of its hub
    key_file: str  # file with the RunKey for all messages between processes
    trainer_host: str  # host of trainer rank 0, where torch.distributed meets
    trainer_port: int
    # by process name: the policy's engines, then those of each role
    engines: dict[str, list[EngineAddress]]
    engine_key: str  # key for generation
    engine_admin_key: str  # key for weight updates
    start_step: int
    checkpoint: str  # folder to resume from, empty for a fresh run
    first_engine: int = 0  # number of the first of `engines`, if they have joined a run

    @property
    def key(self) -> RunKey:
        return RunKey.load(Path(self.key_file))

    def hub_address(self, purpose: Purpose) -> str:
        return f"tcp://{with_port(self.hub_host, self.hub_ports[purpose.driver])}"

    def engine_urls(self, name: str) -> list[str]:
        return [engine.url for engine in self.engines[name]]

    def save(self, launch_dir: Path) -> None:
        """Writes the file atomically, since launchers on other nodes wait for it."""
        path = rendezvous_path(launch_dir)
        half = path.with_suffix(".half")
        half.unlink(missing_ok=True)
        descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(self))
        half.rename(path)

    @classmethod
    def load(cls, launch_dir: Path) -> Rendezvous:
        """Reads the file in `launch_dir`. Raises RuntimeError if it is damaged."""
        path = rendezvous_path(launch_dir)
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise RuntimeError(
                f"{path}: is damaged ({error}); only this launch needs it: start the run again"
            ) from error


def rendezvous_path(launch_dir: Path) -> Path:
    return Path(launch_dir) / "rendezvous.json"


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports that were free a moment ago. Raises RuntimeError if there are not enough.

    An engine binds its port seconds later. Until then the kernel may give any ephemeral port to an
    outgoing connection, so these ports lie outside that range, unless the host leaves none there.
    """
    low, high = map(int, EPHEMERAL_RANGE.read_text(encoding="utf-8").split())
    candidates = [*range(LOWEST_PORT, low), *range(high + 1, END_OF_PORTS)]
    if not candidates:
        candidates = list(range(LOWEST_PORT, END_OF_PORTS))
    random.SystemRandom().shuffle(candidates)
    ports: list[int] = []
    for port in candidates:
        if len(ports) == count:
            break
        with socket.socket(family_of(host)) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            ports.append(port)
    if len(ports) < count:
        raise RuntimeError(
            f"{count} free ports are needed on {host}, but there are only {len(ports)}"
        )
    return ports


_PREFIX = "left."
LOOK_S = 0.5


def note_departure(folder: Path, engine: str) -> None:
    """Notes that the processes of `engine` (such as engine.3) are no longer needed, by a file in
    the run's launch folder, which all launchers see.
    """
    (folder / f"{_PREFIX}{engine}").touch()


class Departures:
    """The engines that `note_departure` has noted in `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._names = set[str]()  # of the files in the folder
        self._looked_at = -math.inf

    def __contains__(self, process: str) -> bool:
        """Whether the engine of `process` (engine.3, or its part engine.3.1) has left.

        The answer is at most LOOK_S old.
        """
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            # the folder is removed with the run, or its file server is unreachable for a while
            with contextlib.suppress(OSError):
                self._names = set(os.listdir(self._folder))
        engine = ".".join(process.split(".")[:2])
        return f"{_PREFIX}{engine}" in self._names
