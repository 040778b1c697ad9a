"""The launcher of a node.

It meets the other launchers, starts this node's processes, watches them, and ends together with the
others.

On one host it is the whole launch. Under srun or torchrun it runs once on every node.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megarl.base.files import make_private_folder, write_problem
from megarl.config.errors import ConfigError, RunError
from megarl.config.load import dump_config
from megarl.estimate.estimate import estimate, generate_parts, to_json, train_parts
from megarl.estimate.hardware import GPUS
from megarl.generator.groups import EngineGroup
from megarl.generator.server import EngineKeys, growing_segments
from megarl.launch import doctor
from megarl.launch.engines import EngineKeeper
from megarl.launch.gpus import MIG, VISIBLE, gpus, memory_gib
from megarl.launch.meeting import Meeting, NodeReport, locked, scratch_folder
from megarl.launch.nodes import (
    Node,
    NodePlan,
    address_of,
    interface_with,
    place,
    slots_per_node,
)
from megarl.launch.processes import ProcessFailed, ProcessGroup, occupied_ports, raise_limits
from megarl.launch.resuming import Resume
from megarl.launch.start import HOME_CACHE, NodePart, compiled_folder
from megarl.launch.watch import NAMES, RunWatch, StopOrder, Stopped, termination_as_exit
from megarl.messaging.link import RunKey
from megarl.messaging.rendezvous import (
    ROLLOUTS,
    Departures,
    EngineAddress,
    Rendezvous,
    free_ports,
)
from megarl.observe.status import TraceWriter
from megarl.plan.checks import problems_by_group, repacked_blocks
from megarl.plan.resolve import RunPlan
from megarl.plan.topologies import generator_ranks, groups_of_run

SMALLEST = 0.97  # of the memory of a GPU's kind: some of it may be kept by the driver
PACKAGES = ("megarl", "torch", "megatron-core", "sglang", "transformers", "transformer-engine")


def versions() -> dict[str, str]:
    """The versions of all software that must be the same on all nodes."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions


def problems_here(plan: RunPlan, trains: bool, serves: bool, shared: bool) -> list[str]:
    """The reasons why this node cannot run its part (trainer ranks, engines, or both).

    `shared`: whether other nodes have parts too.
    """
    problems = list(_missing_files(plan)) if shared else []
    gpu = doctor.has_driver()
    for finding in doctor.run_checks(doctor.node(gpu)):
        if finding.state == doctor.LACKS:
            problems.append(f"{finding.what}: {finding.found}: {finding.remedy}")
    if gpu:
        problems += inseparable_instances(plan, trains)
    if gpu and trains:
        problems += _unfit_to_train(plan)
    if gpu and trains and serves and plan.config.cluster.share_gpus:
        problems += too_small_gpus(plan.config.cluster.gpu)
    if gpu and serves:
        blackwell = [kind for kind, capability in doctor.capabilities() if capability == 10]
        if blackwell:
            check = partial(repacked_blocks, context=f"{blackwell[0]} here")
            problems += problems_by_group(plan.config, [check])
    return problems


def _unfit_to_train(plan: RunPlan) -> Iterator[str]:
    engine_spec = importlib.util.find_spec("transformer_engine")
    # missing, or an empty folder
    is_missing = engine_spec is None or engine_spec.origin is None
    if is_missing and not plan.config.trainer.local_layers:
        yield (
            "trainer.local_layers=false: must be true without Transformer Engine, or install "
            "it: make setup-gpu (docs/cluster.md)"
        )
    transport = plan.config.weights.transport
    setting = growing_segments()
    if setting and transport not in ("nccl", "gloo"):
        yield (
            f"{setting}: must be without expandable_segments:True where "
            f"weights.transport={transport}: network cards and other processes cannot always open "
            "such memory; nccl and gloo do not need that (docs/transports.md)"
        )


