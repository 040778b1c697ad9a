"""Additions to torch's process groups: stores to meet in, and an agreement to stop."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
import weakref
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from megarl.messaging.host import family_of, in_url, is_loopback, with_port


def open_store(host: str) -> tuple[dist.Store, str]:
    """A store, where the members of a process group meet at the IP address `host`, and the address
    of the store.

    Everyone who can reach a store can read and change it. So on one host, it is a file that only
    this user can open. Between hosts it is a port, which listens only on the network that the hosts
    share: torch has no keys for it, and would by default listen on every network.
    """
    if is_loopback(host):
        folder = tempfile.mkdtemp(prefix="store-")
        path = os.path.join(folder, "store")
        file_store = dist.FileStore(path)
        weakref.finalize(file_store, shutil.rmtree, folder, ignore_errors=True)
        return file_store, f"file://{in_url(host)}{path}"
    store = listening_store(host, 0)
    return store, f"tcp://{with_port(host, store.port)}"


def connect_store(address: str, timeout_s: float) -> dist.Store:
    """Connects to a store of `open_store`.

    Raises RuntimeError if it cannot be reached before the deadline.
    """
    parts = urlsplit(address)
    timeout = timedelta(seconds=timeout_s)
    if parts.scheme == "file":
        store = dist.FileStore(parts.path)
        store.set_timeout(timeout)
        return store
    assert parts.hostname is not None and parts.port is not None
    return dist.TCPStore(parts.hostname, parts.port, is_master=False, timeout=timeout)


def listening_store(host: str, port: int, timeout_s: float = 300) -> dist.TCPStore:
    """A store in this process that listens only on `host`. `port` 0: a free one."""
    listener = socket.create_server((host, port), family=family_of(host))
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


class StopRequest:
    """The request to stop, as one trainer rank sees it: SIGTERM, which the launcher or Slurm sends
    to all processes of a job.

    Ranks receive the signal at different moments, possibly inside collectives, so the signal only
    sets a flag. Rank 0 announces the stop instead of the next batch (`rollouts`). If every rank
    waits on its own, all ranks agree whether to give up the wait. In either case the running step
    is finished.
    """

    def __init__(self) -> None:
        self.is_made = False
        self.since = 0.0  # time.monotonic() of the request

    def listen(self) -> None:
        """From now on, SIGTERM makes a request instead of ending the process. Main thread only."""
        signal.signal(signal.SIGTERM, lambda *_: self.ask())

    def ask(self) -> None:
        if not self.is_made:
            self.is_made = True
            self.since = time.monotonic()

    def agree(self, given_up: bool, device: torch.device) -> bool:
        """Whether any rank has given up the wait; then all stop. Collective over the default
        process group.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            votes = torch.tensor([given_up], dtype=torch.int32, device=device)
            dist.all_reduce(votes, op=dist.ReduceOp.MAX)
            given_up = bool(votes.item())
        if given_up:
            self.ask()
        return given_up
