"""Checks what a command needs beside its settings, before anything starts: datasets, tokenizer, weights, the user's own functions and
classes, and room on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megarl.algorithms.recipes import RECIPES
from megarl.config.errors import ConfigError, problems_of
from megarl.config.schema import RunConfig
from megarl.data.check import Checked, check_data
from megarl.data.tokenizer import load_tokenizer
from megarl.launch.room import check_room
from megarl.launch.trial import Tried, try_rewards
from megarl.models import ModelSpec
from megarl.observe.trackers import check_trackers
from megarl.plan.critic import critic_path
from megarl.plan.resolve import RunPlan
from megarl.plan.roles import ServedRole
from megarl.plan.teachers import FrozenRole
from megarl.rollouts.environments.loading import check_rollout
from megarl.trainer.hf_files import check_checkpoint, check_config
from megarl.trainer.peft_files import check_adapter

COMMANDS = {
    "train": "train",
    "dry-run": "train",
    "sft": "sft",
    "reward-model": "reward-model",
    "eval": "eval",
}  # command → the command whose inputs it reads

TRACKED = ("train", "sft", "reward-model")
_MAY_BEGIN_RANDOM = ("sft", "reward-model")


@dataclass(frozen=True)
class Inputs:
    """What was checked of the datasets, and what the rewards gave to their first rows."""

    datasets: list[Checked]
    rewards: list[Tried]

    @property
    def remarks(self) -> list[str]:
        """A line for each dataset and reward of which there is something that their owner may not know."""
        data = {f"Data: {each.key}": [*each.remarks] for each in self.datasets}
        rewards = {f"Reward: {each.part.setting} on {each.key}": [*each.remarks] for each in self.rewards}
        return [f"{of_what}: {'; '.join(remarks)}" for of_what, remarks in (data | rewards).items() if remarks]


def check_inputs(config: RunConfig, command: str, plan: RunPlan | None, at_hand: bool = False) -> Inputs:
    """Checks all inputs. `plan` is None if the settings do not give a valid one.

    With `at_hand` only files on this machine are checked, and only the first prompts of long datasets: that takes seconds, and works
    where a run could not. Raises ConfigError with all problems.
    """
    datasets: list[Checked] = []
    reads = COMMANDS[command]
    checks = [lambda: datasets.extend(check_data(config, plan and plan.spec, reads, at_hand))]
    if plan is not None and not (reads in _MAY_BEGIN_RANDOM and config.model.random_init and not plan.weights.are_there):
        checks.append(lambda: check_weights(plan))
    key, critic = critic_path(config)
    if plan is not None and reads == "train" and plan.critic and critic and Path(critic).is_dir():
        checks.append(partial(check_complete, key, plan.critic, Path(critic)))
    if plan is not None and reads == "train" and (config.lora.rank and config.lora.init):
        checks.append(partial(check_adapter, plan.spec, config.lora))
    if reads in ("train", "eval"):
        checks.append(lambda: check_rollout(config, at_hand))
        served = plan.served if plan is not None else ()
        frozen = plan.frozen if plan is not None and reads == "train" else ()
        checks += [partial(check_frozen, role, config) for role in frozen if not at_hand or is_here(role.path, config)]
        checks += [partial(check_role, role, config) for role in served if not at_hand or is_here(role.settings.path, config)]
    if reads == "train" and config.weights.transport != "auto":
        checks.append(lambda: check_weights_transport(config.weights.transport, at_hand))
    if reads == "train" and config.algorithm.name not in RECIPES:
        checks.append(lambda: check_rule(config.algorithm.name))
    if reads in TRACKED:
        checks.append(lambda: check_trackers(config.observe.trackers))
    if plan is not None and not at_hand:
        checks.append(lambda: check_room(plan, reads))
    if problems := problems_of(*checks):
        raise ConfigError(problems)
    return Inputs(datasets, try_rewards(config, datasets, at_hand) if plan is not None and reads in ("train", "eval") else [])


def check_weights(plan: RunPlan) -> None:
    """Raises ConfigError if the checkpoint that the command begins with is a folder, and damaged or of another model."""
    folder = Path(plan.weights_path)
    if folder.is_dir() and not plan.weights.are_gone:
        check_config(plan.spec, folder)
        check_checkpoint(plan.spec, folder)


def check_complete(key: str, spec: ModelSpec, folder: Path) -> None:
    """As `check_checkpoint`, of the folder that the setting `key` names."""
    problems = problems_of(lambda: check_checkpoint(spec, folder))
    if problems:
        raise ConfigError([f"{key}={folder}: {problem.removeprefix(f'{folder}: ')}" for problem in problems])


def is_here(path: str, config: RunConfig) -> bool:
    """Whether the checkpoint at `path` and the policy's tokenizer are on this machine."""
    return all(Path(folder).is_dir() for folder in (path, config.model.tokenizer or config.model.path))


def check_frozen(role: FrozenRole, config: RunConfig) -> None:
    """Raises ConfigError if a model on the trainer's ranks is damaged, or does not have the policy's tokens."""
    from megarl.roles.teacher import check_tokens  # not at the top: it imports aiohttp

    key = f"roles.{role.name}.path"
    if Path(role.path).is_dir():
        check_complete(key, role.spec, Path(role.path))
    check_tokens(key, role.path, load_tokenizer(config.model))


def check_role(role: ServedRole, config: RunConfig) -> None:
    """Raises ConfigError if a model beside the policy has no weights, or cannot read the policy's responses."""
    from megarl.roles.opening import check_role_weights, check_served  # not at the top: it imports aiohttp

    check_role_weights(role)
    check_served(role, load_tokenizer(config.model))


def check_rule(name: str) -> None:
    """Raises ConfigError if the user's own algorithm cannot be used."""
    from megarl.algorithms.registry import find_rule  # not at the top: it imports torch

    find_rule(name)


def check_weights_transport(setting: str, at_hand: bool = False) -> None:
    """Raises ConfigError if the transport cannot work on this host; with `at_hand` only if there is none of that name."""
    from megarl.weight_sync.transports.choice import AUTO, check_transport, transport_class  # not at the top: it imports torch

    if not at_hand:
        check_transport(setting)
    elif setting != AUTO:
        transport_class(setting)
