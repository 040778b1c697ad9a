"""One process of a run: `python -P -m megarl.launch.worker ROLE RANK LAUNCH_DIR`.

The launch folder has the resolved configuration and the rendezvous of this launch. Everything else
follows from them.
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

from megarl.base.processes import FOR_LAUNCHER, end_with_parent
from megarl.config.errors import ConfigError, RunError
from megarl.launch.processes import LAST_WORDS

CORES = "MEGARL_CORES"  # environment variable: the cores of this process
PARENT = "MEGARL_PARENT"  # environment variable: the process that has started this one


def die_with_parent() -> None:
    """Ends this process when its parent ends, and processes that a library spawns here when this
    process ends.
    """
    end_with_parent(int(os.environ.get(PARENT, os.getppid())))
    os.environ[PARENT] = str(os.getpid())  # read by processes that this one spawns


def end_with_any_thread() -> None:
    """Makes an error in any thread end the process.

    Otherwise processes that wait for this one would wait until a deadline.
    """

    def end(args: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(args)
        if not issubclass(args.exc_type, SystemExit):
            sys.stderr.flush()
            os._exit(1)

    threading.excepthook = end


def keep_to_cores() -> None:
    """Restricts this process to those of CORES that it may use: limits of a job come first."""
    cores = {int(core) for core in os.environ.get(CORES, "").split(",") if core}
    allowed_cores = cores & os.sched_getaffinity(0)
    if allowed_cores:
        os.sched_setaffinity(0, allowed_cores)


def main() -> None:
    die_with_parent()
    keep_to_cores()
    end_with_any_thread()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for number in FOR_LAUNCHER:
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("rank", type=int)
    parser.add_argument("launch_dir", type=Path)
    arguments = parser.parse_args()

    # after the arguments are read, since it imports torch
    from megarl.launch import worker_roles

    try:
        worker_roles.ROLES[arguments.role](arguments.rank, arguments.launch_dir)
    except (ConfigError, RunError, TimeoutError) as error:
        traceback.print_exc()  # for the log; the next line is for the user
        raise SystemExit(f"{LAST_WORDS}{error}") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        traceback.print_exc()
        raise SystemExit(
            f"{LAST_WORDS}the disk is full ({error}); the complete checkpoints in run_dir can "
            "be used"
        ) from None


if __name__ == "__mp_main__":  # in a child that a library has spawned from a worker
    die_with_parent()

if __name__ == "__main__":
    main()
