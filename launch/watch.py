"""Watching a run's processes until they are done, with the display alive, and ending them whatever happens."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

from megarl.launch.processes import ProcessFailed, ProcessGroup

POLL_S = 0.1


def watch(
    processes: ProcessGroup, workers: set[str], poll: Callable[[], None], until: Callable[[], bool] = lambda: True
) -> None:
    """Returns when every one of `workers` has ended well and `until` holds. All other processes (engines) must outlive them.

    Calls `poll` about ten times a second. Raises ProcessFailed as soon as any process dies, after asking the others for
    their stacks, so that a hang can be read in the logs.
    """
    while workers & set(processes.running()) or not until():
        try:
            processes.check(may_finish=workers)
        except ProcessFailed:
            processes.dump_stacks()
            raise
        poll()
        time.sleep(POLL_S)
    processes.check(may_finish=workers)
    poll()


@contextlib.contextmanager
def termination_as_exit() -> Iterator[None]:
    """SIGTERM ends the launcher by an exception, so that its children are ended too."""

    def terminate(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
