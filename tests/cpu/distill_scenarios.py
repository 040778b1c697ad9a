"""Scenarios of the trainer ranks in test_trainer_distill.py: batches of several steps with
teachers, and a reference model of another shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from trainer_rig import logprob_rows, make, plain_adam, sequences

from megarl.algorithms.registry import make_algorithm
from megarl.base.geometry import TrainerTopology
from megarl.config.load import load_config
from megarl.config.schema import OptimizerConfig, TrainerConfig
from megarl.executors.batch_steps import BatchSteps, step_metrics
from megarl.models.registry import load_spec
from megarl.teachers.plan import teachers_of
from megarl.teachers.trainer import Teachers


def frozen(scenario: dict[str, Any], path: str, policy: Any) -> Any:
    from megarl.trainer.model import MegatronModel

    settings = TrainerConfig(**{"logprob_chunk_tokens": 16, **scenario.get("trainer", {})})
    model = MegatronModel(
        load_spec(path),
        TrainerTopology(**scenario["topology"]),
        settings,
        "float32",
        1,
        timeout_s=60,
    )
    model.squares = policy.squares
    model.load_hf(path)
    return model


def scenario_distill(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Trains on the batches, each rank only with its own samples, and exports the weights after
    each batch.
    """
    batches = torch.load(scenario["batches"], weights_only=False)
    config = load_config(scenario["config"], scenario["overrides"])
    trainer = make(
        scenario,
        OptimizerConfig(**scenario["optimizer"]),
        total_steps=len(batches) * config.trainer.optimizer_steps,
    )
    trainer.load_hf(scenario["model"])
    models = {
        name: frozen(scenario, role.path, trainer)
        for name, role in config.roles.items()
        if role.on == "trainer"
    }
    before = [weights.clone() for weights in local_weights(models)]
    algorithm = make_algorithm(config.algorithm, teachers_of(config))
    steps = BatchSteps(trainer, algorithm, config, teachers=Teachers(config, models))
    batch_records = []
    for batch in batches:
        local_batch = steps.assign(replace(batch, numbers={}))[trainer.coordinate.dp]
        results = steps.train(
            replace(batch, numbers={place: batch.numbers[place] for place in local_batch})
        )
        trainer.export_hf(str(out / f"{scenario['name']}.{batch.step}.hf"), scenario["model"])
        batch_records.append(
            (
                [(result.loss, result.grad_norm) for result in results],
                step_metrics(results, algorithm),
            )
        )
    after = local_weights(models)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
        "a teacher has changed"
    )
    return {"told": batch_records}


def local_weights(models: dict[str, Any]) -> list[torch.Tensor]:
    """This rank's weights: torch.equal of whole sharded parameters is collective."""
    return [weights for model in models.values() for weights in model.local_parameters().values()]


def scenario_other_reference(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    trainer = make(scenario, plain_adam(lr=0.0))
    trainer.load_hf(scenario["model"])
    batch = sequences(trainer.spec.vocab_size)
    trainer.hold_reference(frozen(scenario, scenario["reference"], trainer))
    return {
        "reference": logprob_rows(trainer, batch, temperature=0.7, model="reference"),
        "policy": logprob_rows(trainer, batch, temperature=0.7),
    }
