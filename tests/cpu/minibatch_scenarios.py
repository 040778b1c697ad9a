"""Scenarios of the trainer ranks in test_trainer_minibatches.py: batches of several optimizer
steps, each rank only with its own samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from trainer_rig import gradients, make, plain_adam

from megarl.algorithms.registry import make_algorithm
from megarl.config.load import load_config
from megarl.config.schema import OptimizerConfig
from megarl.executors.batch_steps import BatchSteps, kept_rows, step_metrics


def scenario_several_steps(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Trains on the batches, exports the weights after each, and saves after the second.

    `resumed`: continues from that checkpoint.
    """
    from megarl.trainer import checkpoint

    batches = torch.load(scenario["batches"], weights_only=False)
    config = load_config(scenario["config"], scenario["overrides"])
    trainer = make(
        scenario,
        OptimizerConfig(**scenario["optimizer"]),
        total_steps=len(batches) * config.trainer.optimizer_steps,
    )
    steps = BatchSteps(trainer, make_algorithm(config.algorithm), config)
    saved = out / f"{scenario['name'].removesuffix('.resumed')}.checkpoint"
    trainer.load_hf(scenario["model"])
    trainer.hold_reference()
    resumed = scenario["name"].endswith(".resumed")
    if resumed:
        checkpoint.load(trainer, saved)
    batch_records = []
    held_tokens = []
    for batch in batches[2:] if resumed else batches:
        local_batch = steps.assign(replace(batch, numbers={}))[trainer.coordinate.dp]
        results = steps.train(
            replace(batch, numbers={place: batch.numbers[place] for place in local_batch})
        )
        trainer.export_hf(str(out / f"{scenario['name']}.{batch.step}.hf"), scenario["model"])
        optimizer_steps = [
            (result.loss, result.grad_norm, result.learning_rate) for result in results
        ]
        batch_records.append((optimizer_steps, step_metrics(results, steps.algorithm)))
        held_tokens.append(local_batch)
        if batch.step == 1 and not resumed:
            checkpoint.save(trainer, saved, {"step": 2})
    return {"told": batch_records, "held": held_tokens}


def scenario_one_optimizer_step(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """One optimizer step with the proximal policy scored before it, and one without, in which the
    loss uses the policy itself.
    """
    batches = torch.load(scenario["batches"], weights_only=False)
    config = load_config(scenario["config"], scenario["overrides"])
    trainer = make(scenario, plain_adam(lr=0.0))
    trainer.load_hf(scenario["model"])
    steps = BatchSteps(trainer, make_algorithm(config.algorithm), config)
    temperature = config.rollout.temperature
    sequences, (minibatch,) = steps._cut(batches[0])
    ordered = [sequences[place] for place in minibatch.places]
    logprobs = []
    for proximal in (trainer.token_logprobs(ordered, temperature=temperature), None):
        result = trainer.train_step(
            ordered,
            steps.algorithm.loss,
            minibatch.denominator,
            temperature=temperature,
            proximal_logprobs=proximal,
        )
        logprobs.append({"loss": result.loss, "sums": result.sums, "grads": gradients(trainer)})
    return {"scored": logprobs[0], "left_out": logprobs[1]}


def scenario_meters(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """The meters of a batch's optimizer steps, each rank only with its own samples."""
    batch = torch.load(scenario["batch"], weights_only=False)
    config = load_config(scenario["config"], scenario["overrides"])
    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    steps = BatchSteps(trainer, make_algorithm(config.algorithm), config)
    local_batch = steps.assign(replace(batch, numbers={}))[trainer.coordinate.dp]
    results = steps.train(
        replace(batch, numbers={place: batch.numbers[place] for place in local_batch})
    )
    histograms = {
        name: histogram.counts for name, histogram in results[0].agreement.histograms().items()
    }
    return {
        "metrics": step_metrics(results, steps.algorithm),
        "histograms": histograms,
        "kept": kept_rows(results),
    }
