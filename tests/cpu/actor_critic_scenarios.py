"""Scenarios of the trainer ranks in test_trainer_ppo.py: batches of several optimizer steps for a
policy and its critic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from trainer_rig import make

from megarl.algorithms.registry import make_algorithm
from megarl.config.load import load_config
from megarl.config.schema import OptimizerConfig
from megarl.critic.executor import ActorCriticSteps
from megarl.executors.batch_steps import step_metrics
from megarl.models.registry import load_spec


def scenario_ppo(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Trains on the batches, exports both models after each, and saves after the second.

    `resumed`: continues from that checkpoint.
    """
    from megarl.trainer import checkpoint

    batches = torch.load(scenario["batches"], weights_only=False)
    config = load_config(scenario["config"], scenario["overrides"])
    total = len(batches) * config.trainer.optimizer_steps
    of_critic = load_spec(scenario["critic"])
    policy = make(scenario, OptimizerConfig(**scenario["optimizer"]), total)
    critic = make(
        scenario,
        OptimizerConfig(**scenario["critic_optimizer"]),
        total,
        spec=of_critic.with_scalar_head(),
    )
    critic.squares = policy.squares
    steps = ActorCriticSteps(policy, make_algorithm(config.algorithm), config, critic=critic)
    name = scenario["name"].removesuffix(".resumed")
    saved = out / f"{name}.checkpoint"
    policy.load_hf(scenario["model"])
    policy.hold_reference()
    resumed = scenario["name"].endswith(".resumed")
    if resumed:
        checkpoint.load(policy, saved)
        checkpoint.load_critic(critic, saved)
    else:
        critic.load_hf(scenario["critic"], None if of_critic.head == "scalar" else "zeros")
    batch_records = []
    for batch in batches[2:] if resumed else batches:
        local_batch = steps.assign(replace(batch, numbers={}))[policy.coordinate.dp]
        results = steps.train(
            replace(batch, numbers={place: batch.numbers[place] for place in local_batch})
        )
        for role, trainer in (("policy", policy), ("critic", critic)):
            trainer.export_hf(
                str(out / f"{scenario['name']}.{batch.step}.{role}"),
                scenario["model" if role == "policy" else "critic"],
            )
        optimizer_steps = [(result.grad_norm, result.learning_rate) for result in results]
        batch_records.append(
            (optimizer_steps, dict(steps.value_metrics()), step_metrics(results, steps.algorithm))
        )
        if batch.step == 1 and not resumed:
            checkpoint.save(policy, saved, {"step": 2}, critic=critic)
    return {"told": batch_records}
