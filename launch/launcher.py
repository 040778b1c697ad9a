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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megarl.base.files import make_private_folder, write_problem
from megarl.config.errors import ConfigError, RunError
from megarl.config.load import dump_config
from megarl.estimate.estimate import estimate, generate_parts, to_json, train_parts
from megarl.estimate.hardware import GPUS
from megarl.generator.server import EngineKeys, growing_segments
from megarl.launch import doctor
from megarl.launch.engines import EngineKeeper
from megarl.launch.gpus import MIG, VISIBLE, gpus, memory_gib
from megarl.launch.meeting import Meeting, NodeReport, held, scratch_folder
from megarl.launch.nodes import (
    EngineFleet,
    Node,
    NodePlan,
    address_of,
    interface_with,
    place,
    slots_per_node,
)
from megarl.launch.processes import ProcessFailed, ProcessGroup, raise_limits, taken
from megarl.launch.resuming import Resume
from megarl.launch.start import HOME_CACHE, NodePart, compiled_folder
from megarl.launch.watch import NAMES, RunWatch, StopOrder, Stopped, termination_as_exit
from megarl.messaging.link import RunKey
from megarl.messaging.rendezvous import (
    EVALUATION,
    POLICY,
    Departures,
    EngineAddress,
    Rendezvous,
    free_ports,
)
from megarl.observe.status import TraceWriter
from megarl.plan.checks import problems_by_group, repacked_blocks
from megarl.plan.resolve import RunPlan
from megarl.plan.topologies import generator_ranks

# Checks before anything is started: each node checks itself, and the head checks that all nodes
# agree.


SMALLEST = 0.97  # of the memory of a GPU's kind: some of it may be kept by the driver
PACKAGES = ("megarl", "torch", "megatron-core", "sglang", "transformers", "transformer-engine")


