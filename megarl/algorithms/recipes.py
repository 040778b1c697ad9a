"""The algorithm that a configuration describes, what it needs, and what contradicts it.

Imports no torch, so that a configuration is checked at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megarl.config.algorithms import (
    ALGORITHMS,
    CRITIC,
    CUSTOM_RULE,
    OUTCOME,
    PROCESS,
    RETURNS,
    VTRACE,
    Recipe,
)
from megarl.config.schema import AlgorithmConfig, published

BEHAVIOR_CAP = 5.0  # as in AReaL's configurations
_KEYS = (
    "rho_min",
    "rho",
    "advantage",
    "loss_mean",
    "dual_clip",
    "beta",
)
_VTRACE_KEYS = ("rho_bar", "c_bar")
_CRITIC_KEYS = ("gamma", "gae_lambda", "whiten", "critic_targets", *_VTRACE_KEYS)


def recipe_of(config: AlgorithmConfig) -> Recipe:
    """The recipe of `config.name`, with the configuration's settings in place of its defaults."""
    set_values = {}
    for key in _KEYS:
        value = getattr(config, key)
        if value is not None:
            set_values[key] = value
    return replace(ALGORITHMS.get(config.name, CUSTOM_RULE), **set_values)


def has_critic(config: AlgorithmConfig) -> bool:
    return recipe_of(config).advantage == CRITIC


def no_critic(config: AlgorithmConfig) -> str:
    """Why there is no critic, for error messages."""
    fixed = "advantage" in ALGORITHMS.get(config.name, CUSTOM_RULE).fixed
    needed = "algorithm.name=ppo" if fixed else f"algorithm.advantage={CRITIC}"
    return f"{config.name} has no critic; set {needed}"


def needs_reward(config: AlgorithmConfig) -> bool:
    """Whether rewards make advantages; they are always reported."""
    return recipe_of(config).advantage != "none"


def needs_groups_to_differ(config: AlgorithmConfig) -> bool:
    """Whether a prompt's samples teach nothing if their rewards are equal."""
    return needs_reward(config) and not has_critic(config)


def ignores_age(config: AlgorithmConfig) -> bool:
    """Whether the gradient of a token does not depend on pi/mu, so that old samples count as if the
    current policy had sampled them. Unknown of own rules.

    Losses of pairs and best_of_n are not policy gradients, and are not counted.
    """
    recipe = recipe_of(config)
    if config.name not in ALGORITHMS or recipe.group_loss or recipe.advantage == "best":
        return False
    return recipe.rule == "uncorrected" or config.ratio == "proximal"


def needs_reference(config: AlgorithmConfig) -> str | None:
    """The "key=value" that makes a run keep its initial weights as a reference; None if it does not
    keep them.
    """
    if config.kl_coef > 0:
        return f"algorithm.kl_coef={config.kl_coef}"
    beta = recipe_of(config).beta
    if beta:
        return f"algorithm.beta={beta}"
    return None


def needs_one_sequence(config: AlgorithmConfig) -> str | None:
    """The "key=value" that requires every episode to be one sequence; None if branches may be."""
    if config.advantage == CRITIC:
        return f"algorithm.advantage={CRITIC}"
    if has_critic(config) or recipe_of(config).beta is not None:
        return f"algorithm.name={config.name}"
    if config.kl_coef and config.kl == "reward":
        return "algorithm.kl=reward"
    return None


def problems(config: AlgorithmConfig) -> Iterator[str]:
    """Yields problems: a bound that the algorithm does not have, an empty interval of bounds, an
    unsuitable algorithm.ratio.
    """
    for key in _KEYS:
        value = getattr(config, key)
        defaults = ALGORITHMS.get(config.name, CUSTOM_RULE)
        default = getattr(defaults, key)
        if value is not None and (default is None or (key in defaults.fixed and value != default)):
            reason = (
                f"{config.name} has {'its own' if key in defaults.fixed else 'no such setting'}"
            )
            if config.recipe and published(config.recipe).get(f"algorithm.{key}") == value:
                published_setting = (
                    f"algorithm.recipe={config.recipe}, which sets algorithm.{key}={value}"
                )
                yield (
                    f"algorithm.name={config.name}: must be left out with {published_setting}: "
                    f"{reason}"
                )
            else:
                yield f"algorithm.{key}={value}: must be null: {reason}"
            return
    recipe = recipe_of(config)
    if recipe.beta is not None and config.kl_coef:
        yield (
            f"algorithm.kl_coef={config.kl_coef}: must be 0: algorithm.beta is {config.name}'s "
            "weight of the KL divergence"
        )
    yield from _kl_problems(config)
    if recipe.beta == 0 and config.name != "copg":
        yield f"algorithm.beta={recipe.beta}: must be above 0 with {config.name}"
    if config.ratio not in recipe.ratios:
        yield (
            f"algorithm.ratio={config.ratio}: {config.name} goes with "
            f"{' and '.join(recipe.ratios)} only (docs/algorithms.md)"
        )
    for key in ("behavior_floor", "behavior_cap", "behavior_level", "behavior_above"):
        value = getattr(config, key)
        if value is not None and config.ratio != "decoupled":
            yield f"algorithm.{key}={value}: must be null: only algorithm.ratio=decoupled has it"
    if (config.behavior_floor or 0.0) >= (config.behavior_cap or BEHAVIOR_CAP):
        cap = f"algorithm.behavior_cap={config.behavior_cap or BEHAVIOR_CAP}"
        yield f"algorithm.behavior_floor={config.behavior_floor}: must be below {cap}"
    yield from _critic_problems(config)
    yield from _credit_problems(config, recipe)
    yield from _tokens_problems(config, recipe)
    if recipe.rho_min is not None and recipe.rho is not None and recipe.rho_min >= recipe.rho:
        yield f"algorithm.rho_min={recipe.rho_min}: must be below algorithm.rho={recipe.rho}"
    if config.dual_clip is not None and recipe.rho is not None and config.dual_clip < recipe.rho:
        yield f"algorithm.dual_clip={config.dual_clip}: must be at least algorithm.rho={recipe.rho}"


