"""Makes the policy on a trainer rank, loads its checkpoints, and exports it."""

from __future__ import annotations

from functools import partial
from typing import Any

from megarl.config.errors import RunError
from megarl.config.schema import AdamConfig
from megarl.lora.trainer import LoraTrainer
from megarl.plan.resolve import RunPlan
from megarl.trainer import checkpoint
from megarl.trainer.distributed import init_distributed, shutdown_distributed
from megarl.trainer.step import MegatronTrainer


def make_policy(
    plan: RunPlan, total_steps: int, optimizer: AdamConfig | None = None
) -> MegatronTrainer:
    """Makes the trainer of the plan's policy, for all weights or for adapters alone.

    The values of the weights must be set afterwards. `optimizer`: see MegatronTrainer.
    """
    config = plan.config
    trainer_class = MegatronTrainer
    if plan.adapters is not None:
        sent_alone = plan.sent_adapters is not None
        trainer_class = partial(LoraTrainer, lora=config.lora, sent_alone=sent_alone)
    return trainer_class(
        plan.spec,
        plan.trainer_topology,
        config.trainer,
        config.model.dtype,
        config.seed,
        total_steps=total_steps,
        timeout_s=config.timeouts.collective_s,
        optimizer=optimizer,
    )


def steps_of_run(plan: RunPlan) -> int:
    """The optimizer steps of the whole run."""
    return plan.config.max_steps * plan.config.trainer.optimizer_steps


def load_checkpoint(
    trainer: MegatronTrainer, path: str, critic: MegatronTrainer | None = None, original: str = ""
) -> dict[str, Any]:
    """Loads the checkpoint at `path`, and returns its state.

    Raises RunError if it is damaged. If `path` is a copy, the error names the `original`, which
    must be moved away.
    """
    try:
        state = checkpoint.load(trainer, path)
        if critic is not None:
            checkpoint.load_critic(critic, path)
    except RuntimeError as error:
        raise RunError(str(error).replace(path, original or path)) from error
    return state


def export_rank(
    plan: RunPlan, path: str, original: str, output: str, adapter: bool = False
) -> None:
    """Runs one trainer rank of an export.

    It loads its shard of the checkpoint at `path`, which is a copy of the one at `original`. It
    writes its part of the HF files, or of a PEFT adapter, at `output`.
    """
    init_distributed(plan.config.timeouts.collective_s)
    trainer = make_policy(plan, steps_of_run(plan))
    if trainer.frozen:
        trainer.load_hf(plan.weights_path)
    load_checkpoint(trainer, path, original=original)
    if adapter and isinstance(trainer, LoraTrainer):
        trainer.export_adapter(output)
    else:
        trainer.export_hf(output, plan.config.model.path)
    shutdown_distributed()