def too_small_gpus(kind: str) -> Iterator[str]:
    """The first of this run's GPUs that has less memory than those of `kind`, by which the memory
    of both sides was divided.
    """
    planned_gib = GPUS[kind].memory_gib
    for name, gib in memory_gib().items():
        if gib < SMALLEST * planned_gib:
            has = f"GPU {name} here has {gib:.1f} GiB, but {kind} has {planned_gib:g}"
            yield (
                f"cluster.gpu={kind}: must be the kind of the GPUs that trainer and engines "
                f"share, or one with less memory: {has}"
            )
            return


def inseparable_instances(plan: RunPlan, trains: bool) -> Iterator[str]:
    """What a run cannot do with several MIG instances: CUDA shows a process only one of them, and
    neither NCCL nor CUDA IPC joins two.
    """
    instances = [gpu.name for gpu in gpus() if gpu.name.startswith(MIG)]
    if len(instances) > 1 and (trains or any(group.settings.tp > 1 for group in plan.groups)):
        yield (
            f"{VISIBLE}={','.join(instances)}: must name one MIG instance, which trainer and engine "
            "share (cluster.share_gpus=true), or whole GPUs: neither NCCL nor CUDA IPC joins two "
            "instances"
        )


def _missing_files(plan: RunPlan) -> Iterator[str]:
    """Problems with files that this node lacks, such as files on the head's own disk."""
    paths = [plan.weights_path]
    paths += [role.settings.path for role in plan.served]
    paths += [role.path for role in plan.frozen]
    for path in paths:
        if path.startswith(("/", ".", plan.config.run_dir)) and not Path(path).is_dir():
            yield f"{path} is not there: is it on a file system that all nodes share?"


def infiniband_ports(devices: Path = doctor.INFINIBAND) -> dict[str, bool]:
    """Port name, such as mlx5_0:1 -> whether the port is up."""
    ports = {}
    for file in sorted(devices.glob("*/ports/*/state")):
        state = file.read_text(encoding="utf-8").strip()
        ports[f"{file.parts[-4]}:{file.parts[-2]}"] = state.endswith("ACTIVE")
    return ports


def disagreements(reports: list[NodeReport]) -> list[str]:
    """One line for each problem of a node, and for each version or number of GPUs in which it
    differs from node 0. Also one for each InfiniBand port that is down on a node but up on others,
    since NCCL and Mooncake would silently fall back, or hang. (A port that is down everywhere has
    no cable.)
    """
    first = reports[0]
    lines = []
    up = {port for report in reports for port, is_up in report.infiniband.items() if is_up}
    for report in reports:
        problems = list(report.problems)
        for package, version in report.versions.items():
            first_version = first.versions.get(package, "absent")
            if version != first_version:
                problems.append(
                    f"{package} {version}, but {first_version} on node 0 ({first.host})"
                )
        if report.gpus != first.gpus:
            problems.append(f"{report.gpus} GPUs, but {first.gpus} on node 0 ({first.host})")
        for port, is_up in report.infiniband.items():
            if port in up and not is_up:
                problems.append(f"InfiniBand port {port} is down, but up on other nodes")
        lines += [f"node {report.node} ({report.host}): {problem}" for problem in problems]
    return lines


def host_name() -> str:
    return socket.gethostname()


END_CHARACTERS = 2000  # most characters of an error


@contextlib.contextmanager
def traced(plan: RunPlan, node: Node, resume: Resume) -> Iterator[TraceWriter]:
    """A launcher's part of the trace: the start of the run, the predictions of `megarl plan`,
    restarts of engines, how the run ended.
    """
    with contextlib.closing(TraceWriter(plan.config.run_dir, f"launcher.{node.rank}")) as trace:
        if node.is_head:
            trace.mark(
                "start",
                step=resume.step,
                max_steps=plan.config.max_steps,
                nodes=node.count,
                expected=expected(plan),
            )
        ending = "finished"
        try:
            yield trace
        except BaseException as error:
            ending = _ending(error)
            raise
        finally:
            # the error that ended the run, such as a full disk, must be reported instead of this
            # one
            with contextlib.suppress(OSError):
                trace.mark("end", how=ending[:END_CHARACTERS])


