"""Checks that the disk has room for what a command will write, before it computes for hours. All nodes see the same disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.models.adapters import Lora
from megarl.plan.checkpoints import complete_checkpoints, exported_steps
from megarl.plan.resolve import RunPlan
from megarl.reshard.kinds import ITEM_BYTES
from megarl.reshard.layout import parameter_count

OPTIMIZER_BYTES = 4 + 4 + 4  # per parameter of a checkpoint: the float32 master weight and both of Adam's moments


def check_room(plan: RunPlan, command: str) -> None:
    """Raises ConfigError if there is too little room for what `command` (train, sft, …) writes."""
    if command == "train":
        check_room_for_checkpoints(plan)
    elif command == "sft":
        check_room_for_weights(plan, "sft.output=", plan.config.sft.output)
        if 0 < plan.config.sft.save_every < plan.config.sft.steps:  # a checkpoint is complete before the one before it is removed
            each_bytes = parameter_count(plan.spec, Lora.of(plan.config.lora)) * OPTIMIZER_BYTES
            _check("run_dir=", plan.config.run_dir, 2 * each_bytes, "2 checkpoints of the warm start (sft.save_every)")
    elif command == "reward-model":
        check_room_for_weights(plan, "reward_model.output=", plan.config.reward_model.output)


def check_room_for_checkpoints(plan: RunPlan) -> None:
    """Raises ConfigError if run_dir has no room for the checkpoints to come: each is complete before the oldest one is removed."""
    config = plan.config
    there, most = len(complete_checkpoints(config.run_dir)), config.checkpoint.keep + 1
    if config.checkpoint.keep_best is not None:
        most += 2 if config.eval.engines else 1  # the best one, and that of the version which is being evaluated
    number = max(1, most - there)
    parameters = parameter_count(plan.spec, Lora.of(config.lora)) + (parameter_count(plan.critic.with_scalar_head()) if plan.critic else 0)
    each_bytes = parameters * OPTIMIZER_BYTES
    more, best = "more " if there else "", ", keep_best" if config.checkpoint.keep_best else ""
    what = f"{number} {more}checkpoint{'s' * (number > 1)} (checkpoint.keep={config.checkpoint.keep}{best})"
    needed_bytes = number * each_bytes
    if every := config.checkpoint.hf_every:
        exports = len({*range(every, config.max_steps + 1, every), config.max_steps} - exported_steps(config.run_dir))
        what, needed_bytes = f"{what} and {exports} exports (checkpoint.hf_every={every})", needed_bytes + exports * _weights_bytes(plan)
    _check("run_dir=", config.run_dir, needed_bytes, what)


def check_room_for_weights(plan: RunPlan, option: str, folder: str | Path) -> None:
    """Raises ConfigError if `folder`, which the user gave as `option`, has no room for the model as an HF checkpoint."""
    _check(option, folder, _weights_bytes(plan), "the weights")


def _weights_bytes(plan: RunPlan) -> int:
    return parameter_count(plan.spec) * ITEM_BYTES[plan.config.model.dtype]


def _check(option: str, folder: str | Path, needed_bytes: int, what: str) -> None:
    there = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.is_dir())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < needed_bytes:
        raise ConfigError(f"{option}{folder}: {what} will take {_size(needed_bytes)}, and {_size(free_bytes)} are free there")


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
