"""The training loop, on both sides, as LlamaRL connects them (Algorithms 1 and 2).

    every trainer rank                          the generator, which drives all engines

    send weights 0                         →    take weights 0, into every engine
    while step < max_steps:                     while step < max_steps:
        batch of scored groups             ←        wait until the weights are at most
        train: weights step + 1                         async.capacity steps old
        send weights step + 1              →        let the batch's prompts begin, and send
        save a checkpoint, if it is due                 their groups as they finish
                                                take the last weights, evaluate them

Both sides are a `Controller` over an executor and its ends of two channels: rollouts and weights.
The controller receives, makes a step, sends. Beside the generator's loop its background tasks roll
prompts out (rollouts/stream.py), and take weights as soon as they are offered: hold, let trainer
ranks write, audit, release (weight_sync/receiver.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from megarl.config.schema import MASK
from megarl.controller import Controller
from megarl.evaluation.scores import evaluation_plan
from megarl.messaging.link import Hub, Peer
from megarl.messaging.process_groups import StopRequest
from megarl.messaging.rendezvous import EVALUATION, GENERATOR, ROLLOUTS, Rendezvous
from megarl.plan.resolve import RunPlan
from megarl.reshard.layout import Layout


def run_trainer_rank(plan: RunPlan, rank: int, rendezvous: Rendezvous, stop: StopRequest) -> None:
    """One trainer rank of a run. Rank 0 also keeps the buffer and the ledger of all groups.

    Megatron must be prepared before (megarl.trainer.cpu_support). `stop`: the request that makes
    the run end after its current step.
    """
    from megarl.data.order import train_mixture
    from megarl.evaluation.engines import EvaluationSender
    from megarl.executors.trainer import TrainerExecutor
    from megarl.rollouts.buffer import Ledger, RolloutBuffer
    from megarl.rollouts.channel import RolloutsReceiver, judged
    from megarl.trainer.distributed import naming_peers
    from megarl.weight_sync.sender import WeightsSender

    config = plan.config
    prompts_per_step = config.rollout.prompts_per_step
    link = Peer(f"trainer.{rank}", rendezvous.key, rendezvous.hub_address(ROLLOUTS))
    weights = WeightsSender(plan, link, stop)
    outgoing: list[WeightsSender] = [weights]
    if config.eval.engines:
        evaluator = Peer(link.name, rendezvous.key, rendezvous.hub_address(EVALUATION))
        outgoing.append(EvaluationSender(evaluation_plan(plan), evaluator, stop))
    buffer = None
    if rank == 0:
        buffer = RolloutBuffer(
            prompts_per_step,
            config.async_.max_staleness,
            Ledger.load(rendezvous.checkpoint) if rendezvous.checkpoint else Ledger(),
            partial(judged, config=config),
            train_mixture(config),
            masks=config.async_.too_old == MASK,
        )
    max_batches = config.rollout.max_num_gen_batches
    rollouts = RolloutsReceiver(
        link,
        config.timeouts.rollouts_s,
        buffer,
        stop,
        partial(weights.send, repeat=True),
        max_batches and max_batches * prompts_per_step,
    )
    with naming_peers("trainer", rank):
        executor = TrainerExecutor(plan, rank, rendezvous, rollouts.ledger, awaits=rollouts.awaits)
        Controller(
            executor, incoming=[rollouts], outgoing=outgoing, max_steps=config.max_steps
        ).run()
    link.close()


def run_generator(plan: RunPlan, rendezvous: Rendezvous) -> None:
    """The generator of a run.

    When the run is stopped, it continues as long as trainer ranks need it, and is then killed.
    """
    from megarl.executors.generator import GeneratorExecutor
    from megarl.rollouts.channel import RolloutsSender
    from megarl.weight_sync.receiver import InitialWeights, WeightsReceiver

    port = rendezvous.hub_ports[ROLLOUTS.driver]
    link = Hub(GENERATOR, rendezvous.key, rendezvous.hub_host, port)
    weights = WeightsReceiver(plan, _trainer_layout(plan), link, rendezvous.key_file)
    rollouts = RolloutsSender(link)
    with contextlib.closing(
        GeneratorExecutor(plan, rendezvous, rollouts, lambda: weights.fixed)
    ) as executor:
        Controller(
            executor,
            incoming=[weights],
            outgoing=[],
            max_steps=plan.config.max_steps,
            initial=[InitialWeights(weights)],
        ).run()
        link.close()


def run_evaluator(plan: RunPlan, rendezvous: Rendezvous) -> None:
    """The driver of a run's engines that only evaluate. When the run is stopped, it is killed.

    It has no step of its own: it takes a version, evaluates it, and takes the newest one then.
    """
    from megarl.evaluation.engines import EVALUATOR, EvaluationReceiver, evaluate_versions

    plan = evaluation_plan(plan)
    port = rendezvous.hub_ports[EVALUATION.driver]
    with contextlib.closing(Hub(EVALUATOR, rendezvous.key, rendezvous.hub_host, port)) as link:
        weights = EvaluationReceiver(plan, _trainer_layout(plan), link, rendezvous.key_file)
        asyncio.run(evaluate_versions(plan, rendezvous, weights))


DRIVERS = {ROLLOUTS.driver: run_generator, EVALUATION.driver: run_evaluator}


def _trainer_layout(plan: RunPlan) -> Layout:
    """The layout of the weights that the trainer ranks send."""
    from megarl.reshard.layout import trainer_layout
    from megarl.trainer.cpu_support import layer_spec
    from megarl.weight_sync.content import sent_layout

    layers = layer_spec()
    held = trainer_layout(plan.spec, plan.trainer_topology, plan.config.model.dtype, layers)
    return sent_layout(plan, held, layers)
