"""Finds ports that were free when a launch chose them, but that others have taken before its own process could."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import psutil

_EVERYWHERE = ("0.0.0.0", "::")


def taken(ports: Mapping[str, int], address: str, own: Mapping[str, int]) -> Iterator[str]:
    """A line for each of `ports` (by purpose) on which a process listens at `address` that is neither in `own` nor a descendant of one."""
    ours = {process.pid for pid in own.values() for process in _family(pid)}
    for connection in psutil.net_connections("tcp"):
        if not connection.laddr:
            continue
        wanted = [what for what, port in ports.items() if port == connection.laddr.port]
        here = connection.status == psutil.CONN_LISTEN and connection.laddr.ip in (address, *_EVERYWHERE)
        if here and wanted and connection.pid not in ours:
            yield f"port {connection.laddr.port}, chosen for {wanted[0]} when it was free, has been taken by {_who(connection.pid)}"


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _who(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        process = psutil.Process(pid)
        return f"process {pid} ({' '.join(process.cmdline())[:100] or process.name()})"
    except psutil.Error:
        return f"process {pid}"
