"""The critic: finds its model, and checks that it fits the run."""

from __future__ import annotations

from megarl.algorithms import recipes
from megarl.config.errors import ConfigError, problems_of
from megarl.config.keys import settings, value_at, yaml_text
from megarl.config.schema import RunConfig
from megarl.models import ModelSpec, load_spec
from megarl.models.registry import missing_folder
from megarl.plan.topologies import trainer_topology
from megarl.reshard.layout import stage_of_layer, trainer_parameters
from megarl.roles.plan import roles_of
from megarl.roles.settings import CRITIC, role_of


def find_critic(config: RunConfig, policy: ModelSpec) -> ModelSpec | None:
    """The shape of the checkpoint that the critic begins with, or else the policy's.

    None if the algorithm has no critic. Raises ConfigError.
    """
    if not recipes.has_critic(config.algorithm):
        return None
    key, path = critic_path(config)
    if path is None or any(missing_folder("", path)):
        return policy
    return load_spec(path, key, config.model.family)


def critic_path(config: RunConfig) -> tuple[str, str | None]:
    """The key of the checkpoint that the critic begins with, and its value.

    A value of None stands for the policy's weights.
    """
    for name, role in roles_of(config).items():
        if role_of(name, role) == CRITIC:
            return f"roles.{name}.path", role.path
    return f"roles.{CRITIC}.path", None


def check_critic(config: RunConfig, policy: ModelSpec, command: str | None) -> None:
    """Raises ConfigError with all problems.

    For commands that come before a run, the checkpoint may still be missing, since one of them
    makes it.
    """
    if not recipes.has_critic(config.algorithm):
        problems = []
        for key, setting in settings().items():
            if key.startswith("critic.") and value_at(config, key) != setting.default:
                reason = recipes.no_critic(config.algorithm)
                problems.append(f"{key}={yaml_text(value_at(config, key))}: {reason}")
        if problems:
            raise ConfigError(problems)
        return
    key, path = critic_path(config)
    if path is None:
        return
    problems = list(missing_folder(key, path))
    if problems:
        is_output = path == config.reward_model.output
        if command in (None, "sft", "reward-model", "label") or (
            is_output and command in ("plan", "reshard", "dry-run")
        ):
            return
        hint = "; megarl reward-model writes it" if is_output else ""
        raise ConfigError([problem + hint for problem in problems])
    problems = misfits(config, load_spec(path, key, config.model.family), policy)
    if problems:
        raise ConfigError([f"{key}={path}: {problem}" for problem in problems])


def misfits(config: RunConfig, model: ModelSpec, policy: ModelSpec) -> list[str]:
    """The reasons why a second model cannot be on the trainer's ranks with the trainer's sizes;
    empty if it can.
    """
    topology = trainer_topology(config.trainer)
    problems = []
    if model.vocab_size < policy.vocab_size:
        problems.append(
            f"its vocabulary of {model.vocab_size} must have the policy's {policy.vocab_size} "
            "tokens"
        )
    if model.max_position_embeddings < policy.max_position_embeddings:
        context = (
            f"its context of {model.max_position_embeddings} tokens must be at least the policy's"
        )
        problems.append(f"{context}, {policy.max_position_embeddings}")
    if bool(model.experts) != bool(policy.experts):
        problems.append("both it and the policy must have experts, or neither")
    layer_spec = "local" if config.cluster.gpu == "cpu" else "te"
    return problems + problems_of(
        lambda: trainer_parameters(model, topology, layer_spec),
        lambda: stage_of_layer(model.num_layers, topology),
    )
