"""Checks that the processes whose memory is mapped here still run: a mapping outlives its process, and writes to it are then lost."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megarl.weight_sync.transports.base import Endpoint, OwnerGone

_HIDDEN = (0, 0)  # stands for a file that may not be looked at: this process could not see it go


class Owners:
    """The owners of the endpoints that trainer rank `rank` writes to. Each address is a file in /proc that its process holds open."""

    def __init__(self, rank: int):
        self._rank = rank
        self._files: list[tuple[Endpoint, tuple[int, int] | None]] = []

    def note(self, endpoints: Sequence[Endpoint]) -> None:
        """Notes the endpoints that are mapped now."""
        self._files = [(endpoint, file_at(endpoint.address)) for endpoint in endpoints]

    def check(self) -> None:
        """Raises OwnerGone if a process has ended, even before `note`."""
        for endpoint, file in self._files:
            if file is None or file_at(endpoint.address) != file:
                ranks = f"trainer rank {self._rank} to generator rank {endpoint.rank}"
                raise OwnerGone(f"weights from {ranks}: the engine process that owned {endpoint.address} has ended")


def file_at(address: str) -> tuple[int, int] | None:
    """(device, inode) of a file; None if it does not exist."""
    try:
        found = os.stat(address)
    except PermissionError:
        return _HIDDEN
    except OSError:
        return None
    return found.st_dev, found.st_ino
