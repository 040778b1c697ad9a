"""Megatron's optimizer and learning-rate schedule from our settings."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.config.errors import ConfigError
from megarl.config.schema import OptimizerConfig

SCHEDULES = ("constant", "cosine")
OURS = ("max_lr", "min_lr", "betas", "eps")  # settings that Megatron keeps in the optimizer's groups, and so in checkpoints


def build_optimizer(config: OptimizerConfig, chunks: list[DistributedDataParallel], dtype: torch.dtype, zero: int) -> MegatronOptimizer:
    """AdamW on fp32 master weights; with zero=1 its state is split over data-parallel ranks."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            # The norm is computed only where clipping is on, and we always report it: without clipping the bound is infinite.
            clip_grad=config.clip_grad or math.inf,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=zero == 1,
        ),
        chunks,
    )
    for part in optimizer.chained_optimizers:
        _allocate_state(part.optimizer)
    return optimizer


def _allocate_state(adam: torch.optim.Optimizer) -> None:
    """PyTorch's AdamW allocates in its first step; Megatron can neither save nor load a checkpoint before that."""
    if not isinstance(adam, torch.optim.AdamW):
        return  # Transformer Engine's, which Megatron initialises itself
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def load_state(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """MegatronOptimizer.load_state_dict, made right for PyTorch's AdamW under the distributed optimizer, and for changed settings.

    Under that optimizer Megatron 0.16 looks for `step` among the sharded tensors, where it is not, and gives all parameters one
    and the same `step` tensor, which each of them would then advance. And it takes learning rates, betas and epsilon from the
    checkpoint: a run that goes on has those of its configuration.
    """
    settings = [{key: group[key] for key in OURS} for group in optimizer.param_groups]
    parts = optimizer.chained_optimizers  # one, or one of the dense mesh and one of the experts'
    states = [state] if len(parts) == 1 else [state[i] for i in range(len(parts))]
    for part, part_state in zip(parts, states, strict=True):
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.AdamW):
            _load_distributed_state(part, part_state)
        else:
            part.load_state_dict(part_state)
    for group, ours in zip(optimizer.param_groups, settings, strict=True):
        group.update(ours)


def _load_distributed_state(part: DistributedOptimizer, state: dict[str, Any]) -> None:
    sharded = state.pop("param_state")
    part.load_state_dict(state)
    states = list(part.optimizer.state.values())
    steps = [s.pop("step") for s in states]
    part.load_parameter_state_from_fully_reshardable(sharded)
    for s, step in zip(states, steps):
        s["step"] = step.clone()


class LearningRate:
    """Warm-up, then constant or cosine, by Megatron's scheduler. Step k = 1, 2, … has the rate of scheduler position k.

    A run that is no longer than its warm-up ends in it. Raises ConfigError for an unknown schedule.
    """

    def __init__(self, config: OptimizerConfig, optimizer: MegatronOptimizer, total_steps: int):
        if config.schedule not in SCHEDULES:
            raise ConfigError(f"optimizer.schedule={config.schedule}: allowed are {', '.join(SCHEDULES)}")
        self.optimizer = optimizer
        min_lr = config.lr * config.min_lr_ratio if config.schedule == "cosine" else 0.0
        for group in optimizer.param_groups:  # each group carries the bounds it was made with
            group["max_lr"], group["min_lr"] = config.lr, min_lr
        self.scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=min_lr,
            lr_warmup_steps=config.warmup_steps,
            lr_decay_steps=max(total_steps, config.warmup_steps + 1),
            lr_decay_style=config.schedule,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    @property
    def position(self) -> int:
        """Optimizer steps begun so far."""
        return self.scheduler.num_steps

    def advance(self) -> float:
        """Sets the rate of the next optimizer step and returns it. Called before the step, so the first one is not lost to warm-up."""
        self.scheduler.step(1)
        return self.scheduler.get_lr(self.optimizer.param_groups[0])

    def seek(self, position: int) -> None:
        self.scheduler.num_steps = 0
        self.scheduler.step(position)
