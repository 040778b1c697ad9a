"""How sure a mean over prompts is."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, pvariance

Z95 = 1.959963984540054  # the normal distribution's 97.5% quantile


def interval(shares: Sequence[float], samples: int) -> tuple[float, float]:
    """The 95% confidence interval of the mean of `shares`, one of 0 to 1 a prompt, each from so many `samples`; prompts are draws from all
    prompts there might be.

    It is Wilson's interval (1927), with as many draws as would give the variance that the shares have (their number, with one sample a
    prompt: then it is Wilson's own; up to all samples, if prompts do not differ). Unlike the mean's standard error it is not empty where
    all are right or all are wrong.
    """
    mean, prompts = fmean(shares), len(shares)
    variance = pvariance(shares) / prompts
    draws = prompts if mean in (0.0, 1.0) else min(mean * (1 - mean) / variance, prompts * samples) if variance else prompts * samples
    centre = (mean + Z95**2 / (2 * draws)) / (1 + Z95**2 / draws)
    half = Z95 / (1 + Z95**2 / draws) * sqrt(mean * (1 - mean) / draws + Z95**2 / (4 * draws**2))
    return max(0.0, centre - half), min(1.0, centre + half)
