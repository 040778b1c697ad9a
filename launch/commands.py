"""The commands that start processes: what each one runs, and what it prints before and after."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.base.files import write_whole
from megarl.base.kept_sets import MOST_KEPT
from megarl.base.results import CommandResult
from megarl.config.errors import ConfigError, tell
from megarl.config.load import dump_config
from megarl.config.schema import RunConfig
from megarl.config.tasks import played_tasks, with_source_keys
from megarl.critic.plan import critic_path
from megarl.data.batches import load_pairs, training_steps
from megarl.data.check import Checked, check_data, digests_of
from megarl.data.contents import Contents, compare_contents, contents_of, read_contents
from megarl.data.rows import held_out
from megarl.estimate.estimate import estimate, with_kv_caches
from megarl.estimate.hardware import GIB, GPUS
from megarl.estimate.memory import kv_bytes_per_token
from megarl.evaluation.scores import (
    as_metrics,
    best_checkpoint,
    note_lost,
    read_results,
    sampling_text,
    sets,
    write_result,
)
from megarl.generator.groups import EngineGroup
from megarl.labels import state
from megarl.labels.pairs import HELD_OUT_FILE, PAIRS_FILE, read_scored, summary, write_pairs
from megarl.launch.gpus import gpus
from megarl.launch.inputs import check_inputs, check_room_for_weights
from megarl.launch.launcher import Job, generating_job, launch, placement, training_job
from megarl.launch.meeting import NodeReport, scratch_folder
from megarl.launch.nodes import Node, NodePlan, interface_with, this_node
from megarl.launch.processes import ProcessSpec
from megarl.launch.resuming import (
    EXPORT_FOLDER,
    Resume,
    check_resume_point,
    latest_checkpoint,
    linked_checkpoint,
)
from megarl.launch.start import NodePart
from megarl.launch.tracking import Trackers
from megarl.launch.watch import Stopped
from megarl.launch.worker import PARENT
from megarl.messaging.host import loopback
from megarl.messaging.rendezvous import EngineAddress, Purpose, Rendezvous
from megarl.models.spec import SCALAR
from megarl.observe.metrics import METRICS_FILE, change_rows, check_lines, read_metrics
from megarl.observe.progress import Doings, Progress
from megarl.observe.samples import recover_ordinals
from megarl.observe.status import clear_statuses
from megarl.plan.checkpoints import (
    changes,
    checkpoint_path,
    remove_leftovers,
    scored_path,
    scores_to_choose_by,
)
from megarl.plan.resolve import RunPlan, resolve
from megarl.plan.topologies import generator_ranks, gpus_of_run, gpus_per_node
from megarl.plan.weights import (
    WARM,
    WeightsSource,
    begin_with,
    needs_first_weights,
    needs_reference,
    scores_checkpoint,
    why_first_weights,
)
from megarl.reshard.layout import ITEM_BYTES
from megarl.rewards import code
from megarl.rewards.score import all_parts, parts_in_labels
from megarl.rollouts.buffer import Ledger
from megarl.sandbox import jail
from megarl.trainer.hf_files import fingerprint


def headline(plan: RunPlan, step: int, nodes: int) -> str:
    """The first lines that `megarl train` prints."""
    config = plan.config
    start = f"from the checkpoint of step {step}" if step else "from the start"
    engines = " and ".join(map(_group_text, plan.groups))
    if config.eval.engines:
        engines += f", {config.eval.engines} more to evaluate"
    if nodes > 1:
        engines += f" on {nodes} nodes"
    capacity = "unbounded" if config.async_.capacity is None else config.async_.capacity
    batch = f"{config.rollout.prompts_per_step} prompts x {config.rollout.n} samples"
    return (
        f"Asynchronous RL ({config.algorithm.name}, capacity {capacity}): {config.max_steps} "
        f"steps {start}\n"
        f"  {batch}, trainer {sizes(plan)} -> {engines}\n  in {config.run_dir}"
    )


def _group_text(group: EngineGroup) -> str:
    text = _engines_text(group.settings.engines, group.settings.tp)
    if group.name:
        text += f" of {group.name} ({group.settings.quantization or 'unquantised'})"
    return text


def _engines_text(engines: int, tp: int) -> str:
    return f"{engines} engine{'s' * (engines > 1)} TP{tp}"


def weights_lines(plan: RunPlan, resume: Resume) -> list[str]:
    """Lines that say which weights a run starts from, and for a resumed run which settings differ
    from its last start.
    """
    if not resume.checkpoint:
        adapters = plan.adapters.lines() if plan.adapters else []
        return [f"Weights: {plan.weights}", *adapters, *_critic_lines(plan)]
    lines = [f"Weights: the checkpoint {resume.checkpoint}"]
    if plan.adapters:
        lines += plan.adapters.resumed_lines(plan.weights)
    elif needs_reference(plan.config):
        lines.append(f"Reference model: what the run began with, {plan.weights}")
    return [*lines, *(f"Changed: {change}" for change in changes(plan.config))]


def role_lines(plan: RunPlan) -> list[str]:
    """Lines about the frozen models."""
    lines = []
    for role in plan.served:
        engines = _engines_text(role.settings.engines, role.settings.tp)
        lines.append(f"Role {role.name}: {role.settings.path}, frozen, on {engines}")
    for role in plan.frozen:
        lines.append(f"Role {role.name}: {role.path}, frozen, on the trainer's ranks")
    return lines


def _critic_lines(plan: RunPlan) -> list[str]:
    critic = plan.config.critic
    if plan.critic is None:
        return []
    key, path = critic_path(plan.config)
    weights = "the policy's weights" if path is None else f"{key}={path}"
    head = "a reward model" if plan.critic.head == SCALAR else "with a new head of zeros"
    warmup = f", {critic.warmup_steps} steps before the policy" if critic.warmup_steps else ""
    return [f"Critic: {weights}, {head}{warmup}"]


def with_caches(plan: RunPlan, dry_run: bool = False) -> RunPlan:
    """The plan with the size of every engine's KV cache, so that no engine takes its share of what
    happens to be free. `dry_run`: for cluster.gpu, even if this machine has no GPU.
    """
    gpu = GPUS[plan.config.cluster.gpu if dry_run or gpus() else "cpu"]
    config = with_kv_caches(plan.config, plan.spec, plan.served, gpu)
    return replace(
        plan,
        config=config,
        served=tuple(replace(role, settings=config.roles[role.name]) for role in plan.served),
    )


def without_trainer(plan: RunPlan) -> RunPlan:
    """The plan for commands that start engines alone, which have their GPUs to themselves."""
    return replace(
        plan, config=replace(plan.config, cluster=replace(plan.config.cluster, share_gpus=False))
    )


def sharing_lines(plan: RunPlan) -> list[str]:
    """A line that says that trainer and engines share GPUs.

    Raises ConfigError if they do not fit. `plan`: one of `with_caches`.
    """
    config = plan.config
    if not config.cluster.share_gpus:
        return []
    planned = estimate(config, plan.spec)
    gpu = planned.cluster.gpu
    engine = planned.fullest
    trainer = planned.trainer.total / GIB
    for side, over_gib in planned.overfull.items():
        raise ConfigError(
            f"cluster.share_gpus=true: on {gpu.name} the {side} is {over_gib:.1f} GiB per "
            "GPU too large; megarl plan proposes what fits"
        )
    sum_gib = f"{trainer:.1f} + {engine.memory.total / GIB:.1f} of {gpu.memory_gib:g} GiB"
    return [
        f"Shared GPUs: trainer and engines are on the same GPUs (cluster.share_gpus): {sum_gib}"
    ]


def memory_lines(plan: RunPlan) -> list[str]:
    """A line that compares both sides' high-water marks with the plan; none without marks.

    `plan`: one of `with_caches`.
    """
    rows = read_metrics(Path(plan.config.run_dir) / METRICS_FILE)
    planned_gib = estimate(plan.config, plan.spec).marks_gib
    sides = []
    for side in ("trainer", "engine"):
        marks = [row[f"memory/{side}_gib"] for row in rows if f"memory/{side}_gib" in row]
        if marks:
            sides.append(f"{side} {max(marks):.2f} GiB, planned {planned_gib[side]:.2f}")
    if sides:
        return [f"  {'most memory of a rank':<24}{'; '.join(sides)}"]
    return []


def cache_lines(plan: RunPlan) -> list[str]:
    """A line about the engines' KV cache, for each group. `plan`: one of `with_caches`."""
    lines = []
    for group in plan.groups:
        tokens = group.settings.kv_cache_tokens or 0
        name = f" of {group.name}" if group.name else ""
        item = ITEM_BYTES[group.dtype(plan.config.model.dtype)]
        gib = tokens * kv_bytes_per_token(plan.spec, group.settings, item) / GIB
        lines.append(
            f"KV cache: {tokens:,} tokens an engine{name}, {gib:.2f} GiB a rank "
            "(generator.kv_cache_tokens)"
        )
    return lines


