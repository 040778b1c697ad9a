"""The launcher of a node: it meets the others, starts this node's processes, watches them, and ends together with the others.

On one host it is the whole launch; under srun or torchrun it runs once on every node.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.config.errors import ConfigError, RunError
from megarl.config.load import dump_config
from megarl.files import make_private_folder, write_problem
from megarl.generator.server import EngineKeys
from megarl.launch.binding import gpus
from megarl.launch.engines import EngineKeeper
from megarl.launch.lock import held
from megarl.launch.meeting import Meeting, NodeReport
from megarl.launch.node import Node, address_of, interface_with
from megarl.launch.placement import EngineFleet, NodePlan, place, slots_per_node
from megarl.launch.ports import taken
from megarl.launch.preflight import disagreements, host_name, infiniband_ports, problems_here, versions
from megarl.launch.processes import ProcessFailed, ProcessGroup, raise_limits
from megarl.launch.resuming import Resume
from megarl.launch.scratch import scratch_folder
from megarl.launch.start import NodePart
from megarl.launch.stopping import StopOrder, Stopped
from megarl.launch.tracing import traced
from megarl.launch.watch import RunWatch, termination_as_exit
from megarl.messaging.departures import Departures
from megarl.messaging.link import RunKey
from megarl.messaging.rendezvous import EVALUATION, EngineAddress, Rendezvous, free_ports
from megarl.observe.trace import TraceWriter
from megarl.plan.resolve import RunPlan


@dataclass(frozen=True)
class Job:
    """The processes of a command."""

    command: str  # as on the command line: train | sft | reward-model | eval | export
    logs: Path
    trainer_role: str | None  # worker role of every trainer rank; None: no trainer
    driver_role: str | None  # worker role that drives the engines; None: no engines
    stops: bool = False  # whether it finishes the running step and saves on SIGTERM


def launch(
    plan: RunPlan, job: Job, node: Node, prepare: Callable[[Path], None], poll: Callable[[], None] = lambda: None, resume: Resume = Resume()
) -> Path:
    """Runs `job` to its end on all nodes; returns the launch folder.

    `prepare` is called with that folder, only on the head, before anything is started; `poll` about ten times a second.

    Raises ProcessFailed for this node's processes, PeerFailed for another node's, ConfigError if the nodes cannot run the plan, and
    Stopped when SIGTERM or Ctrl-C has stopped a job that `stops` (a second signal ends it at once).
    """
    raise_limits()
    folder = Path(plan.config.run_dir) / ".launch" / job.command / node.launch
    try:
        make_private_folder(Path(plan.config.run_dir))
        meeting = Meeting(folder, node, plan.config.timeouts.rendezvous_s, plan.config.timeouts.silence_s)
    except OSError as error:
        raise ConfigError(f"run_dir={plan.config.run_dir}: cannot be written to: {error.strerror}: {error.filename}") from error
    with (
        failing_together(meeting, node),
        _prepared(plan, job, node, folder, prepare),
        traced(plan, node, resume) if job.stops else contextlib.nullcontext() as trace,
        scratch_folder() as scratch,
        ProcessGroup(job.logs) as processes,
        _termination(processes, meeting, plan) as order,
    ):
        placed = placement(plan, job, node.count, len(gpus()))
        report = report_of(plan, node, placed[node.rank], drives=_drives(placed[node.rank], job))
        rendezvous = _meet(job, meeting, placed, report, resume)
        working = [nodes.node for nodes in placed if nodes.trainer_ranks or _drives(nodes, job)]
        keeper = engine_keeper(processes, plan, folder, job.stops, trace)
        interface = interface_with(report.address)
        here = NodePart(plan, placed[node.rank], report, rendezvous, folder, interface, scratch, alone=node.count == 1)
        workers, trainers = _start(processes, keeper, here, job)
        if job.stops:
            order.arm(trainers)
        try:
            RunWatch(processes, keeper, meeting, order, poll).follow(workers, working)
        except ProcessFailed as failure:
            if problem := write_problem(Path(plan.config.run_dir)):
                failure.begin(f"run_dir={plan.config.run_dir}: cannot be written to any more: {problem}")
            for line in taken(report.ports, report.address, processes.process_ids()):
                failure.add(line)
            raise
        except OSError as error:  # of this launcher's own
            if problem := write_problem(Path(plan.config.run_dir)):
                raise RunError(f"run_dir={plan.config.run_dir}: cannot be written to any more: {problem}") from error
            raise
        if order.given:
            raise Stopped(number=order.signal)
    return folder


@contextlib.contextmanager
def failing_together(meeting: Meeting, node: Node) -> Iterator[None]:
    """Tells the launchers of other nodes why this one ends."""
    try:
        yield
    except (RuntimeError, TimeoutError, ConfigError, OSError) as error:
        if node.count > 1:
            meeting.fail(f"node {node.rank} ({host_name()}): {error}")
        raise
    except (SystemExit, KeyboardInterrupt) as error:
        if node.count > 1:
            name = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else "SIGTERM"
            meeting.fail(f"node {node.rank} ({host_name()}) was ended by {name}")
        raise


@contextlib.contextmanager
def _termination(processes: ProcessGroup, meeting: Meeting, plan: RunPlan) -> Iterator[StopOrder]:
    """Turns SIGTERM and Ctrl-C into an order to stop. An error while stopping becomes the `problem` of Stopped."""
    order = StopOrder(meeting, processes, plan.config.checkpoint.on_termination_s)
    with termination_as_exit(first=order.order):
        try:
            yield order
        except (RuntimeError, TimeoutError) as error:
            if not order.given:
                raise
            raise Stopped(str(error), order.signal) from error


@contextlib.contextmanager
def _prepared(plan: RunPlan, job: Job, node: Node, folder: Path, prepare: Callable[[Path], None]) -> Iterator[None]:
    """On the head: writes what this launch's processes read, and keeps other launches of the run out meanwhile."""
    if not node.is_head:
        yield
        return
    refusal = f"run_dir={plan.config.run_dir}: megarl {job.command} is running there already"
    with held(folder.parent / "lock", refusal):
        if node.count == 1:
            shutil.rmtree(folder, ignore_errors=True)  # from an earlier launch
            folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(plan.config))
        prepare(folder)
        yield


