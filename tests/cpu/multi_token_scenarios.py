"""Scenarios of the real trainers in test_trainer_multi_token.py.

A function `scenario_…` runs on every rank, and its result is saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_rig import all_logprobs, make, one_step, plain_adam, poison_padding, sequences

from megarl.models.registry import load_spec


def of_mode(scenario: dict[str, Any], mode: str, **optimizer: Any) -> Any:
    spec = load_spec(scenario["model"], mtp=mode != "ignore")
    # several microbatches
    settings = {**scenario.get("trainer", {}), "mtp": mode, "max_tokens_per_microbatch": 48}
    adam = plain_adam(lr=0.0)
    for key, value in optimizer.items():
        setattr(adam, key, value)
    trainer = make(scenario | {"trainer": settings}, adam, spec=spec)
    trainer.load_hf(scenario["model"])
    return trainer


def scenario_multi_token(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Export, gradients, and weights after three clipped steps, with the layer ignored, kept and
    trained.
    """
    results: dict[str, Any] = {}
    for mode in ("ignore", "keep", "train"):
        trainer = of_mode(scenario, mode)
        batch = sequences(trainer.spec.vocab_size)
        if mode != "ignore":
            trainer.export_hf(str(out / f"{scenario['name']}.{mode}.hf"), scenario["model"])
        poison_padding(trainer)
        results[mode] = {"step": one_step(trainer, batch), "none": one_step(trainer, [])}
        trainer = of_mode(scenario, mode, lr=1e-2, clip_grad=0.5)
        results[mode]["steps"] = [vars(one_step_of(trainer, batch)) for _ in range(3)]
        results[mode]["after"] = {
            name: values.clone() for name, values in trainer.local_parameters().items()
        }
        results[mode]["logprobs"] = all_logprobs(trainer, batch)
    return results


def one_step_of(trainer: Any, batch: list[Any]) -> Any:
    from trainer_rig import DENOMINATOR, TEMPERATURE, weighted_nll

    return trainer.train_step(batch, weighted_nll, DENOMINATOR, temperature=TEMPERATURE)


def scenario_multi_token_checkpoint(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Makes two steps and a checkpoint; with `load`, reads it."""
    from megarl.trainer import checkpoint

    trainer = of_mode(scenario, scenario["mode"], lr=1e-2)
    batch = sequences(trainer.spec.vocab_size)
    if scenario["load"]:
        checkpoint.load(trainer, scenario["checkpoint"])
    else:
        for _ in range(2):
            one_step_of(trainer, batch)
        checkpoint.save(trainer, scenario["checkpoint"], {})
    trainer.export_hf(str(out / f"{scenario['name']}.hf"), scenario["model"])
    return {"third": one_step_of(trainer, batch).mtp_loss}