def sampling_lines(plan: RunPlan) -> list[str]:
    """Warnings about sampling: restricted vocabulary, or responses that start again."""
    rollout = plan.config.rollout
    lines = list[str]()
    if plan.config.async_.partial_rollout == "abort":
        lines.append(
            "Sampling: async.partial_rollout=abort starts interrupted responses again from the "
            "prompt. Most of these are long. From the "
            "first token that the new weights change, they are new ones. So long responses may "
            "become rarer than the policy makes them: "
            "the mean length falls by up to a fifth (docs/asynchrony.md)"
        )
    if rollout.truncated and rollout.top_k < 0 and plan.spec.vocab_size > MOST_KEPT:
        lines.append(
            f"Sampling: rollout.top_p={rollout.top_p:g}, min_p={rollout.min_p:g} apply to the "
            f"{MOST_KEPT} likeliest tokens, since no more "
            "are recorded; the metric mask/overflow counts the tokens that were drawn from a "
            "larger set"
        )
    if rollout.truncated and not rollout.replay_mask:
        lines.append(
            "Sampling: with rollout.replay_mask=false the engine's log-probs are over the tokens "
            "it keeps, the trainer's over all. So "
            "ratios are too low, by the share of the probability that is cut off"
        )
    return lines


def sandbox_lines(plan: RunPlan) -> list[str]:
    """Warnings about what sandboxes do not limit.

    Agents run on the generator's host, which is assumed to be like this one.
    """
    config = plan.config
    lines = list[str]()
    for source, task in played_tasks(config).items():
        if task.rollout.name != "program":
            continue
        key = with_source_keys("rollout.name", config, source)
        with contextlib.suppress(ConfigError):  # a dry run, on a machine unlike the run's
            kind = jail.kind_for(task.rollout.args.get("sandbox", jail.AUTO))
            lines.append(f"Sandbox of {key}=program: {kind}; of a program, {jail.unbounded(kind)}")
    for part in [part for part in all_parts(config) if part.name == code.NAME][:1]:
        lines.append(
            f"Sandbox of {part.setting}: {jail.BWRAP}; of a program, {jail.unbounded(jail.BWRAP)}"
        )
    return lines


