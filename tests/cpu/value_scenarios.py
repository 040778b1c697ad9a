"""Scenarios of the trainer ranks in test_trainer_values.py: models with a scalar head, alone and
beside a policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainer_rig import DENOMINATOR, gradients, make, one_step, plain_adam, sequences

from megarl.algorithms.base import LossOutput
from megarl.models.registry import load_spec
from megarl.models.spec import LM


def targets_of(batch: list[Any]) -> list[np.ndarray]:
    """The target values of a sequence's tokens."""
    return [
        np.sin(np.arange(len(sequence), dtype=np.float32) + len(sequence)) for sequence in batch
    ]


def squared_error(values: torch.Tensor, microbatch: Any) -> LossOutput:
    assert values.dtype == torch.float32
    terms = torch.where(
        microbatch.loss_mask,
        (values - microbatch.returns).square() * (1 + microbatch.old_values),
        0.0,
    )
    return LossOutput(
        terms.sum(),
        {
            "tokens": microbatch.loss_mask.sum(),
            "values": values.detach()[microbatch.loss_mask].sum(),
        },
    )


def value_step(trainer: Any, batch: list[Any]) -> dict[str, Any]:
    targets = targets_of(batch)
    result = trainer.train_step(
        batch, squared_error, DENOMINATOR, old_values=[row**2 for row in targets], returns=targets
    )
    result.check_tokens(sum(sum(sequence.loss_mask[1:]) for sequence in batch))
    return {**vars(result), "grads": gradients(trainer)}


def scalar(scenario: dict[str, Any], lr: float) -> Any:
    """The trainer of the scenario's model, with a scalar head whether or not the checkpoint has
    one.
    """
    return make(scenario, plain_adam(lr), spec=load_spec(scenario["model"]).with_scalar_head())


def scenario_values(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    trainer = scalar(scenario, lr=0.0)
    trainer.load_hf(scenario["model"])
    trainer.export_hf(str(out / (scenario["name"] + ".hf")), scenario["model"])
    batch = sequences(trainer.spec.vocab_size)
    results = {
        "values": trainer.token_values(batch),
        "all": value_step(trainer, batch),
        "none": value_step(trainer, []),
    }
    trainer.max_tokens = 48  # several microbatches of different shapes
    return results | {"microbatches": value_step(trainer, batch)}


def scenario_new_head(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Begins with a causal model's checkpoint, with each kind of new head."""
    trainer = scalar(scenario, lr=0.0)
    for new_head in ("zeros", "random"):
        trainer.load_hf(scenario["model"], new_head)
        trainer.export_hf(str(out / f"{scenario['name']}.{new_head}.hf"), scenario["model"])
    return {}


def scenario_policy_and_critic(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Two models make steps in turn on the same ranks, and each alone.

    Then the critic continues from its checkpoint.
    """
    from megarl.trainer import checkpoint

    def new(role: str) -> Any:
        trainer = make({**scenario, "model": scenario[role]}, plain_adam(1e-2))
        trainer.load_hf(scenario[role])
        return trainer

    def steps(*trainers: Any) -> dict[str, Any]:
        """By head: the losses of three steps, and log-probs or values after them."""
        losses = [
            [
                one_step(t, batch)["loss"] if t.spec.head == LM else value_step(t, batch)["loss"]
                for t in trainers
            ]
            for _ in range(3)
        ]
        outputs = [
            t.token_logprobs(batch) if t.spec.head == LM else t.token_values(batch)
            for t in trainers
        ]
        return {
            t.spec.head: outcome
            for t, outcome in zip(trainers, zip(zip(*losses), outputs), strict=True)
        }

    policy = new("policy")
    critic = new("critic")
    batch = sequences(policy.spec.vocab_size)
    together = steps(policy, critic)
    path = out / f"{scenario['name']}.checkpoint"
    checkpoint.save(critic, path, {"step": 3})
    after = value_step(critic, batch)["loss"]
    one_step(policy, batch)
    lone_critic = new("critic")
    state = checkpoint.load(lone_critic, path)
    resumed = value_step(lone_critic, batch)["loss"]
    return {
        "together": together,
        "alone": steps(new("policy")) | steps(new("critic")),
        "after": after,
        "resumed": resumed,
        "state": state,
    }
