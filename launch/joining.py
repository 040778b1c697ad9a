"""`megarl engines add`: engines that join a running run.

Launchers of their own, one on each node of their job, start and watch them.

The engines start like the run's own. The head announces them to the run's generator, which gives
them the weights when they are up. The launchers stay until the engines have left, the run has
ended, or SIGTERM asks for an orderly end. In an orderly end, engines return their unfinished
requests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.launch.gpus import gpus
from megarl.launch.launcher import (
    addresses,
    disagreements,
    engine_keeper,
    failing_together,
    kernels_folder,
    report_of,
    start_engines,
)
from megarl.launch.meeting import Meeting, NodeReport, read_report, scratch_folder
from megarl.launch.nodes import (
    Node,
    NodePlan,
    interface_with,
    place,
    slots_per_node,
    this_node,
)
from megarl.launch.processes import ProcessFailed, ProcessGroup, raise_limits
from megarl.launch.running import RunningRun, find_run
from megarl.launch.start import NodePart
from megarl.launch.watch import INSISTING, termination_as_exit, watch
from megarl.messaging.link import Peer
from megarl.messaging.messages import EngineRow, FleetAnswer, FleetCall
from megarl.messaging.rendezvous import ROLLOUTS
from megarl.plan.resolve import RunPlan, checked_before, resolve

ANSWER_S = 60.0  # in addition to the time for the request itself
JOINING_SETTINGS = (  # settings that joining engines may have; none affects weights or samples
    "launch.interface",
    "launch.ranks_per_node",
    "generator.kv_cache_tokens",
    "generator.mem_fraction",
    "generator.health_s",
    "generator.max_restarts",
    "generator.startup_timeout_s",
)
# those of them that a group may set
GROUP_SETTINGS = ("generator.kv_cache_tokens", "generator.mem_fraction")


def joining_plan(run: RunningRun, overrides: Sequence[str], group: str) -> RunPlan:
    """The run's plan with only the engines of `group`, and with the settings of the joining
    engines. Raises ConfigError for settings that must be the run's, and for a group that the
    run does not have.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key not in JOINING_SETTINGS:
            raise ConfigError(
                f"{override}: {key} is the run's own; engines that join may differ in "
                f"{', '.join(JOINING_SETTINGS)}"
            )
    shapes = load_config(run.folder / "config.yaml").generator.shapes
    if group not in shapes:
        option = f"--group {group}: " if group else ""
        if not any(shapes):
            raise ConfigError(f"{option}the run has no groups")
        raise ConfigError(f"{option}must be --group NAME of {', '.join(shapes)}")
    overrides = [_group_override(override, group) for override in overrides]
    config = load_config(run.folder / "config.yaml", [*overrides, f"run_dir={run.run_dir}"])
    # raises if the overrides do not fit; the run's own launcher has made the checks of megarl
    # train
    resolve(config)
    return checked_before(config, "train").group_alone(group)


def _group_override(override: str, group: str) -> str:
    """The override, with the group's own key if there is one."""
    key, _, value = override.partition("=")
    if group and key in GROUP_SETTINGS:
        return f"generator.groups.{group}.{key.rpartition('.')[2]}={value}"
    return override


def ask(run: RunningRun, call: FleetCall) -> FleetAnswer:
    """The generator's answer.

    Raises ConfigError if the call is refused or the run has ended, TimeoutError.
    """
    peer = connect(run)
    timeouts = load_config(run.folder / "config.yaml").timeouts
    try:
        peer.send(call)
        awaited = f"the generator of {run.run_dir} to answer"
        envelope = peer.receive_unless(
            lambda: run.is_over, FleetAnswer, 2 * timeouts.weights_s + ANSWER_S, awaited
        )
    finally:
        peer.close()
    if envelope is None:
        raise ConfigError(f"{run.run_dir}: the run has ended")
    return accepted(envelope[1])


def connect(run: RunningRun) -> Peer:
    return Peer(
        f"engines.{secrets.token_hex(4)}",
        run.rendezvous.key,
        run.rendezvous.hub_address(ROLLOUTS),
    )


def accepted(answer: FleetAnswer) -> FleetAnswer:
    """The answer. Raises ConfigError if the call is refused."""
    if answer.error:
        raise ConfigError(answer.error)
    return answer


BEAT_S = 2.0


