"""From the configuration to the algorithm."""

from __future__ import annotations

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.base import Algorithm
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.algorithms.recipes import recipe_of
from megarl.algorithms.weights import Rule, clamped, clipped, masked, sequence_clipped, tapered, uncorrected
from megarl.config.schema import AlgorithmConfig

RULES: dict[str, Rule] = {
    "aipo": clamped,
    "grpo": clipped,
    "gspo": sequence_clipped,
    "icepop": masked,
    "topr": tapered,
    "reinforce": uncorrected,
}


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """`config.name` with its settings; those that are null are the algorithm's own."""
    recipe = recipe_of(config)
    return PolicyGradient(
        weigh=RULES[config.name],
        rho_min=recipe.rho_min or 0.0,
        rho=recipe.rho or 1.0,  # without one in the rule, that of the KL penalty's correction
        baseline=ADVANTAGES[recipe.advantage],
        loss_mean=recipe.loss_mean,
        kl_coef=config.kl_coef,
        skip_zero_advantage=config.skip_zero_advantage,
    )
