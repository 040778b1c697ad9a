"""Makes the algorithm that a configuration describes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial

import torch

from megarl.algorithms import advantages, losses
from megarl.algorithms.advantages import ADVANTAGES, CHOICES, GroupLoss
from megarl.algorithms.base import Algorithm
from megarl.algorithms.losses import PolicyGradient, Rule, RuleInputs, Weights
from megarl.algorithms.recipes import BEHAVIOR_CAP, has_critic, recipe_of
from megarl.config.algorithms import ALGORITHMS, CUSTOM_RULE, VTRACE, Recipe
from megarl.config.errors import ConfigError
from megarl.config.limits import find_callable
from megarl.config.schema import SAMPLED, AlgorithmConfig
from megarl.critic.losses import Gae, Truncation
from megarl.teachers.loss import Distillation


def find_rule(name: str) -> Callable[..., Weights]:
    """The rule of one of ALGORITHMS, or the function `package.module:function`, tried on three
    tokens.

    Raises ConfigError if its arguments are not RuleInputs, or its result is not Weights.
    """
    if name in ALGORITHMS:
        return getattr(losses, ALGORITHMS[name].rule)
    function = find_callable(name, f"algorithm.name={name}", built_in=ALGORITHMS)
    try:
        inspect.signature(function).bind(*range(6))
    except (TypeError, ValueError) as error:
        takes = "(log_ratio, advantages, mask, boundaries, rho_min, rho)"
        raise ConfigError(
            f"algorithm.name={name}: must take {takes}, and return "
            f"megarl.algorithms.losses.Weights: {error}"
        ) from error

    def rule(inputs: RuleInputs) -> Weights:
        return function(*inputs)

    problem = _problem_of_rule(rule)
    if problem:
        raise ConfigError(f"algorithm.name={name}: {problem}; see docs/extending.md")
    return rule


def _problem_of_rule(rule: Rule) -> str:
    """Tries `rule` on sequences of one and two tokens, the last of them masked.

    Returns a problem with its result; empty if it is valid.
    """
    log_ratio = torch.tensor([0.0, 0.5, -torch.inf])
    inputs = RuleInputs(
        log_ratio,
        advantages=torch.tensor([1.0, -1.0, -1.0]),
        mask=torch.tensor([True, True, False]),
        boundaries=torch.tensor([0, 1, 3], dtype=torch.int32),
        rho_min=CUSTOM_RULE.rho_min or 0.0,
        rho=CUSTOM_RULE.rho or 1.0,
    )
    try:
        weights = rule(inputs)
    except Exception as error:  # raised by the user's function
        return f"fails on three tokens: {type(error).__name__}: {error}"
    if not isinstance(weights, Weights):
        return f"must return megarl.algorithms.losses.Weights, not {type(weights).__name__}"
    for name, values in (("weight", weights.weight), ("clipped", weights.clipped)):
        if getattr(values, "shape", None) != log_ratio.shape:
            return f"must return one value a token; its {name} of three tokens is {values!r:.80}"
    if weights.weight.isfinite().all():
        return ""
    return "its weight must be finite where log_ratio is -inf, as it is outside the mask"


def make_algorithm(config: AlgorithmConfig, teachers: Mapping[str, float] = {}) -> Algorithm:
    """The algorithm `config.name` with its settings, or its defaults where these are null.

    `teachers`: the weight of each teacher.
    """
    recipe = recipe_of(config)
    rule = find_rule(config.name)
    if recipe.dual_clip is not None:
        rule = partial(rule, dual_clip=recipe.dual_clip)
    distillation = None
    if teachers:
        distillation = Distillation(config.distill.coef, config.distill.over == SAMPLED, teachers)
    return PolicyGradient(
        weigh=rule,
        rho_min=recipe.rho_min or 0.0,
        rho=recipe.rho or 1.0,  # a rule without this bound still needs one in the KL penalty
        baseline=(ADVANTAGES | CHOICES)[recipe.advantage],
        loss_mean=recipe.loss_mean,
        kl_coef=config.kl_coef,
        kl=config.kl,
        kl_estimator=config.kl_estimator or ("k1" if config.kl == "reward" else "k2"),
        ratio=config.ratio,
        behavior_floor=config.behavior_floor or 0.0,
        behavior_cap=config.behavior_cap or BEHAVIOR_CAP,
        behavior_level=config.behavior_level or "token",
        behavior_above=config.behavior_above or "drop",
        skip_zero_advantage=config.skip_zero_advantage,
        group_loss=_group_loss(recipe),
        distillation=distillation,
        entropy_coefficient=config.entropy_coefficient,
        gae=_gae(config) if has_critic(config) else None,
    )


def _gae(config: AlgorithmConfig) -> Gae:
    truncation = None
    if config.critic_targets == VTRACE:
        truncation = Truncation(
            rho_bar=1.0 if config.rho_bar is None else config.rho_bar,
            c_bar=1.0 if config.c_bar is None else config.c_bar,
        )
    return Gae(
        gamma=1.0 if config.gamma is None else config.gamma,
        gae_lambda=0.95 if config.gae_lambda is None else config.gae_lambda,
        whiten=config.whiten is not False,
        truncation=truncation,
    )


def _group_loss(recipe: Recipe) -> GroupLoss | None:
    if recipe.group_loss is None or not recipe.beta:
        return None
    pairs = recipe.advantage == "best_and_worst"
    return GroupLoss(getattr(advantages, recipe.group_loss), recipe.beta, pairs)
