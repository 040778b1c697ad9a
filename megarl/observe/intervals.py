"""How sure a mean over prompts is."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

Z95 = 1.959963984540054  # the normal distribution's 97.5% quantile


def interval(shares: Sequence[float], samples: int, weights: Sequence[float] | None = None) -> tuple[float, float]:
    """The 95% confidence interval of the mean of `shares`, one of 0 to 1 a prompt, each from so many `samples`; prompts are draws from all
    prompts there might be. `weights`: how many things each share is of, where the mean is over these.

    It is Wilson's interval (1927), with as many draws as would give the variance that the shares have (their number, with one sample a
    prompt: then it is Wilson's own; up to all samples, if prompts do not differ). Unlike the mean's standard error it is not empty where
    all are right or all are wrong.
    """
    counts = [1.0] * len(shares) if weights is None else weights
    mean, total = fmean(shares, counts), sum(counts)
    prompts, most = total**2 / sum(count**2 for count in counts), total * samples
    variance = sum((count * (share - mean)) ** 2 for share, count in zip(shares, counts)) / total**2
    draws = prompts if mean in (0.0, 1.0) else min(mean * (1 - mean) / variance, most) if variance else most
    centre = (mean + Z95**2 / (2 * draws)) / (1 + Z95**2 / draws)
    half = Z95 / (1 + Z95**2 / draws) * sqrt(mean * (1 - mean) / draws + Z95**2 / (4 * draws**2))
    return max(0.0, centre - half), min(1.0, centre + half)
