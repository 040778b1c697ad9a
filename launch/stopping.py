"""Stops a run on request (by Ctrl-C, or by SIGTERM as from Slurm's preemption): its trainer ranks finish the running step, save, and end.

The request reaches all nodes through the folder where their launchers meet. Engines and their driver are not needed for it, and are ended
when the trainer ranks are done.
"""

from __future__ import annotations

import signal
import time

from megarl.launch.meeting import Meeting
from megarl.launch.processes import ProcessGroup

NAMES: dict[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class Stopped(Exception):
    """The run was stopped on request (by signal `number`) before its end. `problem` says what kept it from stopping cleanly."""

    def __init__(self, problem: str = "", number: int = signal.SIGTERM):
        super().__init__(problem)
        self.problem, self.by, self.exit_status = problem, NAMES[number], 128 + number


class StopOrder:
    """The order to stop, as one launcher follows it. `deadline_s` is how long its trainer ranks may take."""

    def __init__(self, meeting: Meeting, processes: ProcessGroup, deadline_s: float):
        self._meeting, self._processes, self._deadline_s = meeting, processes, deadline_s
        self._trainers: set[str] | None = None
        self._since: float | None = None
        self._signalled = False  # whether this launcher itself got a signal, not only one on another node
        self._told = False
        self.signal: int = signal.SIGTERM  # the signal that gave the order; this one if another node did

    def arm(self, trainers: set[str]) -> None:
        """Called once there is something to save: `trainers` are the trainer ranks of this node."""
        self._trainers = trainers

    def order(self, number: int = signal.SIGTERM) -> bool:
        """Called by the handler of signal `number`. Returns False if it comes too early, or a second time: then all processes must end at
        once.

        Slurm signals all nodes: an order that another node has already passed on is the same one, not a second.
        """
        if self._trainers is None or self._signalled:
            return False
        self._signalled, self.signal = True, number
        if self._since is None:
            self._begin(self._trainers)
            self._meeting.ask_to_stop()
        return True

    def poll(self) -> None:
        """Follows an order given on another node. Raises Stopped past the deadline."""
        if self._trainers is None:
            return
        if self._since is None and self._meeting.asked_to_stop():
            self._begin(self._trainers)
        if self._since is not None and not self._told:
            self._told = True  # printed here, because a signal handler may interrupt another print
            within = f"the running step is finished and saved, within {self._deadline_s:g} s (checkpoint.on_termination_s)"
            print(f"{NAMES[self.signal]}: {within}. Once more ends everything at once.", flush=True)
        if self._since is not None and time.monotonic() - self._since > self._deadline_s:
            alive = ", ".join(sorted(self._trainers & set(self._processes.running()))) or "trainer ranks of other nodes"
            self._processes.dump_stacks()
            raise Stopped(f"{alive} did not finish and save within checkpoint.on_termination_s={self._deadline_s:g}", self.signal)

    def among(self) -> set[str] | None:
        """The names of the processes that still matter; None while all do."""
        return self._trainers if self._since is not None else None

    @property
    def given(self) -> bool:
        return self._since is not None

    def _begin(self, trainers: set[str]) -> None:
        self._since = time.monotonic()
        self._processes.ask_to_stop(trainers)
