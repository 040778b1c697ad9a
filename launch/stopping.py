"""A run that is asked to stop (SIGTERM, as Slurm's preemption sends it): its trainer ranks finish the running step, save, and end.

The request reaches all nodes through the folder where their launchers meet. Engines and their driver are not needed for it, and
are ended when the trainer ranks are done.
"""

from __future__ import annotations

import signal
import time

from megarl.launch.meeting import Meeting
from megarl.launch.processes import ProcessGroup

EXIT_STATUS = 128 + signal.SIGTERM


class Stopped(Exception):
    """The run was stopped, by request, before its end. `problem` is what kept it from stopping cleanly, or empty."""

    def __init__(self, problem: str = ""):
        super().__init__(problem)
        self.problem = problem


class StopOrder:
    """Of one launcher. `deadline_s` is how long its trainer ranks may take."""

    def __init__(self, meeting: Meeting, processes: ProcessGroup, deadline_s: float):
        self._meeting, self._processes, self._deadline_s = meeting, processes, deadline_s
        self._trainers: set[str] | None = None
        self._since: float | None = None
        self._signalled = False  # this launcher itself, not only one of another node

    def arm(self, trainers: set[str]) -> None:
        """From now on there is something to save: the trainer ranks of this node."""
        self._trainers = trainers

    def order(self) -> bool:
        """In a signal handler. False when it is too early, or the second time: then everything is to end at once.

        Slurm signals all nodes: an order that another node has passed on already is the same one, not a second.
        """
        if self._trainers is None or self._signalled:
            return False
        self._signalled = True
        if self._since is None:
            self._begin()
            self._meeting.ask_to_stop()
        return True

    def poll(self) -> None:
        """Follows an order given on another node. Raises Stopped past the deadline."""
        if self._since is None and self._trainers is not None and self._meeting.asked_to_stop():
            self._begin()
        if self._since is not None and time.monotonic() - self._since > self._deadline_s:
            alive = ", ".join(sorted(self._trainers & set(self._processes.running()))) or "trainer ranks of other nodes"
            self._processes.dump_stacks()
            raise Stopped(f"{alive} did not finish and save within checkpoint.on_termination_s={self._deadline_s:g}")

    def among(self) -> set[str] | None:
        """The processes that still matter; None while all do."""
        return self._trainers if self._since is not None else None

    @property
    def given(self) -> bool:
        return self._since is not None

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._processes.ask_to_stop(self._trainers)
