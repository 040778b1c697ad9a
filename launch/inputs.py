"""What a command reads and runs beside its settings, looked at before anything starts: rows, tokenizer, weights, the functions and classes
of the user's own, and room on the disk."""

from __future__ import annotations

from pathlib import Path

from megarl.algorithms.recipes import RECIPES
from megarl.config.errors import ConfigError, problems_of
from megarl.config.schema import RunConfig
from megarl.data.check import Checked, check_data
from megarl.launch.room import check_room
from megarl.plan.resolve import RunPlan
from megarl.rollouts.environments.loading import check_rollout
from megarl.trainer.hf_files import check_checkpoint, check_config

COMMANDS = {"train": "train", "dry-run": "train", "sft": "sft", "eval": "eval"}  # and as which one each reads its inputs


def check_inputs(config: RunConfig, command: str, plan: RunPlan | None, at_hand: bool = False) -> list[Checked]:
    """Returns what was looked at of the datasets. `plan`: None where the settings alone stand in the way of one.

    `at_hand`: what is on this machine alone, and of long datasets the first prompts only: in seconds, and also where a run could not run.
    Raises ConfigError with all problems.
    """
    datasets: list[Checked] = []
    reads = COMMANDS[command]
    checks = [lambda: datasets.extend(check_data(config, plan and plan.spec, reads, at_hand))]
    if plan is not None and not (reads == "sft" and config.model.random_init):
        checks.append(lambda: check_weights(plan))
    if reads != "sft":
        checks.append(lambda: check_rollout(config, at_hand))
    if reads == "train" and config.weights.transport != "auto":
        checks.append(lambda: check_weights_transport(config.weights.transport, at_hand))
    if reads == "train" and config.algorithm.name not in RECIPES:
        checks.append(lambda: check_rule(config.algorithm.name))
    if plan is not None and not at_hand:
        checks.append(lambda: check_room(plan, reads))
    if problems := problems_of(*checks):
        raise ConfigError(problems)
    return datasets


def check_weights(plan: RunPlan) -> None:
    """Raises ConfigError where the checkpoint that the command begins with, if it is a folder, is damaged or of another model."""
    folder = Path(plan.weights_path)
    if folder.is_dir() and not plan.weights.are_gone:
        check_config(plan.spec, folder)
        check_checkpoint(plan.spec, folder)


def check_rule(name: str) -> None:
    """Raises ConfigError where an algorithm of the user's own cannot be used."""
    from megarl.algorithms.registry import find_rule  # not at the top: it imports torch

    find_rule(name)


def check_weights_transport(setting: str, at_hand: bool = False) -> None:
    """Raises ConfigError where it cannot work on this host, or, `at_hand`, where there is none of that name."""
    from megarl.weight_sync.transports.choice import AUTO, check_transport, transport_class  # not at the top: it imports torch

    if not at_hand:
        check_transport(setting)
    elif setting != AUTO:
        transport_class(setting)
