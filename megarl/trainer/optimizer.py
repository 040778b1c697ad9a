"""Builds Megatron's optimizer and learning-rate schedule from the run's settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.config.errors import ConfigError
from megarl.config.schema import AdamConfig

SCHEDULES = ("constant", "cosine", "linear")


def build_optimizer(
    config: AdamConfig, megatron: Mapping[str, Any], chunks: list[DistributedDataParallel], dtype: torch.dtype, zero: int
) -> ChainedOptimizer:
    """AdamW on fp32 master weights. With zero=1, its state is split over data-parallel ranks. `megatron`: trainer.optimizer.megatron."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            # The norm is always reported, but Megatron computes it only with clipping. So without clipping the bound is infinite.
            clip_grad=config.clip_grad or math.inf,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=zero == 1,
            **megatron,
        ),
        [*chunks],
    )
    assert isinstance(optimizer, ChainedOptimizer)  # always, without Megatron-FSDP
    for part in optimizer.chained_optimizers:
        _allocate_state(part)
    return optimizer


def _allocate_state(part: MegatronOptimizer) -> None:
    """Allocates both moments of all parameters of the part. PyTorch's AdamW does so only in its first step, which comes after a checkpoint
    is loaded.

    Without Transformer Engine, AdamW then updates in one kernel. Otherwise it would need additional memory of the parameters' size on
    GPUs, and nine times as long on CPUs.
    """
    if part.optimizer is None:  # this rank has no parameters of this mesh
        return
    part.init_state_fn(part.optimizer, part.config)
    if isinstance(part.optimizer, torch.optim.AdamW):
        for group in part.optimizer.param_groups:
            group["fused"] = True
        for parameter, state in part.optimizer.state.items():
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)


@dataclass(frozen=True)
class OptimizerShard:
    """The part of a parameter that this rank's optimizer has: its elements first .. end, flattened."""

    parameter: torch.nn.Parameter
    first: int
    master: torch.Tensor  # [end - first] float32; the parameter itself if the model is float32 and zero=0
    exp_avg: torch.Tensor  # [end - first] float32
    exp_avg_sq: torch.Tensor  # [end - first] float32

    @property
    def end(self) -> int:
        return self.first + self.master.numel()

    @property
    def live(self) -> torch.Tensor:
        """[end - first]: these elements of the model's own parameter."""
        return self.parameter.data.view(-1)[self.first : self.end]


def optimizer_shards(optimizer: ChainedOptimizer) -> Iterator[OptimizerShard]:
    """All shards of this rank's optimizers (one optimizer, or one for the dense mesh and one for experts); possibly none."""
    for part in optimizer.chained_optimizers:
        for parameter, first, master in _masters(part):
            state = part.optimizer.state[master]
            yield OptimizerShard(parameter, first, *(t.detach().view(-1) for t in (master, state["exp_avg"], state["exp_avg_sq"])))


def _masters(part: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, torch.Tensor]]:
    """Yields (parameter, index of its first element here, master weights)."""
    if part.optimizer is None:
        return
    groups = part.optimizer.param_groups
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, place) in part.model_param_group_index_map.items():
            yield parameter, part._get_model_param_range_map(parameter)["param"].start, groups[group]["params"][place]
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from ((parameter, 0, master) for parameter, master in zip(parameters, masters, strict=True))
        yield from ((parameter, 0, parameter) for group in part.fp32_from_fp32_groups for parameter in group)
    else:
        yield from ((parameter, 0, parameter) for group in groups for parameter in group["params"])


def steps_made(optimizer: ChainedOptimizer) -> set[int]:
    """The number of steps by Adam's own count: one element, or none if this rank has no parameters."""
    adams = [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]
    ours = {int(state["step"]) for adam in adams if isinstance(adam, torch.optim.AdamW) for state in adam.state.values()}
    groups = [group for adam in adams if not isinstance(adam, torch.optim.AdamW) for group in adam.param_groups if group["params"]]
    return ours | {int(group.get("step", 0)) for group in groups}  # Transformer Engine counts for each group


def set_steps_made(optimizer: ChainedOptimizer, steps: int) -> None:
    for adam in (part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None):
        if isinstance(adam, torch.optim.AdamW):
            for state in adam.state.values():
                state["step"].fill_(steps)
        else:
            for group in adam.param_groups:
                group["step"] = steps


class LearningRate:
    """Warm-up, then constant, cosine or linear, with Megatron's scheduler. Step k = 1, 2, … has the rate of scheduler position k.

    A run that is not longer than its warm-up ends during it. Raises ConfigError for an unknown schedule.
    """

    def __init__(self, config: AdamConfig, optimizer: MegatronOptimizer, total_steps: int):
        if config.schedule not in SCHEDULES:
            raise ConfigError(f"optimizer.schedule={config.schedule}: allowed are {', '.join(SCHEDULES)}")
        self.optimizer = optimizer
        min_lr = config.lr * config.min_lr_ratio if config.schedule != "constant" else 0.0
        for group in optimizer.param_groups:  # each group has the bounds with which it was made
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
        """The number of optimizer steps that have begun."""
        return self.scheduler.num_steps

    def advance(self) -> float:
        """Sets and returns the rate of the next optimizer step. Call it before the step, so that the first step counts for the warm-up."""
        self.scheduler.step(1)
        return self.scheduler.get_lr(self.optimizer.param_groups[0])

    def seek(self, position: int) -> None:
        self.scheduler.num_steps = 0
        self.scheduler.step(position)
