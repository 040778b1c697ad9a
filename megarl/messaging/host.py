"""Where a process runs, as far as others must know to reach its memory."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import msgspec

_ANY_PORT = 9


class Host(msgspec.Struct, frozen=True):
    """Two identities, because two network namespaces of one machine share memory, and yet are two hosts on the network.

    `memory` decides who can map whose memory, `network` who shares a loopback interface. Ranks count as on one host when both
    are equal; transports that map memory ask for `memory` alone when they are told to be used.
    """

    memory: str = ""  # kernel (boot id), PID namespace (memory is found through /proc), /dev/shm (CUDA IPC counts its users there)
    network: str = ""  # kernel (boot id) and network namespace
    name: str = ""  # for messages
    cuda: bool = False  # parameters lie on a GPU
    has: tuple[str, ...] = ()  # what transports found there that both ends of one must know (Transport.found_here)


def address_towards(peer: str) -> str:
    """This machine's address on the way to `peer`, host:port or a URL such as tcp://host:port: where `peer` and its neighbours can
    reach us."""
    parts = urlsplit(peer if "//" in peer else f"//{peer}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or _ANY_PORT))  # sends nothing
        return probe.getsockname()[0]
