"""Lengths of simulated responses."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np

from megarl.base.rollout_types import Ordinal
from megarl.config.errors import ConfigError
from megarl.estimate.memory import Workload
from megarl.simulation.settings import EXPONENTIAL, LOGNORMAL, SimulationConfig

BLOCK = 256  # number of prompts whose lengths are drawn together
_erf = np.vectorize(math.erf, otypes=[np.float64])
Quantile = Callable[[np.ndarray], np.ndarray]  # probabilities in (0, 1) -> tokens, before the cut


class Draw(Protocol):
    """The lengths of a prompt's n responses, in tokens; above `longest` they are cut."""

    @property
    def longest(self) -> int: ...

    def __call__(self, ordinal: Ordinal, n: int) -> Sequence[int] | np.ndarray: ...


class Lengths:
    """Draws the lengths of a prompt's responses, in tokens; above `longest` they are cut.

    The lengths of a prompt depend only on the seed and its ordinal, so all settings get the same
    work. Lengths of responses to one prompt are correlated (a Gaussian copula with this
    `correlation`).
    """

    def __init__(
        self,
        quantile: Quantile,
        longest: int,
        settings: SimulationConfig,
        prompts_per_step: int,
        seed: int,
    ):
        self.longest = longest
        self._quantile = quantile
        self._settings = settings
        self._per_step = prompts_per_step
        self._seed = seed
        self._block = functools.lru_cache(maxsize=16)(self._draw)

    @classmethod
    def of(
        cls, workload: Workload, settings: SimulationConfig, prompts_per_step: int, seed: int
    ) -> Lengths:
        """Raises ConfigError if a file has no lengths."""
        longest = int(workload.max_response_tokens)
        if settings.lengths == EXPONENTIAL:
            quantile = exponential(workload.scale)
        elif settings.lengths == LOGNORMAL:
            quantile = lognormal(workload.response_tokens, settings.sigma, longest)
        else:
            quantile = empirical(lengths_in(Path(settings.lengths)))
        return cls(quantile, longest, settings, prompts_per_step, seed)

    def __call__(self, ordinal: Ordinal, n: int) -> np.ndarray:
        """[n] tokens, before the cut."""
        return self._block(ordinal // BLOCK, n)[ordinal % BLOCK]

    def _draw(self, block: int, n: int) -> np.ndarray:
        """[BLOCK, n] of consecutive prompts.

        They are drawn together, since making a random generator takes longer than drawing.
        """
        rng = np.random.default_rng((self._seed, block))
        shared = self._settings.correlation
        normal = math.sqrt(shared) * rng.standard_normal((BLOCK, 1)) + math.sqrt(
            1 - shared
        ) * rng.standard_normal((BLOCK, n))
        below = 0.5 * (1 + _erf(normal / math.sqrt(2)))
        ordinals = block * BLOCK + np.arange(BLOCK)[:, None]
        grown = (1 + self._settings.growth) ** (ordinals / self._per_step / 100)
        return np.rint(
            np.clip(self._quantile(np.clip(below, 1e-12, 1 - 1e-12)) * grown, 1, 2**40)
        ).astype(np.int64)


def exponential(scale: float) -> Quantile:
    """`scale`: the mean before the cut; infinite if all responses reach the cut."""
    return lambda below: -scale * np.log1p(-below)


def lognormal(mean: float, sigma: float, longest: float) -> Quantile:
    """`mean`: after the cut at `longest`."""
    location = _location(mean, sigma, longest)
    normal = NormalDist()
    return lambda below: np.exp(
        location + sigma * np.vectorize(normal.inv_cdf, otypes=[np.float64])(below)
    )


def _location(mean: float, sigma: float, longest: float) -> float:
    """The mean m of the logarithm, found by bisection: E[min(X, c)] = exp(m + s^2/2) N((ln c - m -
    s^2) / s) + c N((m - ln c) / s).
    """
    if mean >= 0.999 * longest:
        return math.log(longest) + 8 * sigma
    normal = NormalDist()
    low = math.log(mean) - sigma * sigma - 1
    high = math.log(longest) + 8 * sigma
    for _ in range(80):
        middle = (low + high) / 2
        above = (math.log(longest) - middle) / sigma
        mean_after_cut = math.exp(middle + sigma * sigma / 2) * normal.cdf(
            above - sigma
        ) + longest * normal.cdf(-above)
        if mean_after_cut < mean:
            low = middle
        else:
            high = middle
    return low


def empirical(lengths: np.ndarray) -> Quantile:
    ordered = np.sort(lengths)
    return lambda below: ordered[
        np.minimum((below * len(ordered)).astype(np.int64), len(ordered) - 1)
    ].astype(np.float64)


def lengths_in(path: Path) -> np.ndarray:
    """The response lengths in a run's samples.jsonl. Raises ConfigError."""
    key = f"plan.simulation.lengths={path}"
    try:
        lines = path.read_bytes().splitlines()
        lengths = [
            int(sample["tokens"]) for line in lines for sample in json.loads(line)["samples"]
        ]
    except OSError as error:
        raise ConfigError(f"{key}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{key}: not the samples of a run: {error!r}") from error
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"{key}: must have at least one sample, each of at least one token")
    return np.array(lengths, dtype=np.int64)
