"""`megarl engines add`: engines that join a running run, started and watched by launchers of their own, one on each node of their job.

They start as the run's own engines do. The head announces them to the run's generator, which gives them the weights when they are up. The
launchers stay as long as the engines: until these have left, the run has ended, or SIGTERM asks for an orderly end, in which the engines
give back the requests that they have not finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from megarl.config.errors import ConfigError
from megarl.launch.binding import gpus
from megarl.launch.launcher import addresses, engine_keeper, failing_together, report_of, start_engines
from megarl.launch.meeting import Meeting, NodeReport, read_report
from megarl.launch.node import Node, interface_with, this_node
from megarl.launch.placement import EngineFleet, NodePlan, place, slots_per_node
from megarl.launch.preflight import disagreements
from megarl.launch.processes import ProcessFailed, ProcessGroup, raise_limits
from megarl.launch.running import RunningRun, accepted, find_run
from megarl.launch.scratch import scratch_folder
from megarl.launch.start import NodePart
from megarl.launch.watch import termination_as_exit, watch
from megarl.messaging.link import Peer
from megarl.messaging.messages import EngineState, FleetAnswer, FleetCall
from megarl.messaging.rendezvous import POLICY
from megarl.plan.resolve import RunPlan

BEAT_S = 2.0


def add_engines(run_dir: str, count: int | None, overrides: Sequence[str] = ()) -> None:
    """Runs `count` engines (None: as many as this job's nodes hold) until they are not needed any more.

    Raises ConfigError if they cannot join, RuntimeError if they fail, or cannot leave in order.
    """
    raise_limits()
    node, run = this_node(), find_run(run_dir)
    if node.count == 1:
        node = dataclasses.replace(node, launch=f"{node.launch}.{os.getpid()}")
    plan = run.plan(overrides)
    tp, hosts = plan.generator_topology.tp, 1 if run.on_one_host else 1 + node.count
    slots = slots_per_node((count or node.count) * tp, node.count, len(gpus()), plan.config.launch.ranks_per_node)
    placed = place(0, [EngineFleet(count or max(1, node.count * slots // tp), tp)], node.count, slots)
    asked: list[int] = []  # signals

    def ask(number: int) -> bool:
        asked.append(number)
        return len(asked) == 1

    with (
        termination_as_exit(first=ask),
        _meeting(Path(run_dir) / ".launch/engines" / node.launch, node, plan) as meeting,
        failing_together(meeting, node),
        scratch_folder() as scratch,
        ProcessGroup(Path(run_dir) / "logs") as processes,
    ):
        report = report_of(plan, node, placed[node.rank], hosts=hosts)
        meeting.announce(report)
        reports = meeting.reports()
        with _membership(run, plan, placed, reports, meeting) if node.is_head else contextlib.nullcontext() as member:
            where = meeting.await_rendezvous()
            here = NodePart(plan, placed[node.rank], report, where, meeting.folder, interface_with(report.address), scratch, hosts == 1)
            keeper = engine_keeper(processes, plan, run.folder, training=True)
            start_engines(processes, keeper, here)

            def poll() -> None:
                meeting.poll()
                keeper.poll()
                if asked and not meeting.asked_to_stop():
                    meeting.ask_to_stop()
                if member is not None and member.is_over(leaving=meeting.asked_to_stop()):
                    meeting.finish()

            try:
                watch(processes, set(), poll, lambda: meeting.all_finished([0]), lambda: processes.names - keeper.names)
            except ProcessFailed:
                if not meeting.all_finished([0], now=True):
                    raise


@contextlib.contextmanager
def _meeting(folder: Path, node: Node, plan: RunPlan) -> Iterator[Meeting]:
    try:
        yield Meeting(folder, node, plan.config.timeouts.rendezvous_s, plan.config.timeouts.silence_s)
    finally:
        if node.count == 1:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _membership(
    run: RunningRun, plan: RunPlan, placed: list[NodePlan], reports: list[NodeReport], meeting: Meeting
) -> Iterator[Membership]:
    """On the head: announces the engines to the run, and then to the other nodes where and what they are. Raises ConfigError."""
    first = read_report(run.folder, 0)
    of_run = replace(first, host=f"{first.host}, of the run", gpus=reports[0].gpus, infiniband={}, problems=[])
    if problems := disagreements([of_run, *reports]):
        raise ConfigError(problems)
    peer, found = run.connect(), addresses(placed, reports)
    try:
        peer.send(FleetCall("join", urls=[engine.url for engine in found[POLICY]]))
        awaited = f"the generator of {run.run_dir} to take in engines"
        answer = peer.receive_unless(lambda: run.is_over, FleetAnswer, plan.config.generator.startup_timeout_s, awaited)
        if answer is None:
            raise ConfigError(f"{run.run_dir}: the run has ended")
        numbers = [engine.number for engine in accepted(answer[1]).engines]
        member = Membership(run, peer, numbers, plan.config.timeouts.silence_s, plan.config.checkpoint.on_termination_s)
        print(f"{_named(numbers)} of {run.run_dir} start; SIGTERM or Ctrl-C makes them leave in order", flush=True)
        meeting.publish(replace(run.rendezvous, engines=found, first_engine=numbers[0]))
        try:
            yield member
        except BaseException:
            peer.send(FleetCall("leave", engines=numbers, ends=True))  # nobody waits for the answer: the engines end now
            raise
    finally:
        peer.close()


@dataclass
class Membership:
    """The head's view of its engines in the run."""

    run: RunningRun
    peer: Peer
    numbers: list[int]
    silence_s: float
    leave_s: float  # how long leaving may take
    _beat_at: float = 0.0
    _heard: float = field(default_factory=time.monotonic)
    _left_at: float | None = None  # when they were told to leave
    _told: dict[int, str] = field(default_factory=dict)  # what was printed of each engine last

    def is_over(self, leaving: bool) -> bool:
        """Called often; says whether the engines are not needed any more. `leaving`: they are to leave.

        Raises RuntimeError if the generator falls silent, or they cannot leave in order."""
        now = time.monotonic()
        if leaving and self._left_at is None:
            self._left_at = now
            self.peer.send(FleetCall("leave", engines=self.numbers, ends=True))
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            if self.run.is_over:
                print(f"the run in {self.run.run_dir} has ended", flush=True)
                return True
            self.peer.send(FleetCall("here", engines=self.numbers))
        for answer in self.peer.drain(FleetAnswer):
            self._heard = now
            if answer.do == "leave" and answer.error:
                raise RuntimeError(f"{_named(self.numbers)} end, but cannot leave in order: {answer.error}")
            for engine in answer.engines:
                self._tell(engine)
            if all(engine.gone for engine in answer.engines):
                return True
        if self._left_at is not None and now - self._left_at > self.leave_s:
            raise RuntimeError(f"{_named(self.numbers)} have not left within checkpoint.on_termination_s={self.leave_s:g}")
        silent_s = now - self._heard
        if silent_s > self.silence_s and (silent_s > self.leave_s or not self.run.is_ending):
            raise RuntimeError(f"the generator of {self.run.run_dir} has given no sign of life for {self.silence_s:.0f} s")
        return False

    def _tell(self, engine: EngineState) -> None:
        text = engine.text if engine.gone else "serves" if engine.serving else ""
        if text and self._told.get(engine.number) != text:
            self._told[engine.number] = text
            print(f"engine {engine.number} {text}", flush=True)


def _named(numbers: Sequence[int]) -> str:
    return f"engine{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
