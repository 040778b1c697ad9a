"""The commands on one host: a RunPlan becomes processes, watched until they are done."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megarl.messaging.link import RunKey
from megarl.config.errors import ConfigError
from megarl.config.load import dump_config
from megarl.data.check import check_data
from megarl.executors.checkpoints import complete_checkpoints
from megarl.generator.server import EngineKeys, EngineSettings, server_command
from megarl.launch.environment import engine_devices, one_thread, trainer_environment
from megarl.launch.processes import ProcessGroup, ProcessSpec
from megarl.launch.rendezvous import Rendezvous, free_ports
from megarl.launch.watch import termination_as_exit, watch
from megarl.observe.progress import Progress
from megarl.plan.resolve import RunPlan

HOST = "127.0.0.1"


def train(plan: RunPlan) -> None:
    """Runs or resumes the RL run of `plan`; ends with the summary on stdout. Raises ProcessFailed."""
    from megarl.observe.report import finish_report

    check_data(plan.config, plan.spec, "train")
    config, run_dir = plan.config, Path(plan.config.run_dir)
    step, checkpoint = latest_checkpoint(run_dir)
    if step < config.max_steps:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(dump_config(config))
        launch_dir = prepare_launch(plan, "train")
        rendezvous = make_rendezvous(plan, launch_dir, step, checkpoint)
        print(headline(plan, step))
        with termination_as_exit(), ProcessGroup(run_dir / "logs") as processes:
            progress = Progress(run_dir, config.max_steps)
            try:
                start_engines(processes, plan, rendezvous)
                workers = start_trainers(processes, plan, "trainer", launch_dir)
                workers |= start_worker(processes, "generator", launch_dir)
                watch(processes, workers, progress.poll)
            finally:
                progress.close()
    else:
        print(f"{run_dir} is complete: {step} of {config.max_steps} steps. Start another with run_dir=… or go on with a larger max_steps.")
    print(finish_report(run_dir))


def sft(plan: RunPlan) -> None:
    """Supervised warm start; leaves an HF checkpoint at `sft.output`. A finished one is kept as it is."""
    config, run_dir = plan.config, Path(plan.config.run_dir) / "sft"
    if (Path(config.sft.output) / "config.json").exists():
        print(f"{config.sft.output} is there already: nothing to do. Remove it to train it again.")
        return
    check_data(config, plan.spec, "sft")
    launch_dir = prepare_launch(plan, "sft")
    print(f"Supervised warm start: {config.sft.steps} steps of {config.sft.batch_size} sequences, trainer {sizes(plan)}, in {run_dir}")
    with termination_as_exit(), ProcessGroup(run_dir / "logs") as processes:
        progress = Progress(run_dir, config.sft.steps)
        try:
            watch(processes, start_trainers(processes, plan, "sft", launch_dir), progress.poll)
        finally:
            progress.close()
    print(f"Supervised weights are in {config.sft.output}")


def evaluate(plan: RunPlan, json_output: bool) -> None:
    """Greedy pass@1 of `model.path` on `data.eval`, through SGLang."""
    if plan.config.data.eval is None:
        raise ConfigError("data.eval: not set; name the data set to evaluate on")
    check_data(plan.config, plan.spec, "eval")
    launch_dir = prepare_launch(plan, "evaluate")
    rendezvous = make_rendezvous(plan, launch_dir)
    with termination_as_exit(), ProcessGroup(Path(plan.config.run_dir) / "eval" / "logs") as processes:
        start_engines(processes, plan, rendezvous)
        watch(processes, start_worker(processes, "evaluate", launch_dir), poll=lambda: None)
    result = json.loads((launch_dir / "result.json").read_text())
    print(json.dumps(result) if json_output else f"pass@1 {result['pass@1']:.3f} ({result['correct']} of {result['prompts']} prompts)")


def export(plan: RunPlan, output: Path, step: int | None = None) -> None:
    """Writes the weights of a checkpoint (the newest, or that of `step`) as an HF checkpoint at `output`."""
    found = dict(complete_checkpoints(plan.config.run_dir))
    if not found or (step is not None and step not in found):
        there = ", ".join(map(str, found)) or "none"
        raise ConfigError(f"run_dir={plan.config.run_dir}: no checkpoint of step {'any' if step is None else step}; there: {there}")
    chosen = max(found) if step is None else step
    launch_dir = prepare_launch(plan, "export")
    (launch_dir / "export.json").write_text(json.dumps({"checkpoint": str(found[chosen]), "output": str(output)}))
    with termination_as_exit(), ProcessGroup(launch_dir / "logs") as processes:
        watch(processes, start_trainers(processes, plan, "export", launch_dir), poll=lambda: None)
    print(f"Weights of step {chosen} are in {output}")


def headline(plan: RunPlan, step: int) -> str:
    config = plan.config
    start = f"from the checkpoint of step {step}" if step else "from the start"
    engines = f"{config.generator.engines} engine{'s' * (config.generator.engines > 1)} TP{config.generator.tp}"
    return (
        f"Asynchronous RL ({config.algorithm.name}, capacity {'unbounded' if config.async_.capacity is None else config.async_.capacity}): {config.max_steps} steps {start}, "
        f"{config.rollout.prompts_per_step} prompts x {config.rollout.n} samples, trainer {sizes(plan)} -> {engines}, in {config.run_dir}"
    )


def sizes(plan: RunPlan) -> str:
    """The trainer's parallel sizes above 1, such as TP2xDP4."""
    axes = {axis: getattr(plan.trainer_topology, axis) for axis in ("tp", "pp", "cp", "ep", "dp")}
    return "x".join(f"{axis.upper()}{size}" for axis, size in axes.items() if size > 1) or "on one rank"