def versions() -> dict[str, str]:
    """The versions of all software that must be the same on all nodes."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def problems_here(plan: RunPlan, trains: bool, serves: bool, shared: bool) -> list[str]:
    """The reasons why this node cannot run its part (trainer ranks, engines, or both).

    `shared`: whether other nodes have parts too.
    """
    gpu = doctor.has_driver()
    lacking = (
        finding for finding in doctor.look(doctor.node(gpu)) if finding.state == doctor.LACKS
    )
    found = [f"{finding.what}: {finding.found}: {finding.remedy}" for finding in lacking]
    if gpu:
        found += inseparable_instances(plan, trains)
    if gpu and trains:
        found += _unfit_to_train(plan)
    if gpu and trains and serves and plan.config.cluster.share_gpus:
        found += too_small_gpus(plan.config.cluster.gpu)
    if (
        gpu
        and serves
        and (blackwell := [kind for kind, capability in doctor.capabilities() if capability == 10])
    ):
        found += problems_by_group(
            plan.config, [partial(repacked_blocks, where=f"{blackwell[0]} here")]
        )
    return [*(_missing_files(plan) if shared else ()), *found]


def _unfit_to_train(plan: RunPlan) -> Iterator[str]:
    found = importlib.util.find_spec("transformer_engine")
    # missing, or an empty folder
    if not plan.config.trainer.local_layers and (found is None or found.origin is None):
        yield (
            "trainer.local_layers=false: must be true without Transformer Engine, or install "
            "it: make setup-gpu (docs/cluster.md)"
        )
    transport = plan.config.weights.transport
    if transport not in ("nccl", "gloo") and (given := growing_segments()):
        why = (
            "network cards and other processes cannot always open such memory; nccl and gloo do "
            "not need that"
        )
        yield (
            f"{given}: must be without expandable_segments:True where "
            f"weights.transport={transport}: {why} (docs/transports.md)"
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
    for path in (
        plan.weights_path,
        *(role.settings.path for role in plan.served),
        *(role.path for role in plan.frozen),
    ):
        if path.startswith(("/", ".", plan.config.run_dir)) and not Path(path).is_dir():
            yield f"{path} is not there: is it on a file system that all nodes share?"


def infiniband_ports(devices: Path = doctor.INFINIBAND) -> dict[str, bool]:
    """Port name, such as mlx5_0:1 -> whether the port is up."""
    states = sorted(devices.glob("*/ports/*/state"))
    return {
        f"{state.parts[-4]}:{state.parts[-2]}": state.read_text(encoding="utf-8")
        .strip()
        .endswith("ACTIVE")
        for state in states
    }


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
        name = f"node {report.node} ({report.host})"
        lines += [f"{name}: {problem}" for problem in report.problems]
        lines += [
            f"{name}: {package} {version}, but {first.versions.get(package, 'absent')} on node 0 "
            f"({first.host})"
            for package, version in report.versions.items()
            if version != first.versions.get(package, "absent")
        ]
        if report.gpus != first.gpus:
            lines.append(f"{name}: {report.gpus} GPUs, but {first.gpus} on node 0 ({first.host})")
        down = [port for port, is_up in report.infiniband.items() if not is_up and port in up]
        lines += [f"{name}: InfiniBand port {port} is down, but up on other nodes" for port in down]
    return lines


def host_name() -> str:
    return socket.gethostname()


# A launcher's part of the trace: the start of the run, the predictions of `megarl plan`, restarts
# of engines, how the run ended.


END_CHARACTERS = 2000  # most characters of an error


@contextlib.contextmanager
def traced(plan: RunPlan, node: Node, resume: Resume) -> Iterator[TraceWriter]:
    with contextlib.closing(TraceWriter(plan.config.run_dir, f"launcher.{node.rank}")) as trace:
        if node.is_head:
            trace.mark(
                "start",
                step=resume.step,
                max_steps=plan.config.max_steps,
                nodes=node.count,
                expected=expected(plan),
            )
        how = "finished"
        try:
            yield trace
        except BaseException as error:
            how = _how(error)
            raise
        finally:
            # the error that ended the run, such as a full disk, must be reported instead of this
            # one
            with contextlib.suppress(OSError):
                trace.mark("end", how=how[:END_CHARACTERS])


def _how(error: BaseException) -> str:
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
        found = estimate(plan.config, plan.spec)
    except ConfigError as error:
        return {"problem": str(error)}
    gpu = found.cluster.gpu
    parts = {
        "train_parts_s": train_parts(found.train),
        "generate_parts_s": generate_parts(found.generate),
        "glue_s": found.glue_s,
    }
    peak = {
        "gpu": gpu.name,
        "trainer_ranks": plan.trainer_topology.world_size,
        "peak_flops": None if gpu.name == "cpu" else gpu.bf16_flops,
    }
    more = {"asynchronous": found.asynchronous, "marks_gib": found.marks_gib}
    return {**to_json(found, None), **parts, **peak, **more}


@dataclass(frozen=True)
class Job:
    """The processes of a command."""

    command: str  # train | sft | reward-model | eval | export
    logs: Path
    trainer_role: str | None  # worker role of every trainer rank; None: no trainer
    driver_role: str | None  # worker role that drives the engines; None: no engines
    stops: bool = False  # whether, on SIGTERM and the like, it finishes the running step and saves


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
        report = report_of(plan, node, placed[node.rank], drives=_drives(placed[node.rank], job))
        rendezvous = _meet(job, meeting, placed, report, resume)
        working = [nodes.node for nodes in placed if nodes.trainer_ranks or _drives(nodes, job)]
        keeper = engine_keeper(processes, plan, folder, job.stops, trace)
        interface = interface_with(report.address)
        here = NodePart(
            plan,
            placed[node.rank],
            report,
            rendezvous,
            folder,
            interface,
            scratch,
            node.count == 1,
            kernels_kept(plan, scratch),
        )
        workers, trainers = _start(processes, keeper, here, job)
        if job.stops:
            order.arm(trainers)
        try:
            RunWatch(processes, keeper, meeting, order, poll).follow(workers, working)
        except ProcessFailed as failure:
            if problem := write_problem(Path(plan.config.run_dir)):
                failure.begin(
                    f"run_dir={plan.config.run_dir}: cannot be written to any more: {problem}"
                )
            for line in taken(report.ports, report.address, processes.process_ids()):
                failure.add(line)
            raise
        except OSError as error:  # from this launcher itself
            if problem := write_problem(Path(plan.config.run_dir)):
                raise RunError(
                    f"run_dir={plan.config.run_dir}: cannot be written to any more: {problem}"
                ) from error
            raise
        if order.given:
            raise Stopped(number=order.signal)
    return folder


_launches: Counter[Path] = Counter()  # how often this process has used a folder


def launch_folder(parent: Path, node: Node) -> Path:
    """A folder in `parent` where the nodes of one launch meet.

    A program that launches twice under srun needs two, since files of the first launch would end
    the second. All nodes run the same program, so they count alike.
    """
    folder = parent / node.launch
    earlier = _launches[folder]
    _launches[folder] += 1
    return parent / f"{node.launch}.{earlier}" if earlier and node.count > 1 else folder


def kernels_kept(plan: RunPlan, scratch: Path) -> Path:
    """The folder for compiled kernels. Tells if it goes with the launch. Raises ConfigError."""
    folder = compiled_folder(plan.config.launch.compile_cache, scratch)
    if folder.is_relative_to(scratch):
        kept = "what is compiled is removed with this launch, and compiled again by the next"
        print(f"{HOME_CACHE} cannot be written to: {kept}; set launch.compile_cache", flush=True)
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
            if not order.given:
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
    with held(folder.parent / "lock", refusal):
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
    idle = sum(each.idle for each in placed)
    if idle and job.stops and node.is_head:
        print(
            f"{idle} of {node.count} nodes have nothing to do: the run needs {node.count - idle}",
            flush=True,
        )
    return placed


def placement(plan: RunPlan, job: Job, nodes: int, gpus_of_node: int) -> list[NodePlan]:
    trainers = plan.trainer_topology.world_size if job.trainer_role else 0
    fleets = fleets_of(plan, job) if job.driver_role else []
    shared = bool(plan.config.cluster.share_gpus)
    of_policy = generator_ranks(plan.groups) if job.driver_role else 0
    others = sum(fleet.engines * fleet.tp for fleet in fleets if fleet.name != POLICY)
    ranks = others + (max(trainers, of_policy) if shared else trainers + of_policy)
    slots = slots_per_node(ranks, nodes, gpus_of_node, plan.config.launch.ranks_per_node)
    return place(trainers, fleets, nodes, slots, shared)


def evaluates_apart(plan: RunPlan, job: Job) -> bool:
    """Whether the job has engines that only evaluate, with their own driver."""
    return job.command == "train" and plan.config.eval.engines > 0


def fleets_of(plan: RunPlan, job: Job) -> list[EngineFleet]:
    """The policy's engines, then engines that only evaluate, then those of each role."""
    policy = [
        EngineFleet(g.settings.engines, g.settings.tp, key=g.key, first=g.first)
        for g in plan.groups
    ]
    if evaluates_apart(plan, job):
        policy.append(EngineFleet(plan.config.eval.engines, plan.config.generator.tp, EVALUATION))
    return [
        *policy,
        *(
            EngineFleet(r.settings.engines, r.settings.tp, r.name, f"roles.{r.name}")
            for r in plan.served
        ),
    ]