def _ending(error: BaseException) -> str:
    """How the run ended.

    A run that was stopped counts as stopped and not as failed, even if it could not stop cleanly.
    """
    if isinstance(error, Stopped):
        return f"stopped by {error.by}"
    if isinstance(error, KeyboardInterrupt):
        return f"stopped by {NAMES[signal.SIGINT]}"
    if isinstance(error, SystemExit):
        return f"stopped by {_signal_name(error)}"
    return f"failed: {str(error) or type(error).__name__}"


def _signal_name(error: SystemExit) -> str:
    """The signal behind the exit that `termination_as_exit` raises."""
    return NAMES.get(int(error.code or 0) - 128, NAMES[signal.SIGTERM])


def expected(plan: RunPlan) -> dict[str, Any]:
    """The predictions of `megarl plan`, which the report shows beside measurements.

    If it cannot plan the config, the reason.
    """
    try:
        planned = estimate(plan.config, plan.spec)
    except ConfigError as error:
        return {"problem": str(error)}
    gpu = planned.cluster.gpu
    parts = {
        "train_parts_s": train_parts(planned.train),
        "generate_parts_s": generate_parts(planned.generate),
        "glue_s": planned.glue_s,
    }
    peak = {
        "gpu": gpu.name,
        "trainer_ranks": plan.trainer_topology.world_size,
        "peak_flops": None if gpu.name == "cpu" else gpu.bf16_flops,
    }
    more = {"asynchronous": planned.asynchronous, "marks_gib": planned.marks_gib}
    return {**to_json(planned, None), **parts, **peak, **more}


@dataclass(frozen=True)
class Job:
    """The processes of a command."""

    command: str  # train | sft | reward-model | eval | export
    logs: Path
    trainer_role: str | None  # worker role of every trainer rank; None: no trainer
    groups: tuple[EngineGroup, ...] = ()  # the engines
    drivers: tuple[str, ...] = ()  # worker roles that drive them
    stops: bool = False  # whether, on SIGTERM and the like, it finishes the running step and saves


def training_job(plan: RunPlan, stops: bool = False) -> Job:
    """The trainer, the engines of all purposes, and a driver for each purpose."""
    groups = groups_of_run(plan.config)
    return Job(
        command="train",
        logs=Path(plan.config.run_dir) / "logs",
        trainer_role="trainer",
        groups=(*groups, *(role.group for role in plan.served)),
        drivers=tuple(dict.fromkeys(group.purpose.driver for group in groups)),
        stops=stops,
    )


def generating_job(plan: RunPlan, command: str, logs: Path, driver: str) -> Job:
    """The policy's engines and those of roles, without a trainer."""
    groups = (*plan.groups, *(role.group for role in plan.served))
    return Job(command, logs, trainer_role=None, groups=groups, drivers=(driver,))


