"""The commands that start processes: what each runs, and what it says before and after."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.load import dump_config
from megarl.data.check import check_data
from megarl.environments.loading import check_rollout
from megarl.executors.checkpoints import complete_checkpoints, remove_leftovers
from megarl.files import write_whole
from megarl.launch.launcher import Job, Resume, launch
from megarl.launch.node import Node, this_node
from megarl.launch.stopping import EXIT_STATUS, Stopped
from megarl.observe.progress import Progress
from megarl.observe.status import clear_statuses
from megarl.plan.resolve import RunPlan


def train(plan: RunPlan) -> None:
    """Runs or resumes the RL run of `plan`; ends with the summary on stdout. Raises ProcessFailed."""
    config, run_dir, node = plan.config, Path(plan.config.run_dir), this_node()
    resume = latest_checkpoint(run_dir)
    if resume.step < config.max_steps:

        def prepare(_: Path) -> None:
            check_data(config, plan.spec, "train")
            if config.weights.transport != "auto":
                check_weights_transport(config.weights.transport)
            check_rollout(config)
            remove_leftovers(run_dir)
            write_whole(run_dir / "config.yaml", dump_config(config))
            print(headline(plan, resume.step, node.count), flush=True)

        job = Job("train", run_dir / "logs", trainer_role="trainer", driver_role="generator", stops=True)
        try:
            _launch_showing(plan, job, node, prepare, run_dir, config.max_steps, resume)
        except Stopped as stopped:
            if stopped.problem or latest_checkpoint(run_dir).step < config.max_steps:
                _tell_stopped(run_dir, stopped, node)
                raise SystemExit(EXIT_STATUS) from stopped
    elif node.is_head:
        steps = f"{resume.step} of {config.max_steps} steps"
        print(f"{run_dir} is complete: {steps}. Start another with run_dir=… or go on with a larger max_steps.")
    if node.is_head:
        from megarl.observe.report import finish_report

        print(finish_report(run_dir))


def _tell_stopped(run_dir: Path, stopped: Stopped, node: Node) -> None:
    if node.is_head:
        where = f"stopped at step {latest_checkpoint(run_dir).step} by SIGTERM; the same command goes on from there"
        print(f"{where}. It did not stop cleanly: {stopped.problem}" if stopped.problem else where, flush=True)


def check_weights_transport(setting: str) -> None:
    """Raises ConfigError where it cannot work on this host."""
    from megarl.transports.choice import check_transport  # not at the top: it imports torch

    check_transport(setting)


def sft(plan: RunPlan) -> None:
    """Supervised warm start; leaves an HF checkpoint at `sft.output`. A finished one is kept as it is."""
    config, run_dir, node = plan.config, Path(plan.config.run_dir) / "sft", this_node()
    if (Path(config.sft.output) / "config.json").exists():
        if node.is_head:
            print(f"{config.sft.output} is there already: nothing to do. Remove it to train it again.")
        return

    def prepare(_: Path) -> None:
        check_data(config, plan.spec, "sft")
        steps = f"{config.sft.steps} steps of {config.sft.batch_size} sequences"
        print(f"Supervised warm start: {steps}, trainer {sizes(plan)}, in {run_dir}", flush=True)

    job = Job("sft", run_dir / "logs", trainer_role="sft", driver_role=None)
    _launch_showing(plan, job, node, prepare, run_dir, config.sft.steps)
    if node.is_head:
        print(f"Supervised weights are in {config.sft.output}")


def evaluate(plan: RunPlan, json_output: bool) -> None:
    """Greedy pass@1 of `model.path` on `data.eval`, through SGLang."""
    node = this_node()

    def prepare(_: Path) -> None:
        check_data(plan.config, plan.spec, "eval")
        check_rollout(plan.config)

    job = Job("eval", Path(plan.config.run_dir) / "eval" / "logs", trainer_role=None, driver_role="evaluate")
    folder = launch(plan, job, node, prepare)
    if node.is_head:
        result = json.loads((folder / "result.json").read_text())
        text = f"pass@1 {result['pass@1']:.3f} ({result['correct']} of {result['prompts']} prompts)"
        print(json.dumps(result) if json_output else text)


def export(plan: RunPlan, output: Path, step: int | None = None) -> None:
    """Writes the weights of a checkpoint (the newest, or that of `step`) as an HF checkpoint at `output`."""
    found = dict(complete_checkpoints(plan.config.run_dir))
    if not found or (step is not None and step not in found):
        there = ", ".join(map(str, found)) or "none"
        raise ConfigError(f"run_dir={plan.config.run_dir}: no checkpoint of step {'any' if step is None else step}; there: {there}")
    node, chosen = this_node(), max(found) if step is None else step
    request = json.dumps({"checkpoint": str(found[chosen]), "output": str(output)})
    job = Job("export", Path(plan.config.run_dir) / "export" / "logs", trainer_role="export", driver_role=None)
    launch(plan, job, node, lambda folder: (folder / "export.json").write_text(request))
    if node.is_head:
        print(f"Weights of step {chosen} are in {output}")


def _launch_showing(
    plan: RunPlan, job: Job, node: Node, prepare: Callable[[Path], None], run_dir: Path, steps: int, resume: Resume = Resume()
) -> None:
    """With the live display, on the node where people look."""
    if not node.is_head:
        launch(plan, job, node, prepare, resume=resume)
        return
    progress = Progress(run_dir, steps)

    def prepare_to_show(folder: Path) -> None:
        clear_statuses(run_dir)
        prepare(folder)

    try:
        launch(plan, job, node, prepare_to_show, progress.poll, resume)
    finally:
        progress.close()


def headline(plan: RunPlan, step: int, nodes: int) -> str:
    config = plan.config
    start = f"from the checkpoint of step {step}" if step else "from the start"
    engines = f"{config.generator.engines} engine{'s' * (config.generator.engines > 1)} TP{config.generator.tp}"
    where = f" on {nodes} nodes" if nodes > 1 else ""
    capacity = "unbounded" if config.async_.capacity is None else config.async_.capacity
    batch = f"{config.rollout.prompts_per_step} prompts x {config.rollout.n} samples"
    return (
        f"Asynchronous RL ({config.algorithm.name}, capacity {capacity}): {config.max_steps} steps {start}, "
        f"{batch}, trainer {sizes(plan)} -> {engines}{where}, in {config.run_dir}"
    )


def sizes(plan: RunPlan) -> str:
    """The trainer's parallel sizes above 1, such as TP2xDP4."""
    axes = {axis: getattr(plan.trainer_topology, axis) for axis in ("tp", "pp", "cp", "ep", "dp")}
    return "x".join(f"{axis.upper()}{size}" for axis, size in axes.items() if size > 1) or "on one rank"


def latest_checkpoint(run_dir: Path) -> Resume:
    found = complete_checkpoints(run_dir)
    return Resume(found[-1][0], str(found[-1][1])) if found else Resume()
