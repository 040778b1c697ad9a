"""Sets up torch.distributed for one trainer rank, from torchrun's environment variables.

MegaRL adds one of its own: MEGARL_TRAINER_STORE is a file through which ranks on a single host meet, instead of MASTER_ADDR:MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import datetime
import os

import torch
import torch.distributed as dist

from megarl.messaging.members import members_only
from megarl.messaging.stores import listening_store


def init_distributed(timeout_s: float) -> torch.device:
    """Joins the trainer's process group (NCCL with CUDA, gloo without) and returns this rank's device.

    `timeout_s` bounds the wait for the other ranks, and every later collective. Raises on expiry.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the cores
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with groups_closed():
        store, timeout = _store(rank, world_size, timeout_s), datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return device


def groups_closed() -> contextlib.AbstractContextManager[None]:
    """For a block that makes process groups: `members_only`, unless some may use NCCL. That connects later, and keeps strangers out by a
    number that cannot be guessed."""
    return contextlib.nullcontext() if torch.cuda.is_available() else members_only()


def _store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Opens the store, closed to others as far as possible: see messaging.stores."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if path := os.environ.get("MEGARL_TRAINER_STORE"):
        store: dist.Store = dist.FileStore(path, world_size)
        store.set_timeout(timeout)
        return store
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        return listening_store(host, port, timeout_s)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)


def shutdown_distributed() -> None:
    """Makes all ranks leave together: one that leaves early would look like a lost peer to the others."""
    dist.barrier()
    dist.destroy_process_group()
