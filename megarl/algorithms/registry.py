"""From `algorithm.name` to the algorithm."""

from __future__ import annotations

from collections.abc import Callable

from megarl.algorithms.aipo import Aipo
from megarl.algorithms.base import Algorithm
from megarl.config.errors import ConfigError
from megarl.config.schema import AlgorithmConfig


def _aipo(config: AlgorithmConfig) -> Algorithm:
    problems = []
    if not config.rho > 0:
        problems.append(f"algorithm.rho is {config.rho}; it must be above 0 (2 to 10 works well)")
    if not config.kl_coef >= 0:
        problems.append(f"algorithm.kl_coef is {config.kl_coef}; it must be 0 or more")
    if problems:
        raise ConfigError(problems)
    return Aipo(rho=config.rho, kl_coef=config.kl_coef, skip_zero_advantage=config.skip_zero_advantage)


ALGORITHMS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {"aipo": _aipo}


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that `config.name` names. Raises: ConfigError for an unknown name or impossible settings."""
    if config.name not in ALGORITHMS:
        raise ConfigError(f"algorithm.name is {config.name!r}; allowed: {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[config.name](config)
