"""One process of a run: `python -P -m megarl.launch.worker ROLE RANK LAUNCH_DIR`.

The launch folder holds the resolved configuration and the rendezvous of this launch; everything else follows from them.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from megarl.base.processes import end_with_parent
from megarl.config.errors import ConfigError, RunError
from megarl.launch.processes import LAST_WORDS

CORES = "MEGARL_CORES"  # environment variable: the cores this process keeps to
PARENT = "MEGARL_PARENT"  # environment variable: the process that has started this one


def die_with_parent() -> None:
    """Ends this process when its parent ends, and the processes that a library spawns here when this one ends."""
    end_with_parent(int(os.environ.get(PARENT, os.getppid())))
    os.environ[PARENT] = str(os.getpid())  # for the processes that this one spawns


def end_with_any_thread() -> None:
    """Makes a thread that dies of an error end the process: otherwise whoever waits for it would wait until a deadline."""

    def end(args: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(args)
        if not issubclass(args.exc_type, SystemExit):
            sys.stderr.flush()
            os._exit(1)

    threading.excepthook = end


def keep_to_cores() -> None:
    """Restricts this process to those of CORES that it may use; a job's own limits come first."""
    wanted = {int(core) for core in os.environ.get(CORES, "").split(",") if core}
    if allowed := wanted & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)


def main() -> None:
    die_with_parent()
    keep_to_cores()
    end_with_any_thread()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["trainer", "generator", "evaluator", "sft", "reward_model", "evaluate", "export", "warm"])
    parser.add_argument("rank", type=int)
    parser.add_argument("launch_dir", type=Path)
    arguments = parser.parse_args()

    from megarl.launch import roles  # after the arguments: it imports torch

    try:
        roles.ROLES[arguments.role](arguments.rank, arguments.launch_dir)
    except (ConfigError, RunError, TimeoutError) as error:
        traceback.print_exc()  # for the log; the next line is for people
        raise SystemExit(f"{LAST_WORDS}{error}") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        traceback.print_exc()
        raise SystemExit(f"{LAST_WORDS}the disk is full ({error}); the complete checkpoints in run_dir can be used") from None


if __name__ == "__mp_main__":  # a child that a library spawned from a worker
    die_with_parent()

if __name__ == "__main__":
    main()