def _critic_problems(config: AlgorithmConfig) -> Iterator[str]:
    for key in _CRITIC_KEYS:
        value = getattr(config, key)
        shown = str(value).lower() if isinstance(value, bool) else value
        if value is None:
            continue
        if not has_critic(config):
            yield (
                f"algorithm.{key}={shown}: must be null: only algorithm.advantage={CRITIC} has it"
            )
        elif key in _VTRACE_KEYS and config.critic_targets != VTRACE:
            yield (
                f"algorithm.{key}={shown}: must be null: only algorithm.critic_targets={VTRACE} "
                "has it"
            )
    rho_bar = 1.0 if config.rho_bar is None else config.rho_bar
    c_bar = 1.0 if config.c_bar is None else config.c_bar
    if c_bar > rho_bar:
        yield f"algorithm.c_bar={c_bar:g}: must be at most algorithm.rho_bar={rho_bar:g}"


def _credit_problems(config: AlgorithmConfig, recipe: Recipe) -> Iterator[str]:
    by_turn = f"algorithm.credit={config.credit}: must be {OUTCOME}"
    if config.turn_gamma is not None and (config.credit != RETURNS or has_critic(config)):
        yield (
            f"algorithm.turn_gamma={config.turn_gamma:g}: must be null: only "
            f"algorithm.credit={RETURNS} has it, without a critic"
        )
    if config.credit == OUTCOME:
        return
    if "advantage" in recipe.fixed and not has_critic(config):
        yield f"{by_turn} with {config.name}, which has no advantages of turns"
    elif config.credit == PROCESS and has_critic(config):
        yield (
            f"{by_turn} or {RETURNS} with algorithm.advantage={CRITIC}: a critic's advantages are "
            "not compared"
        )
    elif config.kl_coef and config.kl == "reward" and not has_critic(config):
        yield f"{by_turn} with algorithm.kl=reward, which takes a penalty off the whole response"


def _tokens_problems(config: AlgorithmConfig, recipe: Recipe) -> Iterator[str]:
    """If the loss compares whole responses, problems with settings that treat tokens or samples
    differently.
    """
    if recipe.beta is not None and config.entropy_coefficient:
        yield (
            f"algorithm.entropy_coefficient={config.entropy_coefficient}: must be 0: "
            f"{config.name} is a loss of whole responses"
        )
    if config.mask_truncated and (recipe.beta is not None or recipe.advantage == "best"):
        yield (
            f"algorithm.mask_truncated=true: must be false: {config.name} compares the "
            "responses to a prompt, all of them"
        )
    penalizes_rewards = config.kl_coef and config.kl == "reward"
    if config.mask_truncated and penalizes_rewards and recipe.advantage != CRITIC:
        yield (
            "algorithm.mask_truncated=true: must be false with algorithm.kl=reward, which takes "
            "a penalty off every sample's reward"
        )


def _kl_problems(config: AlgorithmConfig) -> Iterator[str]:
    if not config.kl_coef:
        needs = f"needs algorithm.kl_coef above 0; it is {config.kl_coef}"
        if config.kl != "loss":
            yield f"algorithm.kl={config.kl}: {needs}"
        if config.kl_estimator is not None:
            yield f"algorithm.kl_estimator={config.kl_estimator}: {needs}"
    elif config.kl == "loss" and config.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator=k1: must be k2 or k3 with algorithm.kl=loss: the gradient "
            "of k1 is zero in the mean"
        )
