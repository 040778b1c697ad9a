"""Describes what a launch would start where. Starts nothing, and writes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from megarl.data.check import Checked
from megarl.launch.binding import gpus
from megarl.launch.first_lines import sizes
from megarl.launch.launcher import Job, fleets_of, placement
from megarl.launch.meeting import NodeReport
from megarl.launch.node import interface_with
from megarl.launch.placement import NodePlan
from megarl.launch.processes import ProcessSpec
from megarl.launch.start import NodePart
from megarl.launch.worker import PARENT
from megarl.messaging.host import loopback
from megarl.messaging.rendezvous import EVALUATION, POLICY, EngineAddress, Rendezvous
from megarl.plan.resolve import RunPlan

_MOST_NODES = 4096


def nodes_needed(plan: RunPlan, job: Job) -> int:
    """The fewest nodes of launch.ranks_per_node slots that hold the plan; 1 if that is not set."""
    slots = plan.config.launch.ranks_per_node or len(gpus())
    if not slots:
        return 1
    placed = placement(plan, job, _MOST_NODES, slots)
    return sum(not node.idle for node in placed)


def with_lengths_of(plan: RunPlan, datasets: Iterable[Checked]) -> RunPlan:
    """The plan for prompts as long as those of data.train are, as far as they have been read."""
    lengths = [tokens for checked in datasets if checked.key.startswith("data.train") for tokens in checked.reading.lengths]
    if not lengths:
        return plan
    config = replace(plan.config, plan=replace(plan.config.plan, prompt_tokens=max(1, round(fmean(lengths)))))
    return replace(plan, config=config)


def render_launch(plan: RunPlan) -> str:
    """One line per group of nodes that run the same, and for each role one command, as its node would start it."""
    job = Job("train", Path(plan.config.run_dir) / "logs", trainer_role="trainer", driver_role="generator")
    placed = placement(plan, job, nodes_needed(plan, job), len(gpus()))
    lines = [f"launch     {len(placed)} node{'s' * (len(placed) > 1)}, one `megarl train` on each; trainer {sizes(plan)}"]
    for alike in _runs(placed):
        lines.append(f"  {_node_names(alike):<14} {_what(alike)}")
    lines.append("commands, the first of each role (ADDRESS, PORT, KEY and SCRATCH are settled when the nodes meet):")
    for node, spec in _samples(plan, job, placed):
        shown = sorted((key, value) for key, value in spec.env.items() if "KEY" not in key and key != PARENT)
        environment = " ".join(f"{key}={shlex.quote(value)}" for key, value in shown)
        lines.append(f"  node {node}, {spec.name}:\n    {environment} \\\n    {' '.join(map(shlex.quote, spec.argv))}")
    return "\n".join(lines)


def _runs(placed: list[NodePlan]) -> Iterable[list[NodePlan]]:
    """Groups of neighbouring nodes with equal numbers of trainer ranks and engines."""
    run: list[NodePlan] = []
    for node in placed:
        if run and _shape(node) != _shape(run[0]):
            yield run
            run = []
        run.append(node)
    yield run


def _shape(node: NodePlan) -> tuple:
    return len(node.trainer_ranks), [(part.fleet, part.ranks, part.parts, part.part) for part in node.engines]


def _node_names(alike: list[NodePlan]) -> str:
    first, last = alike[0].node, alike[-1].node
    return f"node {first}" if first == last else f"nodes {first}-{last}"


def _what(alike: list[NodePlan]) -> str:
    words = []
    if alike[0].trainer_ranks:
        words.append(f"trainer ranks {alike[0].trainer_ranks[0]}-{alike[-1].trainer_ranks[-1]}")
    for fleet in dict.fromkeys(part.fleet for part in alike[0].engines):
        own = [part for node in alike for part in node.engines if part.fleet == fleet]
        what = {POLICY: "engines", EVALUATION: "evaluation engines"}.get(fleet, f"engines of {fleet}")
        words.append(f"{what} {own[0].engine}-{own[-1].engine}, {own[0].ranks} ranks of each on a node")
    if any(0 in node.serves for node in alike):
        words.append(f"the generator's driver and reward workers (node {next(n.node for n in alike if 0 in n.serves)})")
    return "; ".join(words) or "nothing to do"


def _samples(plan: RunPlan, job: Job, placed: list[NodePlan]) -> Iterable[tuple[int, ProcessSpec]]:
    engines = {fleet.name: [EngineAddress("ADDRESS", 0, 0)] * fleet.engines for fleet in fleets_of(plan, job)}
    unknown = Rendezvous(
        hub_host="ADDRESS", hub_port=0, key_file="KEY", trainer_host="ADDRESS", trainer_port=0,
        engines=engines, engine_key="", engine_admin_key="", start_step=0, checkpoint="",
    )  # fmt: skip
    folder = Path(plan.config.run_dir) / ".launch" / "train" / "LAUNCH"

    def part_of(node: NodePlan) -> NodePart:
        ports = {part.name: 0 for part in node.engines}
        report = NodeReport(node.node, "", "ADDRESS", gpus=0, ports=ports, versions={}, problems=[])
        alone = len(placed) == 1
        interface = plan.config.launch.interface or (interface_with(loopback()) if alone else None)
        return NodePart(plan, node, report, unknown, folder, interface, Path("SCRATCH"), alone)

    assert job.trainer_role and job.driver_role  # dry runs are for `megarl train`, which has both
    yield 0, part_of(placed[0]).trainers(job.trainer_role)[0]
    device = "cpu" if plan.config.cluster.gpu == "cpu" else "cuda"  # of the nodes, whatever this machine has
    for node in placed:
        if 0 in node.serves:
            yield node.node, part_of(node).driver(job.driver_role)
        if firsts := {part.name for part in node.answering if part.engine == 0}:
            yield from ((node.node, spec) for spec in part_of(node).engines(device) if spec.name in firsts)