def sizes(plan: RunPlan) -> str:
    """The trainer's parallel sizes above 1, such as TP2xDP4."""
    axes = {axis: getattr(plan.trainer_topology, axis) for axis in ("tp", "pp", "cp", "ep", "dp")}
    sizes = [f"{axis.upper()}{size}" for axis, size in axes.items() if size > 1]
    return "x".join(sizes) or "on one rank"


_MOST_NODES = 4096


def nodes_needed(plan: RunPlan, job: Job) -> int:
    """The least number of nodes for the plan; 1 on CPUs, if launch.ranks_per_node is not set."""
    if not gpus_of_node(plan.config):
        return 1
    placed = placement(plan, job, _MOST_NODES, gpus_of_node(plan.config))
    return sum(not node.idle for node in placed)


def gpus_of_node(config: RunConfig) -> int:
    """The GPUs of the run's nodes, which are like this machine.

    If it has none, as a login node, they are as megarl plan counts them.
    """
    if gpus():
        return len(gpus())
    if config.cluster.gpu == "cpu" and config.launch.ranks_per_node is None:
        return 0
    return gpus_per_node(config)


def with_nodes_of_here(plan: RunPlan) -> RunPlan:
    """The plan for nodes of as many GPUs as this machine has, unless it has none, or
    launch.ranks_per_node is set.
    """
    config = plan.config
    if config.cluster.gpu == "cpu" or not gpus():
        return plan
    ranks_per_node = config.launch.ranks_per_node or len(gpus())
    launch_settings = replace(config.launch, ranks_per_node=ranks_per_node)
    return replace(plan, config=replace(config, launch=launch_settings))


def with_lengths_of(plan: RunPlan, datasets: Iterable[Checked]) -> RunPlan:
    """The plan with the mean prompt length of data.train, from the rows that have been read."""
    lengths: list[int] = []
    for checked in datasets:
        if checked.key.startswith("data.train"):
            lengths += checked.reading.lengths
    if not lengths:
        return plan
    settings = replace(plan.config.plan, prompt_tokens=max(1, round(fmean(lengths))))
    return replace(plan, config=replace(plan.config, plan=settings))


def gpus_line(plan: RunPlan) -> str:
    """How many GPUs, or ranks on CPUs, a run takes."""
    trainer = plan.trainer_topology.world_size
    engines = generator_ranks(training_job(plan).groups)
    unit = "CPU ranks" if plan.config.cluster.gpu == "cpu" else "GPUs"
    shared = trainer + generator_ranks(plan.groups) - gpus_of_run(plan.config)
    beside = f"; {shared} of them for both (cluster.share_gpus)" if shared else ""
    return (
        f"{unit:<10} {trainer + engines - shared}: {trainer} for the trainer, {engines} for "
        f"engines{beside}"
    )


def render_launch(plan: RunPlan) -> str:
    """What a launch would start: one line per group of nodes with the same processes, and for each
    role a command that its node would start. Starts and writes nothing.
    """
    job = training_job(plan)
    placed = placement(plan, job, nodes_needed(plan, job), gpus_of_node(plan.config))
    lines = [
        f"launch     {len(placed)} node{'s' * (len(placed) > 1)}, one `megarl train` on each; "
        f"trainer {sizes(plan)}"
    ]
    for nodes in _equal_neighbours(placed):
        lines.append(f"  {_node_names(nodes):<14} {_processes_text(nodes)}")
    lines.append(
        "commands, the first of each role (ADDRESS, PORT, KEY and SCRATCH are settled when the "
        "nodes meet):"
    )
    for node, spec in _samples(plan, job, placed):
        environment = " ".join(
            f"{key}={shlex.quote(value)}"
            for key, value in sorted(spec.env.items())
            if "KEY" not in key and key != PARENT
        )
        lines.append(
            f"  node {node}, {spec.name}:\n    {environment} \\\n    {shlex.join(spec.argv)}"
        )
    return "\n".join(lines)


