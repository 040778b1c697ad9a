"""torch.distributed of one trainer rank, from torchrun's environment variables."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist


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
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=timeout_s))
    return device


def shutdown_distributed() -> None:
    """Leaves together: a rank that goes first would look like a lost peer to the others."""
    dist.barrier()
    dist.destroy_process_group()
