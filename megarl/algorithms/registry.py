"""From `algorithm.name` to the algorithm."""

from __future__ import annotations

from collections.abc import Callable

from megarl.algorithms.aipo import Aipo
from megarl.algorithms.base import Algorithm
from megarl.config.errors import ConfigError
from megarl.config.schema import AlgorithmConfig


def _aipo(config: AlgorithmConfig) -> Algorithm:
    return Aipo(rho=config.rho, kl_coef=config.kl_coef, skip_zero_advantage=config.skip_zero_advantage)


ALGORITHMS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {"aipo": _aipo}


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that `config.name` names. Raises: ConfigError for an unknown name."""
    if config.name not in ALGORITHMS:
        raise ConfigError(f"algorithm.name={config.name}: must be {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[config.name](config)