def _equal_neighbours(placed: list[NodePlan]) -> Iterable[list[NodePlan]]:
    """Groups of neighbouring nodes with equal numbers of trainer ranks and engines."""
    for _, nodes in itertools.groupby(placed, key=_node_shape):
        yield list(nodes)


def _node_shape(node: NodePlan) -> tuple:
    parts = [(part.fleet, part.ranks, part.parts, part.part) for part in node.engines]
    return len(node.trainer_ranks), parts


def _node_names(nodes: list[NodePlan]) -> str:
    first = nodes[0].node
    last = nodes[-1].node
    if first == last:
        return f"node {first}"
    return f"nodes {first}-{last}"


def _processes_text(nodes: list[NodePlan]) -> str:
    """The processes of nodes that are alike."""
    texts = []
    if nodes[0].trainer_ranks:
        texts.append(f"trainer ranks {nodes[0].trainer_ranks[0]}-{nodes[-1].trainer_ranks[-1]}")
    engines: dict[tuple[Purpose, int], list[int]] = {}  # purpose, ranks -> numbers of its engines
    for node in nodes:
        for part in node.engines:
            engines.setdefault((part.group.purpose, part.ranks), []).append(part.engine)
    for (purpose, ranks), numbers in engines.items():
        texts.append(f"{purpose.text} {numbers[0]}-{numbers[-1]}, {ranks} ranks of each on a node")
    for node in nodes:
        if 0 in node.serves:
            texts.append(f"the generator's driver and reward workers (node {node.node})")
    return "; ".join(texts) or "nothing to do"


def _samples(plan: RunPlan, job: Job, placed: list[NodePlan]) -> Iterable[tuple[int, ProcessSpec]]:
    engines = {
        group.purpose.prefix: [EngineAddress("ADDRESS", 0, 0)] * group.numbers.stop
        for group in job.groups
    }
    shown = {(group.purpose.prefix, group.first) for group in job.groups}
    unknown = Rendezvous(
        hub_host="ADDRESS",
        hub_ports={},
        key_file="KEY",
        trainer_host="ADDRESS",
        trainer_port=0,
        engines=engines,
        engine_key="",
        engine_admin_key="",
        start_step=0,
        checkpoint="",
    )
    folder = Path(plan.config.run_dir) / ".launch" / "train" / "LAUNCH"

    def part_of(node: NodePlan) -> NodePart:
        ports = {part.name: 0 for part in node.engines}
        report = NodeReport(node.node, "", "ADDRESS", gpus=0, ports=ports, versions={}, problems=[])
        alone = len(placed) == 1
        interface = plan.config.launch.interface
        if alone and not interface:
            interface = interface_with(loopback())
        return NodePart(
            plan=plan,
            placed=node,
            report=report,
            rendezvous=unknown,
            folder=folder,
            interface=interface,
            scratch=Path("SCRATCH"),
            alone=alone,
        )

    assert job.trainer_role  # dry runs are for `megarl train`
    yield 0, part_of(placed[0]).trainers(job.trainer_role)[0]
    # the nodes' device, which this machine may lack
    device = "cpu" if plan.config.cluster.gpu == "cpu" else "cuda"
    for node in placed:
        if 0 in node.serves:
            for driver in job.drivers:
                yield node.node, part_of(node).driver(driver)
        firsts = {part.name for part in node.answering if (part.fleet, part.engine) in shown}
        for spec in part_of(node).engines(device) if firsts else ():
            if spec.name in firsts:
                yield node.node, spec


SHARES = ("pass@", "avg@", "maj@", "prompt_", "instruction_")
# folder in run_dir for the export of the checkpoint that megarl eval scores
EVALUATED = "evaluated"


def train(plan: RunPlan) -> None:
    """Starts or resumes the RL run of `plan`, and prints its summary at the end.

    Raises ProcessFailed, Stopped.
    """
    run_plan = plan
    plan = with_caches(run_plan)
    config = plan.config
    run_dir = Path(config.run_dir)
    node = this_node()
    resume = latest_checkpoint(run_dir)
    lacks_evaluation = unscored(config)
    if resume.step < config.max_steps or lacks_evaluation:

        def prepare(_: Path) -> None:
            check_resume_point(run_dir, resume)
            inputs = check_inputs(config, "train", plan)
            contents = contents_of(config, digests_of(inputs.datasets), rewarded=True)
            data_lines = compared_data(config, run_dir, resume, contents)
            contents.write(run_dir)
            remove_leftovers(run_dir)
            note_beginning(plan, resume)
            lines = [
                headline(plan, resume.step, node.count),
                *weights_lines(run_plan, resume),
                *role_lines(plan),
                *sharing_lines(plan),
                *cache_lines(plan),
                *sampling_lines(plan),
                *sandbox_lines(plan),
                *inputs.remarks,
                *data_lines,
            ]
            print(*lines, sep="\n", flush=True)
            if lacks_evaluation:
                print(
                    f"The run ended before version {resume.step}, its last, was evaluated: this "
                    "is done now",
                    flush=True,
                )
            if resume.checkpoint:
                mend_records(run_dir, resume)
            # a resumed run plans its caches again
            write_whole(run_dir / "config.yaml", dump_config(run_plan.config))

        job = training_job(plan, stops=True)
        try:
            _launch_showing(plan, job, node, prepare, run_dir, config.max_steps, resume)
        except Stopped as stopped:
            if stopped.problem or latest_checkpoint(run_dir).step < config.max_steps:
                _tell_stopped(plan, stopped, node)
                raise
    elif node.is_head:
        print(
            f"{run_dir} is complete: {resume.step} of {config.max_steps} steps. Start another "
            "with run_dir=… or go on with a larger max_steps."
        )
    if node.is_head:
        mend_evaluations(config)
        _report(plan)


