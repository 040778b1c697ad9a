"""What the processes of a run need to find each other: addresses, keys, where to resume."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from megarl.channels.link import RunKey


class Rendezvous(msgspec.Struct, frozen=True):
    """Written by the launcher before it starts anything, readable by this user alone: it holds the engines' keys."""

    hub_host: str
    hub_port: int
    key_file: str  # the RunKey of every message between processes
    engine_hosts: list[str]
    engine_ports: list[int]
    engine_key: str  # generation
    engine_admin_key: str  # weight updates
    start_step: int
    checkpoint: str  # folder to resume from, empty for a fresh run

    @property
    def key(self) -> RunKey:
        return RunKey.load(Path(self.key_file))

    @property
    def hub_address(self) -> str:
        return f"tcp://{self.hub_host}:{self.hub_port}"

    @property
    def engine_urls(self) -> list[str]:
        return [f"http://{host}:{port}" for host, port in zip(self.engine_hosts, self.engine_ports)]

    def save(self, launch_dir: Path) -> None:
        path = rendezvous_path(launch_dir)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(self))

    @classmethod
    def load(cls, launch_dir: Path) -> Rendezvous:
        return msgspec.json.decode(rendezvous_path(launch_dir).read_bytes(), type=cls)


def rendezvous_path(launch_dir: Path) -> Path:
    return Path(launch_dir) / "rendezvous.json"


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
