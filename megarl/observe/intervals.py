"""How sure a mean over prompts is."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

Z95 = 1.959963984540054  # the normal distribution's 97.5% quantile


def interval(shares: Sequence[float], samples: int, weights: Sequence[float] | None = None) -> tuple[float, float]:
    """The 95% confidence interval of the mean of `shares`, one of 0 to 1 a prompt, each from so many `samples`; prompts are draws from all
    prompts there might be. `weights`: how many things each share is of, where the mean is over these.

    It is Wilson's interval (1927), with as many draws as would give the variance that the shares have. With one sample of one thing a
    prompt that is their number: then it is Wilson's own. Otherwise the variance is itself estimated, and the draws are fewer where that is
    from few prompts (Korn and Graubard 1998); they are up to all samples, if prompts do not differ. Unlike the mean's standard error it is
    not empty where all are right or all are wrong.
    """
    counts = [1.0] * len(shares) if weights is None else weights
    mean, total = fmean(shares, counts), sum(counts)
    draws = total**2 / sum(count**2 for count in counts)
    plain = samples == 1 and set(counts) == {1.0}
    if not plain and len(shares) > 1 and mean not in (0.0, 1.0):
        draws = min(_draws(shares, counts, mean), total * samples)
    centre = (mean + Z95**2 / (2 * draws)) / (1 + Z95**2 / draws)
    half = Z95 / (1 + Z95**2 / draws) * sqrt(mean * (1 - mean) / draws + Z95**2 / (4 * draws**2))
    return min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half))


def _draws(shares: Sequence[float], counts: Sequence[float], mean: float) -> float:
    prompts = len(shares)
    variance = sum((count * (share - mean)) ** 2 for share, count in zip(shares, counts)) / sum(counts) ** 2 * prompts / (prompts - 1)
    return mean * (1 - mean) / variance * (Z95 / _t95(prompts - 1)) ** 2 if variance else float("inf")


def _t95(freedom: int) -> float:
    """Student's 97.5% quantile, below 0.5% off (Abramowitz and Stegun 1964, 26.7.5; the series is of no use below 4)."""
    if freedom <= 3:
        return (12.706, 4.303, 3.182)[freedom - 1]
    z, v = Z95, freedom
    terms = (z**3 + z) / 4 / v, (5 * z**5 + 16 * z**3 + 3 * z) / 96 / v**2, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / v**3
    return z + sum(terms)