def _tell_stopped(plan: RunPlan, stopped: Stopped, node: Node) -> None:
    if node.is_head:
        problem = f". It did not stop cleanly: {stopped.problem}" if stopped.problem else ""
        print(
            f"stopped at step {latest_checkpoint(plan.config.run_dir).step} by {stopped.by}; "
            f"the same command goes on from there{problem}",
            flush=True,
        )
        _report(plan)


def _report(plan: RunPlan) -> None:
    from megarl.observe.report import finish_report  # not at the top: it imports numpy and more

    config = plan.config
    print(finish_report(config.run_dir), end="")
    for line in memory_lines(plan):
        print(line)
    best = best_checkpoint(config) if config.checkpoint.keep_best else None
    if best:
        step, score = best
        print(
            f"  {'best checkpoint':<24}step {step}, {config.checkpoint.keep_best} {score:.3f} "
            "(--best of megarl export and megarl eval)"
        )
    print(flush=True)


def note_beginning(plan: RunPlan, resume: Resume) -> None:
    """Records the weights that a run begins with.

    Raises ConfigError if a resumed run needs them but they have changed.
    """
    config = plan.config
    weights = plan.weights
    now = fingerprint(Path(weights.path)) if Path(weights.path).is_dir() else ""
    if not resume.checkpoint:
        begin_with(config, weights, now)
    elif needs_first_weights(config) and weights.fingerprint not in ("", now):
        raise ConfigError(
            f"{why_first_weights(config)} what the run began with, but {weights.path} holds other "
            "weights now; put the first ones back"
        )


def compared_data(
    config: RunConfig, folder: Path | str, resume: Resume, now: Contents
) -> list[str]:
    """Lines about rows, tokenizer, template and own code that have changed since the job in
    `folder` began. Raises ConfigError unless checkpoint.accept_changed_data.
    """
    if not resume.checkpoint:
        return []
    accept = config.checkpoint.accept_changed_data
    return compare_contents(
        read_contents(Path(folder)),
        now,
        accept,
        first_job=f"the run in {folder}",
        instead="use another run_dir",
    )


def mend_records(run_dir: Path, resume: Resume) -> None:
    """Prints what the records of a resumed run lack, and restores what the checkpoint knows."""
    ledger = Ledger.load(resume.checkpoint)
    recovered = recover_ordinals(run_dir, resume.step, ledger.trained(), ledger.reported_drops())
    for lost in (check_lines(run_dir / METRICS_FILE, resume.step), recovered):
        if lost:
            print(lost, flush=True)
    for version in note_lost(run_dir, resume.step):
        print(
            f"the evaluation of version {version} is lost: the run ended meanwhile, and goes on "
            f"from version {resume.step}",
            flush=True,
        )


def mend_evaluations(config: RunConfig) -> None:
    """Prints which versions a complete run has not evaluated."""
    last = config.max_steps
    for version in note_lost(config.run_dir, last + 1, due=[last] if unscored(config) else []):
        then = "; the same command repeats it" if version == last else ""
        print(
            f"the evaluation of version {version} is lost: the run ended before it{then}",
            flush=True,
        )


def unscored(config: RunConfig) -> bool:
    """Whether a run has made its last step but has not evaluated its last weights."""
    step = latest_checkpoint(config.run_dir).step
    scored = {result["version"] for result in read_results(config.run_dir)}
    return bool(held_out(config)) and step == config.max_steps and step not in scored


