"""Exports a run's checkpoint as an HF checkpoint."""

from __future__ import annotations

from typing import Any

from megarl.config.errors import RunError
from megarl.plan.resolve import RunPlan
from megarl.trainer import checkpoint
from megarl.trainer.distributed import init_distributed, shutdown_distributed
from megarl.trainer.lora import LoraTrainer
from megarl.trainer.make import make_trainer
from megarl.trainer.step import MegatronTrainer


def export_rank(plan: RunPlan, path: str, of: str, output: str, adapter: bool = False) -> None:
    """One trainer rank of the export: loads its shard of the checkpoint at `path`, which holds the files of that at `of`, and writes its
    part of the HF files at `output`, or of a PEFT adapter."""
    config = plan.config
    init_distributed(config.timeouts.collective_s)
    trainer = make_trainer(
        plan.spec,
        plan.trainer_topology,
        config.trainer,
        config.model.dtype,
        config.seed,
        total_steps=config.max_steps * config.trainer.optimizer_steps,
        timeout_s=config.timeouts.collective_s,
        lora=config.lora,
    )
    if isinstance(trainer, LoraTrainer):
        trainer.load_hf(plan.weights_path)
    load_checkpoint(trainer, path, of=of)
    if adapter and isinstance(trainer, LoraTrainer):
        trainer.export_adapter(output)
    else:
        trainer.export_hf(output, config.model.path)
    shutdown_distributed()


def load_checkpoint(trainer: MegatronTrainer, path: str, critic: MegatronTrainer | None = None, of: str = "") -> dict[str, Any]:
    """Loads the checkpoint at `path`; returns its state. Raises RunError if it is damaged, which names the checkpoint that has to be moved
    away: where `path` is but a copy, that at `of`."""
    try:
        state = checkpoint.load(trainer, path)
        if critic is not None:
            checkpoint.load_critic(critic, path)
    except RuntimeError as error:
        raise RunError(str(error).replace(path, of or path)) from error
    return state