def launch(
    plan: RunPlan,
    job: Job,
    node: Node,
    prepare: Callable[[Path], None],
    poll: Callable[[], None] = lambda: None,
    resume: Resume = Resume(),
) -> Path:
    """Runs `job` to its end on all nodes. Returns the launch folder.

    `prepare` is called with that folder, only on the head, before anything is started. `poll` is
    called about ten times a second.

    Raises ProcessFailed for this node's processes, PeerFailed for another node's, ConfigError if
    the nodes cannot run the plan, and Stopped if SIGTERM or Ctrl-C has stopped a job that `stops`
    (a second signal ends it at once).
    """
    raise_limits()
    folder = launch_folder(Path(plan.config.run_dir) / ".launch" / job.command, node)
    try:
        make_private_folder(Path(plan.config.run_dir))
        meeting = Meeting(
            folder, node, plan.config.timeouts.rendezvous_s, plan.config.timeouts.silence_s
        )
    except OSError as error:
        raise ConfigError(
            f"run_dir={plan.config.run_dir}: cannot be written to: {error.strerror}: "
            f"{error.filename}"
        ) from error
    with (
        failing_together(meeting, node),
        contextlib.nullcontext(_placed(plan, job, node)) as placed,
        _prepared(plan, job, node, folder, prepare),
        traced(plan, node, resume) if job.stops else contextlib.nullcontext() as trace,
        scratch_folder() as scratch,
        ProcessGroup(job.logs) as processes,
        _termination(processes, meeting, plan) as order,
    ):
        report = report_of(plan, node, placed[node.rank], _drivers(placed[node.rank], job))
        rendezvous = _meet(job, meeting, placed, report, resume)
        working = [nodes.node for nodes in placed if nodes.trainer_ranks or _drivers(nodes, job)]
        keeper = engine_keeper(processes, plan, folder, job.stops, trace)
        node_part = NodePart(
            plan=plan,
            placed=placed[node.rank],
            report=report,
            rendezvous=rendezvous,
            folder=folder,
            interface=interface_with(report.address),
            scratch=scratch,
            alone=node.count == 1,
            compiled=kernels_folder(plan, scratch),
        )
        workers, trainers = _start(processes, keeper, node_part, job)
        if job.stops:
            order.arm(trainers)
        try:
            RunWatch(processes, keeper, meeting, order, poll).follow(workers, working)
        except ProcessFailed as failure:
            problem = write_problem(Path(plan.config.run_dir))
            if problem:
                failure.begin(
                    f"run_dir={plan.config.run_dir}: cannot be written to any more: {problem}"
                )
            for line in occupied_ports(report.ports, report.address, processes.process_ids()):
                failure.add(line)
            raise
        except OSError as error:  # from this launcher itself
            problem = write_problem(Path(plan.config.run_dir))
            if problem:
                raise RunError(
                    f"run_dir={plan.config.run_dir}: cannot be written to any more: {problem}"
                ) from error
            raise
        if order.is_given:
            raise Stopped(number=order.signal)
    return folder


_launches: Counter[Path] = Counter()  # how often this process has used a folder


def launch_folder(parent: Path, node: Node) -> Path:
    """A folder in `parent` where the nodes of one launch meet.

    A program that launches twice under srun needs two, since files of the first launch would end
    the second. All nodes run the same program, so they count alike.
    """
    folder = parent / node.launch
    earlier_launches = _launches[folder]
    _launches[folder] += 1
    if earlier_launches and node.count > 1:
        return parent / f"{node.launch}.{earlier_launches}"
    return folder


def kernels_folder(plan: RunPlan, scratch: Path) -> Path:
    """The folder for compiled kernels. Prints a warning if it goes with the launch.

    Raises ConfigError.
    """
    folder = compiled_folder(plan.config.launch.compile_cache, scratch)
    if folder.is_relative_to(scratch):
        print(
            f"{HOME_CACHE} cannot be written to: what is compiled is removed with this launch, and "
            "compiled again by the next; set launch.compile_cache",
            flush=True,
        )
    return folder


@contextlib.contextmanager
def failing_together(meeting: Meeting, node: Node) -> Iterator[None]:
    """If this launcher fails, tells the launchers of other nodes why."""
    try:
        yield
    except (RuntimeError, TimeoutError, ConfigError, OSError) as error:
        if node.count > 1:
            meeting.fail(f"node {node.rank} ({host_name()}): {error}")
        raise
    except (SystemExit, KeyboardInterrupt) as error:
        if node.count > 1:
            name = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else _signal_name(error)
            meeting.fail(f"node {node.rank} ({host_name()}) was ended by {name}")
        raise