def sft(plan: RunPlan) -> None:
    """Runs the supervised warm start, which writes an HF checkpoint to `sft.output`.

    Does nothing if there is one that is evaluated. With `sft.score_every`, the engines evaluate the
    weights between parts of the warm start, in which nothing else runs, and at its end.
    """
    config = plan.config
    run_dir = Path(config.run_dir) / "sft"
    node = this_node()
    if _is_warm(config):
        if node.is_head:
            _compare_warm_start(plan)
        if _lacks_last_score(config):
            _score(plan, config.sft.output, config.sft.steps)
        return
    if config.sft.score_every:
        resolve(config, "dry-run")  # what is wrong is told before the training
        check_data(config, plan.spec, "eval", at_hand=True)
    while not _is_warm(config):
        resume = latest_checkpoint(run_dir)
        scored = scored_path(config, resume.step)
        if config.sft.score_every and Path(scored).is_dir():
            _score(plan, scored, resume.step)
            if node.is_head:
                shutil.rmtree(scored)
        _warm_up(plan, node, resume)
    if config.sft.score_every:
        _score(plan, config.sft.output, config.sft.steps)
    if node.is_head:
        print(f"Supervised weights are in {config.sft.output}")


def _is_warm(config: RunConfig) -> bool:
    return (Path(config.sft.output) / "config.json").exists()


def _lacks_last_score(config: RunConfig) -> bool:
    """Whether this run's warm start was interrupted while its last weights were evaluated."""
    run_dir = Path(config.run_dir) / "sft"
    if not config.sft.score_every or not (run_dir / METRICS_FILE).exists():
        return False
    steps = [row["step"] for row in read_metrics(run_dir / METRICS_FILE)]
    scored = [result["version"] for result in read_results(run_dir)]
    return config.sft.steps - 1 in steps and config.sft.steps not in scored


def _compare_warm_start(plan: RunPlan) -> None:
    """Says that there is a warm start. Raises ConfigError if it was made from other rows."""
    config = plan.config
    lines = compare_contents(
        read_contents(Path(config.sft.output)),
        contents_of(config, digests_of(check_data(config, plan.spec, "sft")), rewarded=False),
        config.checkpoint.accept_changed_data,
        first_job=f"the warm start in sft.output={config.sft.output}",
        instead="remove it to train it again",
    )
    for line in lines:
        print(line)
    state = "only its evaluation is missing" if _lacks_last_score(config) else "nothing to do"
    print(f"{config.sft.output} is there already: {state}. Remove it to train it again.")


def _warm_up(plan: RunPlan, node: Node, resume: Resume) -> None:
    """Trains up to the end, or to the next evaluation of `sft.score_every`."""
    config = plan.config
    run_dir = Path(config.run_dir) / "sft"

    def prepare(_: Path) -> None:
        inputs = check_inputs(config, "sft", plan)
        contents = contents_of(config, digests_of(inputs.datasets), rewarded=False)
        data_lines = compared_data(config, run_dir, resume, contents)
        contents.write(run_dir)
        remove_leftovers(run_dir)
        steps = f"{config.sft.steps} steps of {config.sft.batch_size} sequences"
        weights = str(plan.weights)
        if resume.checkpoint:
            weights = f"the checkpoint {resume.checkpoint}"
        elif config.model.random_init:
            weights = f"random, by seed {config.seed}"
        print(f"Supervised warm start: {steps}, trainer {sizes(plan)}, in {run_dir}")
        print(f"Weights: {weights}", *inputs.remarks, *data_lines, sep="\n", flush=True)

    job = Job("sft", run_dir / "logs", trainer_role="sft")
    _launch_showing(plan, job, node, prepare, run_dir, config.sft.steps, resume)


def _score(plan: RunPlan, folder: str, step: int) -> None:
    """Evaluates a warm start's weights after `step` steps. Their scores get into the row of the
    last step, and are the version `step` in run_dir/sft/eval.
    """
    config = plan.config
    run_dir = Path(config.run_dir) / "sft"
    exported = replace(config, model=replace(config.model, path=folder))
    weights = WeightsSource(folder, checkpoint=f"{folder} after {step} steps")
    scores = evaluate(replace(resolve(exported, "eval"), weights=weights), quiet=False)
    if not scores:  # on another node than the first
        return
    print(scores)
    result = {key: value for key, value in scores.items() if key != "weights"}
    rows = {row["step"]: row for row in read_metrics(run_dir / METRICS_FILE)}
    change_rows(run_dir, {step - 1: rows[step - 1] | as_metrics({"version": step, **result})})
    write_result(run_dir, step, result)  # last: it says that the evaluation is done


def reward_model(plan: RunPlan) -> None:
    """Trains a reward model on pairs of responses, and writes it as an HF checkpoint to
    `reward_model.output`.
    """
    config = plan.config
    settings = config.reward_model
    run_dir = Path(config.run_dir) / "reward_model"
    node = this_node()
    steps = settings.steps
    if not steps:
        pairs = load_pairs(config, settings.data, "reward_model.data", plan.spec)
        steps = training_steps(config, len(pairs))

    def prepare(_: Path) -> None:
        inputs = check_inputs(config, "reward-model", plan)
        print(
            f"Reward model: {steps} steps of {settings.batch_size} pairs, trainer {sizes(plan)}, "
            f"in {run_dir}"
        )
        weights = plan.weights if plan.weights.are_there else f"random, by seed {config.seed}"
        print(f"Weights: {weights}", *inputs.remarks, sep="\n", flush=True)

    job = Job("reward-model", run_dir / "logs", trainer_role="reward_model")
    _launch_showing(plan, job, node, prepare, run_dir, steps)
    if node.is_head:
        print(accuracy_line((run_dir / METRICS_FILE).read_text(encoding="utf-8")), end="")
        print(f"The reward model is in {settings.output}")


