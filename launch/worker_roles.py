"""Builds and runs the process of each role: executors and channels, connected as in LlamaRL,
Algorithm 2.
"""

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
from megarl.controller import Controller
from megarl.evaluation.scores import evaluation_plan
from megarl.launch.gpus import gpus
from megarl.messaging.rendezvous import EVALUATOR, GENERATOR, Rendezvous
from megarl.plan.resolve import RunPlan, checked_before


def train_on_trainer(rank: int, launch_dir: Path) -> None:
    """One trainer rank of a run."""
    from megarl.messaging.process_groups import StopRequest

    stop = StopRequest()
    stop.listen()
    plan = load_plan(launch_dir, "train")
    rendezvous = Rendezvous.load(launch_dir)
    prepare_megatron(plan)
    from megarl.data.order import train_mixture
    from megarl.evaluation.engines import EvaluationSender
    from megarl.executors.trainer import TrainerExecutor
    from megarl.messaging.link import Peer
    from megarl.rollouts.buffer import Ledger, RolloutBuffer
    from megarl.rollouts.channel import RolloutsReceiver, judged
    from megarl.trainer.distributed import naming_peers
    from megarl.weight_sync.sender import WeightsSender

    config = plan.config
    link = Peer(f"trainer.{rank}", rendezvous.key, rendezvous.hub_address)
    ledger = Ledger.load(rendezvous.checkpoint) if rendezvous.checkpoint else Ledger()
    rollout = config.rollout
    judge = partial(judged, config=config)
    buffer = None
    if rank == 0:
        buffer = RolloutBuffer(
            rollout.prompts_per_step,
            config.async_.max_staleness,
            ledger,
            judge,
            train_mixture(config),
        )
    max_generated = (
        rollout.max_num_gen_batches and rollout.max_num_gen_batches * rollout.prompts_per_step
    )
    weights = WeightsSender(plan, link, stop)
    outgoing: list[WeightsSender] = [weights]
    if config.eval.engines:
        evaluator = Peer(link.name, rendezvous.key, rendezvous.evaluator_address)
        outgoing.append(EvaluationSender(evaluation_plan(plan), evaluator, stop))
    resend = partial(weights.send, repeat=True)
    rollouts = RolloutsReceiver(
        link, config.timeouts.rollouts_s, buffer, stop, resend, max_generated
    )
    with naming_peers("trainer", rank):
        executor = TrainerExecutor(plan, rank, rendezvous, rollouts.ledger)
        Controller(
            executor, incoming=[rollouts], outgoing=outgoing, max_steps=config.max_steps
        ).run()
    link.close()


def train_on_generator(rank: int, launch_dir: Path) -> None:
    """The generator executor of a run.

    When the run is stopped, it continues as long as trainer ranks need it, and is then killed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from megarl.executors.generator import GeneratorExecutor
    from megarl.messaging.link import Hub
    from megarl.reshard.layout import trainer_layout
    from megarl.rollouts.channel import RolloutsSender
    from megarl.trainer.cpu_support import layer_spec
    from megarl.weight_sync.content import sent_layout
    from megarl.weight_sync.receiver import InitialWeights, WeightsReceiver

    plan = load_plan(launch_dir, "train")
    rendezvous = Rendezvous.load(launch_dir)
    link = Hub(GENERATOR, rendezvous.key, rendezvous.hub_host, rendezvous.hub_port)
    base = trainer_layout(plan.spec, plan.trainer_topology, plan.config.model.dtype, layer_spec())
    weights = WeightsReceiver(
        plan, sent_layout(plan, base, layer_spec()), link, rendezvous.key_file
    )
    initial = InitialWeights(weights)
    with contextlib.closing(
        GeneratorExecutor(plan, rendezvous, RolloutsSender(link), lambda: weights.fixed)
    ) as executor:
        Controller(
            executor,
            incoming=[weights],
            outgoing=[],
            max_steps=plan.config.max_steps,
            initial=[initial],
        ).run()
        link.close()


def train_on_evaluator(rank: int, launch_dir: Path) -> None:
    """The driver of a run's engines that only evaluate. When the run is stopped, it is killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from megarl.evaluation.engines import EvaluationReceiver, evaluate_versions
    from megarl.messaging.link import Hub
    from megarl.reshard.layout import trainer_layout
    from megarl.trainer.cpu_support import layer_spec
    from megarl.weight_sync.content import sent_layout

    plan = evaluation_plan(load_plan(launch_dir, "train"))
    rendezvous = Rendezvous.load(launch_dir)
    base = trainer_layout(plan.spec, plan.trainer_topology, plan.config.model.dtype, layer_spec())
    with contextlib.closing(
        Hub(EVALUATOR, rendezvous.key, rendezvous.hub_host, rendezvous.evaluator_port)
    ) as link:
        weights = EvaluationReceiver(
            plan, sent_layout(plan, base, layer_spec()), link, rendezvous.key_file
        )
        asyncio.run(evaluate_versions(plan, rendezvous, weights))


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
                *(engine.generate([1] * 16, sampling, n=4) for engine in fleet.engines)
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
    "generator": train_on_generator,
    "evaluator": train_on_evaluator,
    "sft": sft,
    "reward_model": reward_model,
    "evaluate": evaluate,
    "export": export,
    "warm": warm,
}