@contextlib.contextmanager
def _termination(processes: ProcessGroup, meeting: Meeting, plan: RunPlan) -> Iterator[StopOrder]:
    """Turns the signals in watch.NAMES into an order to stop. An error while stopping becomes the
    `problem` of Stopped.
    """
    order = StopOrder(meeting, processes, plan.config.checkpoint.on_termination_s)
    with termination_as_exit(first=order.order):
        try:
            yield order
        except (RuntimeError, TimeoutError) as error:
            if not order.is_given:
                raise
            raise Stopped(str(error), order.signal) from error


@contextlib.contextmanager
def _prepared(
    plan: RunPlan, job: Job, node: Node, folder: Path, prepare: Callable[[Path], None]
) -> Iterator[None]:
    """On the head: writes the files that this launch's processes read, and locks out other launches
    of the run meanwhile.
    """
    if not node.is_head:
        yield
        return
    refusal = f"run_dir={plan.config.run_dir}: megarl {job.command} is running there already"
    with locked(folder.parent / "lock", refusal):
        if node.count == 1:
            shutil.rmtree(folder, ignore_errors=True)  # left by an earlier launch
            folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(plan.config), encoding="utf-8")
        prepare(folder)
        yield


def _placed(plan: RunPlan, job: Job, node: Node) -> list[NodePlan]:
    """The placement on the nodes that there are.

    Raises ConfigError if they are too few, or if a Slurm job for GPUs has none.
    """
    gpus_here = len(gpus())
    gpu = plan.config.cluster.gpu
    if node.launch.startswith("slurm.") and gpu != "cpu" and not gpus_here:
        raise ConfigError(
            f"cluster.gpu={gpu}: this job has no GPUs: ask for them (sbatch --gpus-per-node=N), "
            "or set cluster.gpu=cpu"
        )
    placed = placement(plan, job, node.count, gpus_here)
    idle = sum(node_plan.idle for node_plan in placed)
    if idle and job.stops and node.is_head:
        print(
            f"{idle} of {node.count} nodes have nothing to do: the run needs {node.count - idle}",
            flush=True,
        )
    return placed


def placement(plan: RunPlan, job: Job, nodes: int, gpus_of_node: int) -> list[NodePlan]:
    trainers = plan.trainer_topology.world_size if job.trainer_role else 0
    shared = bool(plan.config.cluster.share_gpus)
    ranks = trainers + generator_ranks(job.groups)
    if shared:
        policy = [group for group in job.groups if group.purpose == ROLLOUTS]
        ranks -= min(trainers, generator_ranks(policy))
    slots = slots_per_node(ranks, nodes, gpus_of_node, plan.config.launch.ranks_per_node)
    return place(trainers, job.groups, nodes, slots, shared)


def _drivers(node: NodePlan, job: Job) -> tuple[str, ...]:
    """The worker roles of the drivers on this node. They run beside the first engine."""
    return job.drivers if 0 in node.serves else ()


def _meet(
    job: Job, meeting: Meeting, placed: list[NodePlan], report: NodeReport, resume: Resume
) -> Rendezvous:
    """Every node reports; the head checks the reports and publishes the rendezvous."""
    meeting.announce(report)
    reports = meeting.reports()
    if not meeting.node.is_head:
        return meeting.await_rendezvous()
    problems = disagreements(reports)
    if problems:
        raise ConfigError(problems)
    rendezvous = _rendezvous(meeting.folder, job, placed, reports, resume)
    meeting.publish(rendezvous)
    return rendezvous


def report_of(
    plan: RunPlan,
    node: Node,
    node_plan: NodePlan,
    drivers: Sequence[str] = (),
    hosts: int | None = None,
) -> NodeReport:
    """This node's report.

    `drivers`: the worker roles of the drivers here. `hosts`: number of hosts in the run, if `node`
    does not know all.
    """
    address = address_of(plan.config.launch.interface, hosts or node.count)
    purposes = [part.name for part in node_plan.engines]
    purposes += [f"{part.engine_name}.group" for part in node_plan.answering]
    purposes += drivers
    if 0 in node_plan.trainer_ranks:
        purposes.append("trainer")
    return NodeReport(
        node=node.rank,
        host=host_name(),
        address=address,
        gpus=len(gpus()),
        ports=dict(zip(purposes, free_ports(len(purposes), address))),
        versions=versions(),
        problems=problems_here(
            plan, bool(node_plan.trainer_ranks), bool(node_plan.engines), shared=node.count > 1
        ),
        infiniband=infiniband_ports(),
    )