def accuracy_line(metrics: str) -> str:
    """A line about the held-out pairs, from the metrics.jsonl of a reward model; empty without
    held-out pairs.
    """
    rows = [json.loads(line) for line in metrics.splitlines()]
    first = rows[0]
    last = rows[-1]
    if "eval/accuracy" not in last:
        return ""
    before = f"{first['before/accuracy']:.3f} (loss {first['before/loss']:.4f})"
    after = f"{last['eval/accuracy']:.3f} (loss {last['eval/loss']:.4f})"
    return f"Held-out pairs in the right order: {before} before, {after} after\n"


def label(plan: RunPlan) -> None:
    """Scores responses to the prompts of `label`, and makes pairs for `megarl reward-model`.

    Goes on where an earlier call has ended.
    """
    plan = with_caches(without_trainer(plan))
    config = plan.config
    folder = Path(config.label.output)
    node = this_node()
    prompts = config.label.prompts

    def prepare(_: Path) -> None:
        inputs = check_inputs(config, "label", plan)
        data_lines = state.begin(plan, inputs.datasets)
        done = len(read_scored(folder, prompts))
        print(f"Labels by {', '.join(part.setting for part in parts_in_labels(config))}", end="")
        print(f", in {folder}" + f"; {done:,} prompts are labelled already" * bool(done))
        print(f"Weights: {plan.weights}", *role_lines(plan), *inputs.remarks, *data_lines, sep="\n")
        sys.stdout.flush()

    if state.is_complete(folder, prompts):
        if not node.is_head:
            return
        state.begin(plan, check_data(config, plan.spec, "label"))
    else:
        job = generating_job(plan, "label", folder / "logs", driver="label")
        poll = Doings(folder).poll if node.is_head else lambda: None
        launched = launch(plan, job, node, prepare, poll)
        if not node.is_head:
            return
        state.note_complete(folder, _read_result(launched / "result.json"), prompts)
    scored = read_scored(folder, prompts)
    pairs = write_pairs(folder, scored, config.label)
    print(summary(scored, pairs))
    held_out_file = f", of the first {config.label.held_out} prompts in {folder / HELD_OUT_FILE}"
    print(f"The pairs are in {folder / PAIRS_FILE}{held_out_file * bool(config.label.held_out)}")


def evaluate_checkpoint(
    plan: RunPlan, step: int | None = None, best: bool = False, quiet: bool = False
) -> CommandResult:
    """Scores the run's checkpoint that `step` or `best` chooses, or by default its newest one;
    without one, model.path.

    `quiet`: prints only on stderr.
    """
    if scores_checkpoint(plan.config, step, best):
        # what is wrong is told before the export takes minutes
        check_data(plan.config, plan.spec, "eval", at_hand=True)
        folder = f"{plan.config.run_dir}/{EVALUATED}"
        with contextlib.redirect_stdout(sys.stderr if quiet else sys.stdout):
            checkpoint = export(plan, folder, step, best=best)
        exported = replace(plan.config, model=replace(plan.config.model, path=folder))
        plan = replace(
            resolve(exported, "eval"), weights=WeightsSource(folder, checkpoint=checkpoint)
        )
    return evaluate(plan, quiet)


def evaluate(plan: RunPlan, quiet: bool) -> CommandResult:
    """Scores the weights of `plan` on `data.eval` and `eval.suites` through SGLang.

    The scores are on the head node; empty elsewhere.
    """
    plan = with_caches(without_trainer(plan))
    node = this_node()

    def prepare(_: Path) -> None:
        inputs = check_inputs(plan.config, "eval", plan)
        if not quiet:
            print(
                f"Weights: {plan.weights}", *role_lines(plan), *inputs.remarks, sep="\n", flush=True
            )

    eval_dir = Path(plan.config.run_dir) / "eval"
    job = generating_job(plan, "eval", eval_dir / "logs", driver="evaluate")
    if not node.is_head:
        launch(plan, job, node, prepare)
        return CommandResult({}, "")
    folder = launch(plan, job, node, prepare, Doings(eval_dir).poll)
    result = _read_result(folder / "result.json")
    values = {"weights": plan.weights.scored, **result}
    return CommandResult(values, evaluation_text(result, plan.weights))


def warm(plan: RunPlan) -> None:
    """Starts one of the policy's engines of each group on this machine, with random weights, and
    lets it generate. Compiled kernels are kept (launch.compile_cache), so that the engines of a run
    start at once.
    """
    for group in plan.groups:
        start = time.monotonic()
        with scratch_folder() as run_dir:
            one = plan.group_alone(group.name).with_engines([1])
            config = replace(one.config, run_dir=str(run_dir / "run"))
            alone = with_caches(without_trainer(replace(resolve(config, WARM), served=())))
            job = generating_job(alone, WARM, run_dir / "run/logs", driver=WARM)
            launch(alone, job, Node(0, 1, "local"), lambda folder: None)
        print(
            f"an engine of {group.key}.tp={group.settings.tp} has compiled and answered in "
            f"{time.monotonic() - start:.0f} s",
            flush=True,
        )