def add_engines(
    run_dir: str, count: int | None, overrides: Sequence[str] = (), group: str = ""
) -> None:
    """Runs `count` engines of `group` (None: as many as this job's nodes have room for), until they
    are no longer needed.

    Raises ConfigError if they cannot join, RuntimeError if they fail, or cannot leave in order.
    """
    raise_limits()
    node = this_node()
    run = find_run(run_dir)
    if node.count == 1:
        node = dataclasses.replace(node, launch=f"{node.launch}.{os.getpid()}")
    plan = joining_plan(run, overrides, group)
    tp = plan.config.generator.tp
    hosts = 1 if run.on_one_host else 1 + node.count
    slots = slots_per_node(
        (count or node.count) * tp, node.count, len(gpus()), plan.config.launch.ranks_per_node
    )
    plan = plan.with_engines([count or max(1, node.count * slots // tp)])
    placed = place(0, plan.groups, node.count, slots)
    signals: list[int] = []  # those that have asked for an end

    def on_signal(number: int) -> bool:
        insists = number in INSISTING and not set(INSISTING).isdisjoint(signals)
        signals.append(number)
        return not insists

    with (
        termination_as_exit(first=on_signal),
        _meeting(Path(run_dir) / ".launch/engines" / node.launch, node, plan) as meeting,
        failing_together(meeting, node),
        scratch_folder() as scratch,
        ProcessGroup(Path(run_dir) / "logs") as processes,
    ):
        report = report_of(plan, node, placed[node.rank], hosts=hosts)
        meeting.announce(report)
        reports = meeting.reports()
        with (
            _membership(run, plan, group, placed, reports, meeting)
            if node.is_head
            else contextlib.nullcontext() as member
        ):
            rendezvous = meeting.await_rendezvous()
            node_part = NodePart(
                plan=plan,
                placed=placed[node.rank],
                report=report,
                rendezvous=rendezvous,
                folder=meeting.folder,
                interface=interface_with(report.address),
                scratch=scratch,
                alone=hosts == 1,
                compiled=kernels_folder(plan, scratch),
            )
            keeper = engine_keeper(processes, plan, run.folder, training=True)
            start_engines(processes, keeper, node_part)

            def poll() -> None:
                meeting.poll()
                keeper.poll()
                if signals and not meeting.asked_to_stop():
                    meeting.ask_to_stop()
                if member is not None and member.is_over(leaving=meeting.asked_to_stop()):
                    meeting.finish()

            try:
                watch(
                    processes,
                    workers=set(),
                    poll=poll,
                    until=lambda: meeting.all_finished([0]),
                    among=lambda: processes.names - keeper.names,
                )
            except ProcessFailed:
                if not meeting.all_finished([0], now=True):
                    raise


@contextlib.contextmanager
def _meeting(folder: Path, node: Node, plan: RunPlan) -> Iterator[Meeting]:
    try:
        yield Meeting(
            folder, node, plan.config.timeouts.rendezvous_s, plan.config.timeouts.silence_s
        )
    finally:
        if node.count == 1:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _membership(
    run: RunningRun,
    plan: RunPlan,
    group: str,
    placed: list[NodePlan],
    reports: list[NodeReport],
    meeting: Meeting,
) -> Iterator[Membership]:
    """On the head: announces the engines to the run, then tells the other nodes where each runs.

    Raises ConfigError.
    """
    first = read_report(run.folder, 0)
    run_report = replace(
        first, host=f"{first.host}, of the run", gpus=reports[0].gpus, infiniband={}, problems=[]
    )
    problems = disagreements([run_report, *reports])
    if problems:
        raise ConfigError(problems)
    peer = connect(run)
    engines = addresses(placed, reports)
    try:
        peer.send(
            FleetCall("join", urls=[engine.url for engine in engines[ROLLOUTS.prefix]], group=group)
        )
        awaited = f"the generator of {run.run_dir} to take in engines"
        answer = peer.receive_unless(
            lambda: run.is_over, FleetAnswer, plan.config.generator.startup_timeout_s, awaited
        )
        if answer is None:
            raise ConfigError(f"{run.run_dir}: the run has ended")
        numbers = [engine.number for engine in accepted(answer[1]).engines]
        member = Membership(
            run=run,
            peer=peer,
            numbers=numbers,
            silence_s=plan.config.timeouts.silence_s,
            leave_s=plan.config.checkpoint.on_termination_s,
        )
        print(
            f"{_engine_names(numbers)} of {run.run_dir} start; SIGTERM or Ctrl-C makes them leave "
            "in order",
            flush=True,
        )
        meeting.publish(replace(run.rendezvous, engines=engines, first_engine=numbers[0]))
        try:
            yield member
        except BaseException:
            # without waiting for the answer: the engines end now
            peer.send(FleetCall("leave", engines=numbers, ends=True))
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
    leave_s: float  # time limit for leaving
    _beat_at: float = 0.0
    _answered_at: float = field(default_factory=time.monotonic)
    _left_at: float | None = None  # time at which they were told to leave
    _printed: dict[int, str] = field(
        default_factory=dict
    )  # engine -> the last line printed about it

    def is_over(self, leaving: bool) -> bool:
        """Called often.

        Returns whether the engines are no longer needed. `leaving`: makes them leave.

        Raises RuntimeError if the generator falls silent, or if they cannot leave in order.
        """
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
            self._answered_at = now
            if answer.do == "leave" and answer.error:
                raise RuntimeError(
                    f"{_engine_names(self.numbers)} end, but cannot leave in order: {answer.error}"
                )
            for engine in answer.engines:
                self._tell(engine)
            if all(engine.gone for engine in answer.engines):
                return True
        if self._left_at is not None and now - self._left_at > self.leave_s:
            raise RuntimeError(
                f"{_engine_names(self.numbers)} have not left within "
                f"checkpoint.on_termination_s={self.leave_s:g}"
            )
        silent_s = now - self._answered_at
        if silent_s > self.silence_s and (silent_s > self.leave_s or not self.run.is_ending):
            raise RuntimeError(
                f"the generator of {self.run.run_dir} has given no sign of life for "
                f"{self.silence_s:.0f} s"
            )
        return False

    def _tell(self, engine: EngineRow) -> None:
        text = ""
        if engine.gone:
            text = engine.text
        elif engine.serving:
            text = "serves"
        if text and self._printed.get(engine.number) != text:
            self._printed[engine.number] = text
            print(f"engine {engine.number} {text}", flush=True)


def _engine_names(numbers: Sequence[int]) -> str:
    return f"engine{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


DESCRIPTION = "engines join a running run, and leave it"
MEANINGS = {
    "add": "start engines that join a running run; ends when they have left, the run has ended, "
    "or SIGTERM has made them leave",
    "remove": "make engines leave a running run; other engines finish their work",
    "list": "the engines of a running run, and what they are doing",
}
EXAMPLES = [
    "megarl engines add runs/8b 2",
    "megarl engines remove runs/8b 3",
    "megarl engines remove runs/8b --count 2",
    "megarl engines list runs/8b --json",
]
_RUN_DIR = "run_dir="


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, meaning in MEANINGS.items():
        command = commands.add_parser(name, help=meaning, description=meaning)
        command.add_argument(
            "run_dir", metavar="RUN_DIR", help="folder of the run, also as run_dir=…"
        )
        if name == "add":
            command.add_argument(
                "count_and_overrides",
                metavar="N dotted.key=value",
                nargs="*",
                help="how many; default: as many as this job's nodes hold. After it: settings that "
                "may differ from the run's",
            )
            command.add_argument(
                "--group",
                metavar="NAME",
                default="",
                help="which of generator.groups they are of, if the run has any",
            )
        elif name == "remove":
            command.add_argument(
                "engines", metavar="NUMBER", nargs="*", type=int, help="engines, by number"
            )
            command.add_argument(
                "--count", metavar="N", type=int, default=0, help="the N newest, instead"
            )
        else:
            command.add_argument(
                "--json",
                action="store_true",
                help="print one JSON object, and nothing else, on stdout",
            )


def run(arguments: argparse.Namespace) -> None:
    """Raises ConfigError, RuntimeError, TimeoutError."""
    run_dir = arguments.run_dir.removeprefix(_RUN_DIR)
    if arguments.what == "add":
        count, overrides = _parse_count(arguments.count_and_overrides)
        add_engines(run_dir, count, overrides, arguments.group)
    elif arguments.what == "remove":
        _remove(run_dir, arguments.engines, arguments.count)
    else:
        _list(run_dir, arguments.json)


def _parse_count(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number of engines, and the overrides."""
    if not arguments or "=" in arguments[0]:
        return None, list(arguments)
    count = int(arguments[0]) if arguments[0].isdecimal() else 0
    if count < 1:
        raise ConfigError("megarl engines add RUN_DIR N: N must be an integer of at least 1")
    return count, list(arguments[1:])


def _remove(run_dir: str, engines: Sequence[int], count: int) -> None:
    if bool(engines) == bool(count) or count < 0:
        raise ConfigError(
            "megarl engines remove RUN_DIR: either numbers of engines, or --count N of at least 1"
        )
    call = FleetCall("leave", engines=list(engines), count=count)
    for engine in ask(find_run(run_dir), call).engines:
        print(f"engine {engine.number} {engine.text}")


def _list(run_dir: str, as_json: bool) -> None:
    engines = ask(find_run(run_dir), FleetCall("list")).engines
    if as_json:
        rows = [
            {
                "number": engine.number,
                "url": engine.url,
                "serving": engine.serving,
                "gone": engine.gone,
                "doing": engine.text,
                "group": engine.group,
            }
            for engine in engines
        ]
        print(json.dumps({"serving": sum(engine.serving for engine in engines), "engines": rows}))
        return
    for engine in engines:
        of_group = f"of {engine.group}: " if engine.group else ""
        print(f"engine {engine.number:<4} {engine.url:<30} {of_group}{engine.text}")