def placement(plan: RunPlan, job: Job, nodes: int, gpus_of_node: int) -> list[NodePlan]:
    trainers = plan.trainer_topology.world_size if job.trainer_role else 0
    fleets = fleets_of(plan, job) if job.driver_role else []
    ranks = trainers + sum(fleet.engines * fleet.tp for fleet in fleets)
    slots = slots_per_node(ranks, nodes, gpus_of_node, plan.config.launch.ranks_per_node)
    return place(trainers, fleets, nodes, slots)


def evaluates_apart(plan: RunPlan, job: Job) -> bool:
    """Whether a run has engines that only evaluate, and a driver of theirs."""
    return job.command == "train" and plan.config.eval.engines > 0


def fleets_of(plan: RunPlan, job: Job) -> list[EngineFleet]:
    """The policy's engines, those that only evaluate, then those of each role."""
    tp = plan.generator_topology.tp
    policy = [EngineFleet(plan.generator_topology.engines, tp)]
    if evaluates_apart(plan, job):
        policy.append(EngineFleet(plan.config.eval.engines, tp, EVALUATION))
    return [*policy, *(EngineFleet(r.settings.engines, r.settings.tp, r.name, f"roles.{r.name}") for r in plan.served)]


def _drives(node: NodePlan, job: Job) -> bool:
    """Whether the drivers run on this node: they run beside the first engine."""
    return job.driver_role is not None and 0 in node.serves


def _meet(job: Job, meeting: Meeting, placed: list[NodePlan], mine: NodeReport, resume: Resume) -> Rendezvous:
    """Every node reports; the head checks the reports and publishes the rendezvous."""
    meeting.announce(mine)
    reports = meeting.reports()
    if not meeting.node.is_head:
        return meeting.await_rendezvous()
    if problems := disagreements(reports):
        raise ConfigError(problems)
    rendezvous = _rendezvous(meeting.folder, placed, reports, resume)
    meeting.publish(rendezvous)
    return rendezvous