def _rendezvous(
    folder: Path, job: Job, placed: list[NodePlan], reports: list[NodeReport], resume: Resume
) -> Rendezvous:
    """The rendezvous of one launch: fresh keys and all addresses."""
    keys = EngineKeys.generate()
    key_file = folder / "message_key.json"
    RunKey.generate().save(key_file)
    driver = next((report for node, report in zip(placed, reports) if 0 in node.serves), reports[0])
    return Rendezvous(
        hub_host=driver.address,
        hub_ports={role: driver.ports[role] for role in job.drivers},
        key_file=str(key_file.resolve()),
        trainer_host=reports[0].address,
        trainer_port=reports[0].ports.get("trainer", 0),
        engines=addresses(placed, reports),
        engine_key=keys.api,
        engine_admin_key=keys.admin,
        start_step=resume.step,
        checkpoint=resume.checkpoint,
    )


def addresses(placed: list[NodePlan], reports: list[NodeReport]) -> dict[str, list[EngineAddress]]:
    """Name of a fleet -> addresses of its engines."""
    fleets: dict[str, dict[int, EngineAddress]] = {}  # fleet -> engine -> its address
    for node, report in zip(placed, reports):
        for part in node.answering:
            port = report.ports[part.engine_name]
            group_port = report.ports[f"{part.engine_name}.group"]
            address = EngineAddress(report.address, port, group_port)
            fleets.setdefault(part.fleet, {})[part.engine] = address
    return {
        fleet: [engines[number] for number in sorted(engines)] for fleet, engines in fleets.items()
    }


def engine_keeper(
    processes: ProcessGroup,
    plan: RunPlan,
    folder: Path,
    training: bool,
    trace: TraceWriter | None = None,
) -> EngineKeeper:
    """`folder`: of the run's launch.

    Only with `training` can the job continue with a changed set of engines.
    """
    generator = plan.config.generator
    return EngineKeeper(
        processes,
        policy=generator.on_failure if training else "fail",
        max_restarts=generator.max_restarts,
        health_s=generator.health_s,
        startup_s=generator.startup_timeout_s,
        trace=trace,
        departures=Departures(folder),
    )


def _start(
    processes: ProcessGroup, keeper: EngineKeeper, node_part: NodePart, job: Job
) -> tuple[set[str], set[str]]:
    """Starts this node's processes.

    Returns the names of the workers (the job ends when they do), and of the trainer ranks among
    them.
    """
    trainers = node_part.trainers(job.trainer_role) if job.trainer_role else []
    workers = list(trainers)
    workers += map(node_part.driver, _drivers(node_part.placed, job))
    start_engines(processes, keeper, node_part)
    for spec in workers:
        processes.start(spec)
    return {spec.name for spec in workers}, {spec.name for spec in trainers}


def start_engines(processes: ProcessGroup, keeper: EngineKeeper, node_part: NodePart) -> None:
    """Starts this node's engines, or parts of engines.

    They start before the workers, since they take longer.
    """
    if node_part.placed.engines:
        node_part.write_adapter()
    for part, spec in zip(node_part.placed.engines, node_part.engines()):
        processes.start(spec)
        if part.parts == 1:  # parts of an engine that spans nodes could only be restarted together
            keeper.keep(
                spec,
                host=node_part.report.address,
                port=node_part.report.ports[part.name],
                key=node_part.rendezvous.engine_key,
                spare=part.group.purpose.spare,
            )
