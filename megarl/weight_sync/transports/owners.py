"""Whether the processes are still there whose memory is mapped here: a mapping outlives them, and what is written into it then is lost."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megarl.weight_sync.transports.base import Endpoint, OwnerGone

_HIDDEN = (0, 0)  # nobody else's: whoever cannot look at a file cannot see that it goes


class Owners:
    """Of the endpoints that trainer rank `rank` writes to. The address of each is a file that its process holds open, in /proc."""

    def __init__(self, rank: int):
        self._rank = rank
        self._files: list[tuple[Endpoint, tuple[int, int] | None]] = []

    def note(self, endpoints: Sequence[Endpoint]) -> None:
        """What is mapped now."""
        self._files = [(endpoint, file_at(endpoint.address)) for endpoint in endpoints]

    def check(self) -> None:
        """Raises OwnerGone, also for a process that was gone when it was noted."""
        for endpoint, file in self._files:
            if file is None or file_at(endpoint.address) != file:
                ranks = f"trainer rank {self._rank} to generator rank {endpoint.rank}"
                raise OwnerGone(f"weights from {ranks}: the engine process that owned {endpoint.address} has ended")


def file_at(address: str) -> tuple[int, int] | None:
    """(device, inode) of a file; None where there is none."""
    try:
        found = os.stat(address)
    except PermissionError:
        return _HIDDEN
    except OSError:
        return None
    return found.st_dev, found.st_ino
