"""Identifies the host of a process, so that others know how to reach its memory."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

import msgspec

_LOOPBACKS = ("127.0.0.1", "::1")
_ANY_PORT = 9


class Host(msgspec.Struct, frozen=True):
    """A host has two identities, because two network namespaces of one machine share memory but are
    two hosts on the network.

    Processes with equal `memory` can map each other's memory. Processes with equal `network` share
    a loopback interface. Ranks are on one host if both are equal. Transports that map memory
    require only equal `memory`, if the configuration asks for them.
    """

    # kernel (boot id), PID namespace (for memory through /proc), /dev/shm (for CUDA IPC's counters)
    memory: str = ""
    network: str = ""  # kernel (boot id) and network namespace
    name: str = ""  # for messages
    cuda: bool = False  # parameters are on a GPU
    # requirements of transports that this host meets; both ends must (Transport.found_here)
    has: tuple[str, ...] = ()


def address_towards(peer: str) -> str:
    """This machine's address as `peer` (host:port, or a URL such as tcp://host:port) and its
    neighbours reach it.
    """
    parts = urlsplit(peer if "//" in peer else f"//{peer}")
    family, *_, destination = socket.getaddrinfo(
        parts.hostname, parts.port or _ANY_PORT, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(destination)  # sends nothing
        return probe.getsockname()[0]


def in_url(address: str) -> str:
    """The address in the form for URLs: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def with_port(address: str, port: int) -> str:
    return f"{in_url(address)}:{port}"


def family_of(address: str) -> socket.AddressFamily:
    """The family of sockets that listen at this IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def loopback() -> str:
    """This host's loopback address: IPv4's, or IPv6's if there is no IPv4."""
    return next(filter(_is_here, _LOOPBACKS), _LOOPBACKS[0])


def _is_here(address: str) -> bool:
    with socket.socket(family_of(address)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True
