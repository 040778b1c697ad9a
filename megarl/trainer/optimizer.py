"""Builds Megatron's optimizer and learning-rate schedule from the run's settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from megarl.config.errors import ConfigError
from megarl.config.schema import AdamConfig, OptimizerConfig
from megarl.trainer.fully_sharded import local_shard

SCHEDULES = ("constant", "cosine", "linear")
# Megatron's settings for trainer.optimizer.offload. With main weights in the optimizer, the GPU has
# no fp32 copy of the weights.
OFFLOAD = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "use_precision_aware_optimizer": True,
}


def build_optimizer(
    config: AdamConfig,
    trainer: OptimizerConfig,
    chunks: Sequence[MegatronModule],
    dtype: torch.dtype,
    zero: int,
) -> ChainedOptimizer:
    """AdamW on fp32 master weights.

    With zero=1, its state is split over data-parallel ranks. With zero=3, the parameters are split
    and are the master weights. `trainer`: trainer.optimizer, whose `offload` and `megatron` apply
    to every optimizer. `chunks`: wrapped for data parallelism.
    """
    of_masters = torch.float32 if zero == 3 else dtype
    offload = OFFLOAD if trainer.offload else {}
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            # The norm is always reported, but Megatron computes it only with clipping. So without
            # clipping the bound is infinite.
            clip_grad=config.clip_grad or math.inf,
            bf16=of_masters == torch.bfloat16,
            params_dtype=of_masters,
            use_distributed_optimizer=zero == 1,
            **offload,
            **trainer.megatron,
        ),
        [*chunks],
    )
    assert isinstance(optimizer, ChainedOptimizer)  # always, without Megatron-FSDP
    for part in optimizer.chained_optimizers:
        _allocate_state(part)
    return optimizer


def _allocate_state(part: MegatronOptimizer) -> None:
    """Allocates both moments of all parameters of the part.

    PyTorch's AdamW does so only in its first step, which comes after a checkpoint is loaded.

    Without Transformer Engine, AdamW then updates in one kernel. Otherwise it would need additional
    memory of the parameters' size on GPUs, and nine times as long on CPUs.
    """
    if part.optimizer is None:  # this rank has no parameters of this mesh
        return
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        _allocate_on_host(part.optimizer)
        return
    part.init_state_fn(part.optimizer, part.config)
    if isinstance(part.optimizer, torch.optim.AdamW):
        for group in part.optimizer.param_groups:
            group["fused"] = True
        for parameter, state in part.optimizer.state.items():
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)


def _allocate_on_host(optimizer: HybridDeviceOptimizer) -> None:
    for adam in optimizer.sub_optimizers:
        for group in adam.param_groups:
            for master in group["params"]:
                moments = {
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }
                adam.state[master] = {"step": torch.zeros((), dtype=torch.float32), **moments}
    optimizer._sync_sub_optimizers_state_to_hdo()


def reload_masters(optimizer: ChainedOptimizer) -> None:
    """Sets the master weights to the model's weights.

    Megatron's own function leaves out parameters in fp32 that are offloaded.
    """
    optimizer.reload_model_params()
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            for weights, master in part.optimizer.param_to_inner_param.items():
                master.data.copy_(weights.data)


@dataclass(frozen=True)
class OptimizerShard:
    """The part of a parameter that this rank's optimizer has: its elements first .. end,
    flattened.
    """

    parameter: torch.nn.Parameter
    first: int
    live: torch.Tensor  # [end - first]: these elements of the model's own weights
    # [end - first] float32, perhaps on the host; the parameter itself if the model is float32 and
    # zero=0, or if zero=3
    master: torch.Tensor
    exp_avg: torch.Tensor  # [end - first] float32
    exp_avg_sq: torch.Tensor  # [end - first] float32

    @property
    def end(self) -> int:
        return self.first + self.master.numel()


def optimizer_shards(
    optimizer: ChainedOptimizer, live_weights: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[OptimizerShard]:
    """All shards of this rank's optimizers (one optimizer, or one for the dense mesh and one for
    experts); possibly none.

    live_weights: returns the model's own weights of a parameter on this rank.
    """
    for part in optimizer.chained_optimizers:
        for parameter, first, of_optimizer in _masters(part):
            state = part.optimizer.state[of_optimizer]
            master = of_optimizer
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                master = part.optimizer.param_to_inner_param[of_optimizer]
            flat_master = local_shard(master).view(-1)
            yield OptimizerShard(
                parameter=parameter,
                first=first,
                live=live_weights(parameter).view(-1)[first : first + flat_master.numel()],
                master=flat_master,
                exp_avg=local_shard(state["exp_avg"]).view(-1),
                exp_avg_sq=local_shard(state["exp_avg_sq"]).view(-1),
            )


def _masters(part: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, torch.Tensor]]:
    """Yields (parameter, index of its first element here, master weights, or the weights themselves
    if their masters are on the host).
    """
    if part.optimizer is None:
        return
    groups = part.optimizer.param_groups
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, place) in part.model_param_group_index_map.items():
            yield (
                parameter,
                part._get_model_param_range_map(parameter)["param"].start,
                groups[group]["params"][place],
            )
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, masters in zip(
            part.float16_groups, part.fp32_from_float16_groups, strict=True
        ):
            yield from (
                (parameter, 0, master)
                for parameter, master in zip(parameters, masters, strict=True)
            )
        yield from (
            (parameter, 0, parameter) for group in part.fp32_from_fp32_groups for parameter in group
        )
    else:
        yield from ((parameter, 0, parameter) for group in groups for parameter in group["params"])


def steps_made(optimizer: ChainedOptimizer) -> set[int]:
    """The number of steps by Adam's own count: one element, or none if this rank has no
    parameters.
    """
    adams = [*_adams(optimizer)]
    adam_steps = set()
    for adam in adams:
        if isinstance(adam, torch.optim.AdamW):
            for state in adam.state.values():
                adam_steps.add(int(state["step"]))
    groups = []
    for adam in adams:
        if not isinstance(adam, torch.optim.AdamW):
            for group in adam.param_groups:
                if group["params"]:
                    groups.append(group)
    # Transformer Engine counts for each group
    return adam_steps | {int(group.get("step", 0)) for group in groups}


def _adams(optimizer: ChainedOptimizer) -> Iterator[torch.optim.Optimizer]:
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            yield from part.optimizer.sub_optimizers
        elif part.optimizer is not None:
            yield part.optimizer


def set_steps_made(optimizer: ChainedOptimizer, steps: int) -> None:
    for adam in _adams(optimizer):
        if isinstance(adam, torch.optim.AdamW):
            for state in adam.state.values():
                state["step"].fill_(steps)
        else:
            for group in adam.param_groups:
                group["step"] = steps


class LearningRate:
    """Warm-up, then constant, cosine or linear, with Megatron's scheduler.

    Step k = 1, 2, … has the rate of scheduler position k.

    A run that is not longer than its warm-up ends during it. Raises ConfigError for an unknown
    schedule.
    """

    def __init__(self, config: AdamConfig, optimizer: MegatronOptimizer, total_steps: int):
        if config.schedule not in SCHEDULES:
            raise ConfigError(
                f"optimizer.schedule={config.schedule}: allowed are {', '.join(SCHEDULES)}"
            )
        self.optimizer = optimizer
        # Optimizer steps that have begun: more than the schedule counts if some were not planned.
        self.steps = 0
        min_lr = config.lr * config.min_lr_ratio if config.schedule != "constant" else 0.0
        for group in optimizer.param_groups:  # each group has the bounds with which it was made
            group["max_lr"] = config.lr
            group["min_lr"] = min_lr
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
        """The number of optimizer steps that the schedule counts."""
        return self.scheduler.num_steps

    def advance(self) -> float:
        """Sets and returns the rate of the next optimizer step. Call it before the step, so that
        the first step counts for the warm-up.
        """
        self.steps += 1
        self.scheduler.step(1)
        return self.scheduler.get_lr(self.optimizer.param_groups[0])

    def seek(self, position: int, steps: int) -> None:
        """Goes to a place of the schedule, after `steps` optimizer steps."""
        self.steps = steps
        self.scheduler.num_steps = 0
        self.scheduler.step(position)
