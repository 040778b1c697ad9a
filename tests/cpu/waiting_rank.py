"""A trainer rank of test_process_report.py: waiting_rank.py RANK WORLD_SIZE STORE RUN_DIR HOW, over
gloo, with a status line.

All ranks meet twice. Before the second time rank 2 stops (HOW=stopped), or is busy with other work
(HOW=busy). Rank 0 ends when it loses rank 1, but slowly.
"""

import atexit
import datetime
import faulthandler
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from megarl.observe.status import StatusBoard
from megarl.trainer.distributed import naming_peers


def busy() -> None:
    time.sleep(60)


def linger() -> None:
    time.sleep(20)


def main(rank: int, size: int, store: str, run_dir: str, mode: str) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    status = StatusBoard(run_dir, f"trainer.{rank}")
    deadline = datetime.timedelta(seconds=3)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=deadline
    )
    group = dist.new_group(range(size), timeout=deadline, group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    dist.barrier()
    status.set("step 7")
    print("ready", flush=True)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP) if mode == "stopped" else busy()
    if rank == 0:
        atexit.register(linger)
        time.sleep(1)  # so that the other rank's deadline comes first
    dist.all_reduce(torch.ones(4), group=group)


if __name__ == "__main__":
    with naming_peers("trainer", int(sys.argv[1])):
        main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
