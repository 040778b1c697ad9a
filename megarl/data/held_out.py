"""The held-out sets of a run: data.eval and eval.suites."""

from __future__ import annotations

from megarl.config.schema import DatasetConfig, RunConfig, SuiteConfig
from megarl.data.benchmarks import located


def held_out(config: RunConfig) -> list[tuple[str, str, DatasetConfig, SuiteConfig | None]]:
    """(name, config key, dataset, suite or None) of every held-out set; a suite is the dataset with its own sampling."""
    suites = [(name, f"eval.suites.{name}", located(suite), suite) for name, suite in config.eval.suites.items() if suite is not None]
    return [*([("", "data.eval", config.data.eval, None)] if config.data.eval else []), *suites]


def held_out_tokens(config: RunConfig, suite: SuiteConfig | None) -> int:
    """Tokens of the longest allowed response."""
    return (suite.max_tokens if suite else None) or config.eval.max_tokens or config.rollout.max_tokens