def latest_checkpoint(run_dir: Path) -> tuple[int, str]:
    """(step, folder) to resume from; (0, "") where there is none."""
    found = complete_checkpoints(run_dir)
    return (found[-1][0], str(found[-1][1])) if found else (0, "")


def make_rendezvous(plan: RunPlan, launch_dir: Path, start_step: int = 0, checkpoint: str = "") -> Rendezvous:
    """Fresh keys and free ports for one launch, saved in its folder for the processes to come."""
    engines = plan.generator_topology.engines
    hub_port, *engine_ports = free_ports(1 + engines)
    keys = EngineKeys.generate()
    key_file = launch_dir / "message_key.json"
    RunKey.generate().save(key_file)
    rendezvous = Rendezvous(
        hub_host=HOST,
        hub_port=hub_port,
        key_file=str(key_file.resolve()),
        engine_hosts=[HOST] * engines,
        engine_ports=engine_ports,
        engine_key=keys.api,
        engine_admin_key=keys.admin,
        start_step=start_step,
        checkpoint=checkpoint,
    )
    rendezvous.save(launch_dir)
    return rendezvous


def prepare_launch(plan: RunPlan, command: str) -> Path:
    """The launch folder: what this launch's processes read, apart from what the run keeps."""
    launch_dir = Path(plan.config.run_dir) / ".launch" / command
    launch_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    (launch_dir / "config.yaml").write_text(dump_config(plan.config))
    return launch_dir


def start_engines(processes: ProcessGroup, plan: RunPlan, rendezvous: Rendezvous) -> None:
    config = plan.config
    for engine, port in enumerate(rendezvous.engine_ports):
        settings = EngineSettings(
            model_path=plan.weights_path,
            dtype=config.model.dtype,
            port=port,
            context_length=plan.spec.max_position_embeddings,
            max_running_requests=config.generator.max_concurrency,
            tp=config.generator.tp,
            ep=config.generator.ep,
            host=HOST,
            quantization=config.generator.quantization,
            kv_cache_tokens=config.generator.kv_cache_tokens,
            mem_fraction=config.generator.mem_fraction,
            seed=config.seed + engine,
        )
        keys = EngineKeys(api=rendezvous.engine_key, admin=rendezvous.engine_admin_key)
        argv, environment = server_command(settings, keys, config.generator.server_args)
        processes.start(ProcessSpec(f"engine.{engine}", argv, {**environment, **engine_devices(plan, engine)}))


def start_trainers(processes: ProcessGroup, plan: RunPlan, role: str, launch_dir: Path) -> set[str]:
    """One process per trainer rank, in the given role; returns their names."""
    (port,) = free_ports(1)
    names = set()
    for rank in range(plan.trainer_topology.world_size):
        names |= start_worker(processes, role, launch_dir, rank, trainer_environment(plan, rank, HOST, port))
    return names


def start_worker(
    processes: ProcessGroup, role: str, launch_dir: Path, rank: int = 0, environment: dict[str, str] | None = None
) -> set[str]:
    argv = [sys.executable, "-m", "megarl.launch.worker", role, str(rank), str(launch_dir)]
    name = f"{role}.{rank}"
    processes.start(ProcessSpec(name, argv, environment or one_thread(), dumps_stacks=True))
    return {name}
