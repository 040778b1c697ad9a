"""Closes gloo's process groups to strangers once their members have met.

A member of a gloo group listens for the others and recognises them only by a number that can be
guessed; part of what ranks exchange is pickled. It also keeps listening, and dies when connections
exhaust its file descriptors. Gloo's remedy, TLS, is not in torch's wheels. So once all members have
connected, a filter makes the kernel drop packets that would begin another connection. The existing
connections must be this user's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# all users' sockets in this network namespace
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_OPEN_STATES = (
    "01",
    "08",
)  # states in which a process still holds its end: ESTABLISHED, CLOSE_WAIT
# a packet filter (linux/filter.h): BPF_RET | BPF_K, 0 bytes
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_SO_ATTACH_FILTER = 26
_one_at_a_time = threading.Lock()

Listeners = dict[int, int]  # TCP sockets on which this process listens: descriptor by inode


@contextlib.contextmanager
def members_only() -> Iterator[None]:
    """Closes the listeners opened in this block (of gloo groups and their store) to later
    connections.

    Raises RuntimeError if a connection is another user's.
    """
    with new_listeners() as listeners:
        yield
    admit_no_more(listeners)


@contextlib.contextmanager
def new_listeners() -> Iterator[Listeners]:
    """Yields a mapping to which the end of the block adds the listeners that it has opened.

    Only one such block may run at a time.
    """
    listeners: Listeners = {}
    with _one_at_a_time:
        earlier_listeners = _listening()
        yield listeners
        for inode, descriptor in _listening().items():
            if inode not in earlier_listeners:
                listeners[inode] = descriptor


def admit_no_more(listeners: Listeners) -> None:
    """Closes `listeners` to further connections. Raises RuntimeError like `members_only`."""
    for descriptor in listeners.values():
        _admit_nobody(descriptor)
    strangers = _strangers(set(listeners))
    if strangers:
        users = ", ".join(map(str, sorted(strangers)))
        raise RuntimeError(
            f"user {users} of this host has connected to a process group of this run in place of "
            "one of its ranks"
        )


def _listening() -> Listeners:
    """All listeners of this process."""
    listeners = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and _listens(int(name)):
                listeners[os.fstat(int(name)).st_ino] = int(name)
    return listeners


def _listens(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        if duplicate.family == socket.AF_UNIX:
            return False
        return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _admit_nobody(descriptor: int) -> None:
    """Attaches a filter that drops everything new. It does not affect existing connections."""
    program = struct.pack("HL", 1, ctypes.addressof(_DROP_ALL))
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


class _SocketRow(NamedTuple):
    """A row of the kernel's tables of sockets."""

    local: str
    remote: str
    state: str
    user: int
    inode: int


def _strangers(listeners: set[int]) -> set[int]:
    """Other users of this host who are connected to one of these sockets.

    Connections from other hosts cannot be checked.
    """
    rows: list[_SocketRow] = []
    for table in _TABLES:
        if not table.exists():
            continue
        for line in table.read_text(encoding="utf-8").splitlines()[1:]:
            words = line.split()
            row = _SocketRow(
                local=words[1],
                remote=words[2],
                state=words[3],
                user=int(words[7]),
                inode=int(words[9]),
            )
            rows.append(row)
    addresses = {row.local for row in rows if row.inode in listeners}
    far_ends = {(row.remote, row.local) for row in rows if row.local in addresses}
    return {
        row.user
        for row in rows
        if row.user != os.getuid()
        and row.state in _OPEN_STATES
        and (row.local, row.remote) in far_ends
    }
