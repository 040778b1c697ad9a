"""Watches a run's processes until they are done, keeps the display alive, and ends them whatever happens."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megarl.launch.engines import EngineKeeper
from megarl.launch.meeting import Meeting
from megarl.launch.process_report import process_report
from megarl.launch.processes import ProcessFailed, ProcessGroup
from megarl.launch.stopping import StopOrder

POLL_S = 0.1


@dataclass(frozen=True)
class RunWatch:
    """This node's part of a run. `show` is called about ten times a second."""

    processes: ProcessGroup
    keeper: EngineKeeper
    meeting: Meeting
    order: StopOrder
    show: Callable[[], None]

    def follow(self, workers: set[str], working: list[int]) -> None:
        """Watches until the workers of all nodes in `working` are done: engines serve the last of them.

        When the run is stopped, only trainer ranks matter.
        """
        try:
            watch(self.processes, workers, self._poll, among=self._among)
            self.meeting.finish()
            watch(self.processes, workers, self._poll, until=lambda: self.meeting.all_finished(working), among=self._among)
        except ProcessFailed:
            if not self.meeting.all_finished(working, now=True):
                raise
            # All work was done, and another node saw it first: with its part of an engine it ended the one here.

    def _poll(self) -> None:
        self.show()
        self.meeting.poll()
        self.order.poll()
        if not self.order.given:
            self.keeper.poll()

    def _among(self) -> set[str]:
        trainers = self.order.among()
        return self.processes.names - self.keeper.names if trainers is None else trainers


def watch(
    processes: ProcessGroup,
    workers: set[str],
    poll: Callable[[], None],
    until: Callable[[], bool] = lambda: True,
    among: Callable[[], set[str] | None] = lambda: None,
) -> None:
    """Returns when all `workers` have ended well and `until` holds. All other processes (engines) must outlive them.

    `among` is called every time, and may name the only processes that still matter (None: all). Calls `poll` about ten times a second.
    Raises ProcessFailed as soon as any process dies, after asking the others for their stacks, so that the logs explain a hang.
    """
    while (_of(workers, among()) & set(processes.running())) or not until():
        _check(processes, workers, among)
        poll()
        time.sleep(POLL_S)
    _check(processes, workers, among)
    poll()


def _of(workers: set[str], among: set[str] | None) -> set[str]:
    return workers if among is None else workers & among


def _check(processes: ProcessGroup, workers: set[str], among: Callable[[], set[str] | None]) -> None:
    try:
        processes.check(workers, among())
    except ProcessFailed as failure:
        stacks = processes.dump_stacks()
        named = failure
        try:
            processes.check(workers, among())  # meanwhile it may have turned out that this process does not matter
        except ProcessFailed as another:
            named = another
        if named.waited:
            named.add(process_report(processes.process_ids(), stacks, processes.log_dir.parent))
        raise named from None


@contextlib.contextmanager
def termination_as_exit(first: Callable[[int], bool] = lambda _: False) -> Iterator[None]:
    """Makes SIGTERM and SIGINT (Ctrl-C) end the launcher by an exception, so that its children are ended too, unless `first` says that it
    has handled the signal. If SIGINT is ignored, as in the background of a shell, it stays ignored."""

    def terminate(number: int, _: object) -> None:
        if not first(number):
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if before[signal.SIGINT] is signal.SIG_IGN:
        del before[signal.SIGINT]
    for number in before:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
