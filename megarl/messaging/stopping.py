"""A run that is asked to stop, as its trainer ranks see it: SIGTERM, sent by the launcher or by Slurm to all processes of a job.

Ranks hear of it at different moments, and may be inside collectives then. So the signal only sets a mark. Rank 0 says at the
next batch that there is none (`rollouts`), and where every rank waits on its own, all agree whether the wait was given up.
The step that is running is finished in either case.
"""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist


class StopRequest:
    """The request to stop, as one trainer rank sees it."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """From now on SIGTERM asks, and does not kill. Main thread only."""
        signal.signal(signal.SIGTERM, lambda *_: self.ask())

    def ask(self) -> None:
        self.asked = True

    def agree(self, given_up: bool, device: torch.device) -> bool:
        """Whether any rank has given up what all were waiting for; all stop then. Collective over the default process group."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            votes = torch.tensor([given_up], dtype=torch.int32, device=device)
            dist.all_reduce(votes, op=dist.ReduceOp.MAX)
            given_up = bool(votes.item())
        self.asked |= given_up
        return given_up
