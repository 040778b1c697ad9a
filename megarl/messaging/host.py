"""Where a process runs: what others must know to reach its memory."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import msgspec

_ANY_PORT = 9


class Host(msgspec.Struct, frozen=True):
    """A host has two identities, since two network namespaces of one machine share memory but are two hosts on the network.

    Processes with equal `memory` can map each other's memory; those with equal `network` share a loopback interface. Ranks are on one host
    if both are equal; transports that map memory only require equal `memory` when the config asks for them.
    """

    memory: str = ""  # kernel (boot id), PID namespace (for memory through /proc), /dev/shm (for CUDA IPC's counters)
    network: str = ""  # kernel (boot id) and network namespace
    name: str = ""  # for messages
    cuda: bool = False  # parameters lie on a GPU
    has: tuple[str, ...] = ()  # what transports found here that both of their ends must have (Transport.found_here)


def address_towards(peer: str) -> str:
    """This machine's address as `peer` (host:port, or a URL such as tcp://host:port) and its neighbours reach it."""
    parts = urlsplit(peer if "//" in peer else f"//{peer}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or _ANY_PORT))  # sends nothing
        return probe.getsockname()[0]