def evaluation_text(result: Mapping[str, Any], weights: WeightsSource) -> str:
    """A line for each held-out set."""
    lines = [f"held-out scores of {weights}"]
    measures = ("win_rate", "perplexity")
    for name, scores in sets(result).items():
        shares = ", ".join(
            f"{key} {scores[key]:.3f}{_interval(scores, key)}"
            for key in scores
            if key.startswith(SHARES)
        )
        answers = f"{scores['samples']} answers to {scores['prompts']} prompts"
        if shares:
            answers = f"{shares} ({scores['correct']} of {answers})"
        measured = "".join(
            f"{key} {scores[key]:.3f}{_interval(scores, key)}, "
            for key in measures
            if key in scores
        )
        lines.append(
            f"  {name or 'data.eval'}: {answers}, mean reward {scores['reward/mean']:.3f}, {measured}"
            f"{scores['truncated_fraction']:.0%} truncated; {sampling_text(scores)}"
        )
    return "\n".join(lines)


def _interval(scores: Mapping[str, float], key: str) -> str:
    ends = [scores.get(f"ci95/{key}/{end}") for end in ("low", "high")]
    if None in ends:
        return ""
    return f" [{ends[0]:.3f}, {ends[1]:.3f}]"


def _read_result(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"{path}: the result is missing or damaged ({error}); start the command again"
        ) from error


def export(
    plan: RunPlan, output: str, step: int | None = None, adapter: bool = False, best: bool = False
) -> str:
    """Writes the weights of a checkpoint (the newest, the one of `step`, or the `best`) as an HF
    checkpoint or an adapter at `output`. Returns the checkpoint's folder.
    """
    if adapter and plan.adapters is None:
        raise ConfigError(
            "--lora: lora.rank is null: the run trains all weights, and has no adapter"
        )
    run_dir = Path(plan.config.run_dir)
    node = this_node()
    job = Job("export", run_dir / EXPORT_FOLDER / "logs", trainer_role="export")
    with contextlib.ExitStack() as resources:

        def prepare(folder: Path) -> None:
            nonlocal step
            check_room_for_weights(plan, "--output ", output)
            remark = ""
            if best:
                step, remark = best_step(plan.config)
            linked = resources.enter_context(linked_checkpoint(run_dir, step))
            check_resume_point(run_dir, linked)
            step = linked.step
            checkpoint = str(checkpoint_path(run_dir, step))
            request = {
                "path": linked.checkpoint,
                "original": checkpoint,
                "output": str(output),
                "adapter": adapter,
            }
            (folder / "export.json").write_text(json.dumps(request), encoding="utf-8")
            print(f"Weights: the checkpoint {checkpoint}{remark}", flush=True)

        launched = launch(plan, job, node, prepare)
    if node.is_head:
        if adapter:
            print(f"The adapter of step {step} is in {output}")
        else:
            print(f"Weights of step {step} are in {output}")
    return json.loads((launched / "export.json").read_text(encoding="utf-8"))["original"]


def best_step(config: RunConfig) -> tuple[int, str]:
    """The step of the best checkpoint, and a remark for the user.

    Raises ConfigError if none can be chosen.
    """
    key = config.checkpoint.keep_best
    if key is None:
        choice = ", ".join(scores_to_choose_by(config))
        raise ConfigError(
            "--best: checkpoint.keep_best is null; set it to the score to choose by: "
            f"{choice or 'a held-out score'}"
        )
    best = best_checkpoint(config)
    if best is None:
        raise ConfigError(
            f"--best: no checkpoint in run_dir={config.run_dir} has been evaluated ({key})"
        )
    return best[0], f", the best by {key}: {best[1]:.3f}"


def _launch_showing(
    plan: RunPlan,
    job: Job,
    node: Node,
    prepare: Callable[[Path], None],
    run_dir: Path,
    steps: int,
    resume: Resume = Resume(),
) -> None:
    """Launches `job` with the live display, which the head node shows."""
    if not node.is_head:
        launch(plan, job, node, prepare, resume=resume)
        return
    progress = Progress(run_dir, steps)
    trackers = Trackers(plan.config, run_dir, progress.warn)

    def prepare_to_show(folder: Path) -> None:
        clear_statuses(run_dir)
        prepare(folder)
        trackers.start(folder / "config.yaml", resume.step)

    def poll() -> None:
        progress.poll()
        trackers.poll()

    try:
        launch(plan, job, node, prepare_to_show, poll, resume)
    except (RuntimeError, TimeoutError) as error:
        progress.close()
        tell(error)  # before closing the trackers, which may take long, or hang for the same reason
        raise
    finally:
        progress.close()
        trackers.close()
