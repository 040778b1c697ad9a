"""Watches a run's processes until they are done, keeps the display alive, and ends them whatever
happens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megarl.launch.engines import EngineKeeper
from megarl.launch.meeting import Meeting
from megarl.launch.processes import ProcessFailed, ProcessGroup, process_report

NAMES: dict[int, str] = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C",
    signal.SIGHUP: "SIGHUP",  # the terminal has gone, as when ssh ends
    signal.SIGUSR1: "SIGUSR1",  # Slurm's --signal, a while before the time limit
    signal.SIGUSR2: "SIGUSR2",
}
# only these, sent a second time, end everything at once
INSISTING = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """The run was stopped on request (by signal `number`) before its end.

    `problem`: the reason why it could not stop cleanly.
    """

    def __init__(self, problem: str = "", number: int = signal.SIGTERM):
        super().__init__(problem)
        self.problem = problem
        self.by = NAMES[number]
        self.exit_status = 128 + number

    def __str__(self) -> str:
        problem = f", but not cleanly: {self.problem}" if self.problem else ""
        return f"stopped by {self.by}{problem}"


class StopOrder:
    """A launcher's handling of an order to stop (a signal in NAMES, such as SIGTERM from Slurm's
    preemption): trainer ranks finish the running step, save, and end within `deadline_s`.

    The order reaches all nodes through the folder where their launchers meet. Engines and their
    driver are not needed, and are killed when the trainer ranks are done.
    """

    def __init__(self, meeting: Meeting, processes: ProcessGroup, deadline_s: float):
        self._meeting = meeting
        self._processes = processes
        self._deadline_s = deadline_s
        self._trainers: set[str] | None = None
        self._since: float | None = None
        # whether this launcher itself got a signal, and not only another node
        self._signalled = False
        self._announced = False
        # the signal that gave the order; SIGTERM if another node gave it
        self.signal: int = signal.SIGTERM

    def arm(self, trainers: set[str]) -> None:
        """Called once there is something to save. `trainers`: the trainer ranks of this node."""
        self._trainers = trainers

    def order(self, number: int = signal.SIGTERM) -> bool:
        """Called by the handler of signal `number`.

        Returns False if the signal comes too early, or is a second one of INSISTING. Then all
        processes must end at once.

        Slurm signals all nodes. An order that another node has already passed on is therefore the
        same order, not a second one. So is the SIGTERM that follows an early warning (SIGUSR1).
        """
        if self._trainers is None or (self._signalled and number in INSISTING):
            return False
        self._signalled = self._signalled or number in INSISTING
        if self._since is None:
            self.signal = number
            self._begin(self._trainers)
            self._meeting.ask_to_stop()
        return True

    def poll(self) -> None:
        """Follows an order given on another node. Raises Stopped past the deadline."""
        if self._trainers is None:
            return
        if self._since is None and self._meeting.asked_to_stop():
            self._begin(self._trainers)
        if self._since is not None and not self._announced:
            self._announced = (
                True  # printed here, since a signal handler may interrupt another print
            )
            within = (
                f"the running step is finished and saved, within {self._deadline_s:g} s "
                "(checkpoint.on_termination_s)"
            )
            print(
                f"{NAMES[self.signal]}: {within}. A second one ends everything at once.", flush=True
            )
        if self._since is not None and time.monotonic() - self._since > self._deadline_s:
            alive = (
                ", ".join(sorted(self._trainers & set(self._processes.running())))
                or "trainer ranks of other nodes"
            )
            self._processes.dump_stacks()
            raise Stopped(
                f"{alive} did not finish and save within "
                f"checkpoint.on_termination_s={self._deadline_s:g}",
                self.signal,
            )

    def among(self) -> set[str] | None:
        """The names of the processes that still matter; None while all of them do."""
        if self._since is not None:
            return self._trainers
        return None

    @property
    def is_given(self) -> bool:
        return self._since is not None

    def _begin(self, trainers: set[str]) -> None:
        self._since = time.monotonic()
        self._processes.ask_to_stop(trainers)


POLL_S = 0.1


@dataclass(frozen=True)
class RunWatch:
    """Watches this node's part of a run. `show` is called about ten times a second."""

    processes: ProcessGroup
    keeper: EngineKeeper
    meeting: Meeting
    order: StopOrder
    show: Callable[[], None]

    def follow(self, workers: set[str], working: list[int]) -> None:
        """Watches until the workers of all nodes in `working` are done, since engines serve until
        the last one is.

        When the run is stopped, only trainer ranks matter.
        """
        try:
            watch(self.processes, workers, self._poll, among=self._among)
            self.meeting.finish()
            watch(
                self.processes,
                workers,
                self._poll,
                until=lambda: self.meeting.all_finished(working),
                among=self._among,
            )
        except ProcessFailed:
            if not self.meeting.all_finished(working, now=True):
                raise
            # All work was done, and another node noticed first. With its part of an engine, it has
            # ended the part here.

    def _poll(self) -> None:
        self.show()
        self.meeting.poll()
        self.order.poll()
        if not self.order.is_given:
            self.keeper.poll()

    def _among(self) -> set[str]:
        trainers = self.order.among()
        if trainers is None:
            return self.processes.names - self.keeper.names
        return trainers


def watch(
    processes: ProcessGroup,
    workers: set[str],
    poll: Callable[[], None],
    until: Callable[[], bool] = lambda: True,
    among: Callable[[], set[str] | None] = lambda: None,
) -> None:
    """Returns when all `workers` have ended well and `until()` is true.

    All other processes (engines) must outlive them.

    `among` is called each time, and returns the names of the only processes that still matter
    (None: all). Calls `poll` about ten times a second. Raises ProcessFailed as soon as any process
    dies, after asking the others for their stacks, so that the logs explain a hang.
    """
    while True:
        watched = among()
        working = workers if watched is None else workers & watched
        if working.isdisjoint(processes.running()) and until():
            break
        _check(processes, workers, among)
        poll()
        time.sleep(POLL_S)
    _check(processes, workers, among)
    poll()


def _check(
    processes: ProcessGroup, workers: set[str], among: Callable[[], set[str] | None]
) -> None:
    try:
        processes.check(workers, among())
    except ProcessFailed as failure:
        stacks = processes.dump_stacks()
        named = failure
        try:
            # by now it may be known that this process does not matter
            processes.check(workers, among())
        except ProcessFailed as another:
            named = another
        if named.waited:
            named.add(process_report(processes.process_ids(), stacks, processes.log_dir.parent))
        raise named from None


def leave_terminal() -> None:
    """Sends what is still printed to a terminal to nowhere: printing to one that has gone is an
    error, which would end the run.
    """
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), descriptor)


@contextlib.contextmanager
def termination_as_exit(first: Callable[[int], bool] = lambda _: False) -> Iterator[None]:
    """Makes the signals in NAMES end the launcher by an exception, so that its children are ended
    too, unless `first` returns that it has handled the signal. An ignored signal stays ignored:
    SIGINT in the background of a shell, SIGHUP under nohup. SIGTERM never is.

    Outside a program's main thread Python handles no signals, and this does nothing:
    megarl.Run.stop stops a run there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, _: object) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if not first(number):
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    handlers = {number: signal.getsignal(number) for number in NAMES}
    before = {
        number: handler
        for number, handler in handlers.items()
        if handler is not signal.SIG_IGN or number == signal.SIGTERM
    }
    for number in before:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
