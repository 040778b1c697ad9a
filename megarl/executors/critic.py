"""A policy's critic: a model with a scalar head, on the ranks of the trainer and with its sizes."""

from __future__ import annotations

from dataclasses import replace

from megarl.plan.critic import critic_path
from megarl.plan.resolve import RunPlan
from megarl.trainer.step import MegatronTrainer


def make_critic(plan: RunPlan, policy: MegatronTrainer) -> MegatronTrainer:
    config = plan.config
    assert plan.critic is not None
    critic = MegatronTrainer(
        plan.critic.with_scalar_head(),
        plan.trainer_topology,
        replace(config.trainer, routing_replay=False),  # what was recorded is the choice of the policy's routers
        config.model.dtype,
        config.seed,
        total_steps=config.max_steps * config.trainer.optimizer_steps,
        timeout_s=config.timeouts.collective_s,
        optimizer=config.critic.optimizer,
    )
    # A rank has the tokens of the policy's share of a batch, so both must share it out alike, whatever the cost of attention in each.
    critic.squares = policy.squares
    return critic


def begin_critic(critic: MegatronTrainer, plan: RunPlan) -> None:
    """Loads the first weights."""
    new_head = "zeros" if plan.config.critic.head == "zeros" else "random"
    assert plan.critic is not None
    critic.load_hf(critic_path(plan.config)[1] or plan.weights_path, None if plan.critic.head == critic.spec.head else new_head)
