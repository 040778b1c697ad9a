"""Runs the process of each role, by the names that the launcher gives to megarl.launch.worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megarl.base.files import write_whole
from megarl.config.load import load_config
from megarl.launch.gpus import gpus
from megarl.messaging.rendezvous import PURPOSES, Rendezvous
from megarl.plan.resolve import RunPlan, checked_before


def train_on_trainer(rank: int, launch_dir: Path) -> None:
    """One trainer rank of a run."""
    from megarl.messaging.process_groups import StopRequest

    stop = StopRequest()
    stop.listen()
    plan = load_plan(launch_dir, "train")
    prepare_megatron(plan)
    from megarl.train_loop import run_trainer_rank

    run_trainer_rank(plan, rank, Rendezvous.load(launch_dir), stop)


def train_on_driver(rank: int, launch_dir: Path, role: str) -> None:
    """The driver of a run's engines of one purpose."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from megarl.train_loop import DRIVERS

    DRIVERS[role](load_plan(launch_dir, "train"), Rendezvous.load(launch_dir))


def sft(rank: int, launch_dir: Path) -> None:
    """One trainer rank of the supervised warm start."""
    plan = load_plan(launch_dir)
    rendezvous = Rendezvous.load(launch_dir)
    prepare_megatron(plan)
    from megarl.executors.sft import run_sft_rank
    from megarl.trainer.distributed import naming_peers

    with naming_peers("sft", rank):
        run_sft_rank(plan, rank, rendezvous)


def reward_model(rank: int, launch_dir: Path) -> None:
    """One trainer rank of the training of a reward model."""
    plan = load_plan(launch_dir, "reward-model")
    prepare_megatron(plan)
    from megarl.roles.training import run_reward_model_rank
    from megarl.trainer.distributed import naming_peers

    with naming_peers("reward_model", rank):
        run_reward_model_rank(plan, rank)


def evaluate(rank: int, launch_dir: Path) -> None:
    """Evaluates the weights that the engines were started with.

    Writes result.json to the launch folder.
    """
    from megarl.evaluation.evaluate import evaluate_engines

    result = asyncio.run(
        evaluate_engines(load_plan(launch_dir, "eval"), Rendezvous.load(launch_dir))
    )
    write_whole(launch_dir / "result.json", json.dumps(result))


def label(rank: int, launch_dir: Path) -> None:
    """Samples and scores the responses of which pairs are made.

    Writes result.json, the number of prompts, to the launch folder.
    """
    from megarl.labels.label import label_engines

    prompts = asyncio.run(
        label_engines(load_plan(launch_dir, "label"), Rendezvous.load(launch_dir))
    )
    write_whole(launch_dir / "result.json", json.dumps(prompts))


def warm(rank: int, launch_dir: Path) -> None:
    """Waits for the engines, which compile kernels when they start.

    Then sends requests, since some kernels are compiled only then.
    """
    from megarl.generator.completions import Sampling
    from megarl.rollouts.rollout import open_fleet

    async def ask() -> None:
        plan = load_plan(launch_dir, "warm")
        sampling = Sampling(temperature=1.0, max_tokens=8)
        async with contextlib.AsyncExitStack() as resources:
            fleet = await open_fleet(plan, Rendezvous.load(launch_dir), resources)
            await asyncio.gather(
                *(engine.client.generate([1] * 16, sampling, n=4) for engine in fleet.engines)
            )

    asyncio.run(ask())


def export(rank: int, launch_dir: Path) -> None:
    """One trainer rank of the export of a checkpoint to HF format."""
    plan = load_plan(launch_dir)
    prepare_megatron(plan)
    from megarl.executors.policy import export_rank
    from megarl.trainer.distributed import naming_peers

    with naming_peers("export", rank):
        export_rank(plan, **json.loads((launch_dir / "export.json").read_text(encoding="utf-8")))


def prepare_megatron(plan: RunPlan) -> None:
    """Must run before anything imports the trainer: see megarl.trainer.cpu_support.

    Raises RuntimeError as `check_gpus` does.
    """
    from megarl.trainer import cpu_support

    check_gpus(plan)
    cpu_support.install()


def check_gpus(plan: RunPlan) -> None:
    """Raises RuntimeError if the trainer would train on the CPU by mistake: the node has GPUs and
    the run is planned for them, but PyTorch was built without CUDA or for a newer driver.
    """
    import torch

    gpu_count = len(gpus())
    if not gpu_count or torch.cuda.is_available() or plan.config.cluster.gpu == "cpu":
        return
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        cpu = "with cluster.gpu=cpu it would train on the CPU"
        raise RuntimeError(
            f"this node has {gpu_count} GPUs, but torch {torch.__version__} cannot use them "
            f"({error}); {cpu}"
        ) from error


def load_plan(launch_dir: Path, command: str | None = None) -> RunPlan:
    """The plan that the launcher of `command` has resolved and checked."""
    return checked_before(load_config(launch_dir / "config.yaml"), command)


ROLES: dict[str, Callable[[int, Path], None]] = {
    "trainer": train_on_trainer,
    **{purpose.driver: partial(train_on_driver, role=purpose.driver) for purpose in PURPOSES},
    "sft": sft,
    "reward_model": reward_model,
    "evaluate": evaluate,
    "label": label,
    "export": export,
    "warm": warm,
}
