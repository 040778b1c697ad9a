"""How trainer ranks stop on SIGTERM, which the launcher or Slurm sends to all processes of a job.

Ranks receive the signal at different moments, possibly inside collectives, so it only sets a mark. Rank 0 announces the stop in place of
the next batch (`rollouts`); where every rank waits on its own, all agree whether the wait is given up. The running step is finished in
either case.
"""

from __future__ import annotations

import signal
import time

import torch
import torch.distributed as dist


class StopRequest:
    """The request to stop, as one trainer rank sees it."""

    def __init__(self) -> None:
        self.asked = False
        self.since = 0.0  # by time.monotonic

    def listen(self) -> None:
        """Makes SIGTERM a request instead of the end of the process. Main thread only."""
        signal.signal(signal.SIGTERM, lambda *_: self.ask())

    def ask(self) -> None:
        if not self.asked:
            self.asked, self.since = True, time.monotonic()

    def agree(self, given_up: bool, device: torch.device) -> bool:
        """Whether any rank has given up the wait; then all stop. Collective over the default process group."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            votes = torch.tensor([given_up], dtype=torch.int32, device=device)
            dist.all_reduce(votes, op=dist.ReduceOp.MAX)
            given_up = bool(votes.item())
        if given_up:
            self.ask()
        return given_up
