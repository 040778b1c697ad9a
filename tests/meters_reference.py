"""The meters of agreement between log-probs, by their formulas in NumPy, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

FIRST_AND_LAST = {
    "age_0": (0, 0), "age_1": (1, 1), "age_2": (2, 2), "age_3_4": (3, 4), "age_5_8": (5, 8),
    "age_9_16": (9, 16),
    "age_17_up": (17, 1 << 30),
}  # fmt: skip
HALF_DECADES = 10.0 ** (np.arange(19) / 2 - 7)


def meters(
    sequences: Sequence[Sequence[np.ndarray]],
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """(metrics, histograms) of sequences (log pi, log mu, ages), which hold only the tokens that
    count.
    """
    d = [pi.astype(np.float64) - mu.astype(np.float64) for pi, mu, _ in sequences]
    flat = np.concatenate(d)
    ages = np.concatenate([column for *_, column in sequences])
    numbers, histograms = _of("agreement", flat)
    numbers["agreement/ess_sequences"] = _effective(
        np.exp([column.sum() for column in d if len(column)])
    )
    for name, (first, last) in FIRST_AND_LAST.items():
        rows = flat[(ages >= first) & (ages <= last)]
        if len(rows):
            for all_of, result in zip((numbers, histograms), _of(f"agreement/{name}", rows)):
                all_of |= result
    return numbers, histograms


def _of(name: str, d: np.ndarray) -> tuple[dict[str, float], dict[str, list[int]]]:
    values = {
        "tokens": len(d),
        "abs_diff_mean": np.abs(d).mean(),
        "abs_diff_p99": np.percentile(np.abs(d), 99, method="inverted_cdf"),
        "abs_diff_max": np.abs(d).max(),
        "kl_k1": (-d).mean(),
        "kl_k3": (np.expm1(d) - d).mean(),
        "ess": _effective(np.exp(d)),
    }
    # open on the left, since |d| is binned
    edges = np.concatenate([[-np.inf], -HALF_DECADES[::-1]])
    below = [int(((d > low) & (d <= high)).sum()) for low, high in pairwise(edges)]
    near = [
        int(((d > -HALF_DECADES[0]) & (d < 0)).sum()),
        int(((d >= 0) & (d < HALF_DECADES[0])).sum()),
    ]
    above = [
        int(((d >= low) & (d < high)).sum()) for low, high in pairwise([*HALF_DECADES, np.inf])
    ]
    return {f"{name}/{key}": float(value) for key, value in values.items()}, {
        f"{name}/histogram": [*below, *near, *above]
    }


def _effective(weights: np.ndarray) -> float:
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