def report_of(plan: RunPlan, node: Node, mine: NodePlan, drives: bool = False, hosts: int | None = None) -> NodeReport:
    """`drives`: whether the drivers run here. `hosts`: how many there are in the run, if more than `node` knows of."""
    address = address_of(plan.config.launch.interface, hosts or node.count)
    wanted = [part.name for part in mine.engines] + [f"{part.whole}.group" for part in mine.answering]
    wanted += ["hub", "evaluator"] * drives + ["trainer"] * (0 in mine.trainer_ranks)
    ports = dict(zip(wanted, free_ports(len(wanted), address)))
    problems = problems_here(plan, bool(mine.trainer_ranks), bool(mine.engines), shared=node.count > 1)
    return NodeReport(node.rank, host_name(), address, len(gpus()), ports, versions(), problems, infiniband_ports())


def _rendezvous(folder: Path, placed: list[NodePlan], reports: list[NodeReport], resume: Resume) -> Rendezvous:
    """The rendezvous of one launch: fresh keys, and where everything is."""
    keys = EngineKeys.generate()
    key_file = folder / "message_key.json"
    RunKey.generate().save(key_file)
    driver = next((report for node, report in zip(placed, reports) if 0 in node.serves), reports[0])
    return Rendezvous(
        hub_host=driver.address,
        hub_port=driver.ports.get("hub", 0),
        key_file=str(key_file.resolve()),
        trainer_host=reports[0].address,
        trainer_port=reports[0].ports.get("trainer", 0),
        engines=addresses(placed, reports),
        engine_key=keys.api,
        engine_admin_key=keys.admin,
        start_step=resume.step,
        checkpoint=resume.checkpoint,
        evaluator_port=driver.ports.get("evaluator", 0),
    )


def addresses(placed: list[NodePlan], reports: list[NodeReport]) -> dict[str, list[EngineAddress]]:
    """Where each fleet's engines answer."""
    found: dict[str, dict[int, EngineAddress]] = {}  # by fleet and engine
    for node, report in zip(placed, reports):
        for part in node.answering:
            address = EngineAddress(report.address, report.ports[part.whole], report.ports[f"{part.whole}.group"])
            found.setdefault(part.fleet, {})[part.engine] = address
    return {fleet: [address for _, address in sorted(each.items())] for fleet, each in found.items()}


def engine_keeper(processes: ProcessGroup, plan: RunPlan, folder: Path, training: bool, trace: TraceWriter | None = None) -> EngineKeeper:
    """`folder`: of the run's launch. Only `training` can go on with a changed set of engines."""
    generator = plan.config.generator
    policy = generator.on_failure if training else "fail"
    limits = generator.max_restarts, generator.health_s, generator.startup_timeout_s
    return EngineKeeper(processes, policy, *limits, trace, Departures(folder))


def _start(processes: ProcessGroup, keeper: EngineKeeper, here: NodePart, job: Job) -> tuple[set[str], set[str]]:
    """Starts this node's processes. Returns the names of the workers, with whose end the job ends, and of the trainer ranks among them."""
    trainers = here.trainers(job.trainer_role) if job.trainer_role else []
    roles = [job.driver_role, *(["evaluator"] if evaluates_apart(here.plan, job) else [])]
    drivers = [here.driver(role) for role in roles if role and _drives(here.placed, job)]
    workers = [*trainers, *drivers]
    start_engines(processes, keeper, here)
    for spec in workers:
        processes.start(spec)
    return {spec.name for spec in workers}, {spec.name for spec in trainers}


def start_engines(processes: ProcessGroup, keeper: EngineKeeper, here: NodePart) -> None:
    """Starts this node's engines, or parts of engines. They start before the workers, since they take longer."""
    if here.placed.engines:
        here.write_adapter()
    for part, spec in zip(here.placed.engines, here.engines()):
        processes.start(spec)
        if part.parts == 1:  # the parts of an engine that spans nodes could only be restarted together
            evaluates = part.fleet == EVALUATION
            keeper.keep(spec, here.report.address, here.report.ports[part.name], here.rendezvous.engine_key, evaluates)