def _drives(node: NodePlan, job: Job) -> bool:
    """Whether the drivers run on this node, which they do beside the first engine."""
    return job.driver_role is not None and 0 in node.serves


def _meet(
    job: Job, meeting: Meeting, placed: list[NodePlan], mine: NodeReport, resume: Resume
) -> Rendezvous:
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


def report_of(
    plan: RunPlan, node: Node, mine: NodePlan, drives: bool = False, hosts: int | None = None
) -> NodeReport:
    """This node's report.

    `drives`: whether the drivers run here. `hosts`: number of hosts in the run, if `node` does not
    know all.
    """
    address = address_of(plan.config.launch.interface, hosts or node.count)
    wanted = [part.name for part in mine.engines] + [
        f"{part.whole}.group" for part in mine.answering
    ]
    wanted += ["hub", "evaluator"] * drives + ["trainer"] * (0 in mine.trainer_ranks)
    ports = dict(zip(wanted, free_ports(len(wanted), address)))
    problems = problems_here(
        plan, bool(mine.trainer_ranks), bool(mine.engines), shared=node.count > 1
    )
    return NodeReport(
        node.rank,
        host_name(),
        address,
        len(gpus()),
        ports,
        versions(),
        problems,
        infiniband_ports(),
    )


def _rendezvous(
    folder: Path, placed: list[NodePlan], reports: list[NodeReport], resume: Resume
) -> Rendezvous:
    """The rendezvous of one launch: fresh keys and all addresses."""
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
    """Name of a fleet -> addresses of its engines."""
    found: dict[str, dict[int, EngineAddress]] = {}  # fleet -> engine -> its address
    for node, report in zip(placed, reports):
        for part in node.answering:
            address = EngineAddress(
                report.address, report.ports[part.whole], report.ports[f"{part.whole}.group"]
            )
            found.setdefault(part.fleet, {})[part.engine] = address
    return {
        fleet: [address for _, address in sorted(each.items())] for fleet, each in found.items()
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
    policy = generator.on_failure if training else "fail"
    limits = generator.max_restarts, generator.health_s, generator.startup_timeout_s
    return EngineKeeper(processes, policy, *limits, trace, Departures(folder))


def _start(
    processes: ProcessGroup, keeper: EngineKeeper, here: NodePart, job: Job
) -> tuple[set[str], set[str]]:
    """Starts this node's processes.

    Returns the names of the workers (the job ends when they do), and of the trainer ranks among
    them.
    """
    trainers = here.trainers(job.trainer_role) if job.trainer_role else []
    roles = [job.driver_role, *(["evaluator"] if evaluates_apart(here.plan, job) else [])]
    drivers = [here.driver(role) for role in roles if role and _drives(here.placed, job)]
    workers = [*trainers, *drivers]
    start_engines(processes, keeper, here)
    for spec in workers:
        processes.start(spec)
    return {spec.name for spec in workers}, {spec.name for spec in trainers}


def start_engines(processes: ProcessGroup, keeper: EngineKeeper, here: NodePart) -> None:
    """Starts this node's engines, or parts of engines.

    They start before the workers, since they take longer.
    """
    if here.placed.engines:
        here.write_adapter()
    for part, spec in zip(here.placed.engines, here.engines()):
        processes.start(spec)
        if part.parts == 1:  # parts of an engine that spans nodes could only be restarted together
            evaluates = part.fleet == EVALUATION
            keeper.keep(
                spec,
                here.report.address,
                here.report.ports[part.name],
                here.rendezvous.engine_key,
                evaluates,
            )
