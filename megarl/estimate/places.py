"""How long the trainer waits for rollouts because a prompt keeps its place in flight until the last
of its responses ends, and because no more than `ahead` steps of prompts may begin.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import numpy as np

from megarl.estimate.memory import Workload

LENGTHS = 64  # points of the integral over lengths
SHARED = 24  # points of the integral over what the responses to a prompt have in common
CORRELATED = 0.9999  # most: at 1 all responses to a prompt are equally long


def wait_s(
    *, prompts: int, places: float, ahead: float, rollout_s: float, step_s: float, pause_s: float
) -> float:
    """Seconds of a step for which the trainer waits for the rollouts of its next batch.

    The lifetimes of `prompts` a step are taken as exponential with the mean `rollout_s`. When the
    trainer takes a batch, the prompts of at most `ahead` steps are left, `places` of them in
    flight. New ones fill free places until all that may begin have begun. From then on fewer and
    fewer run. The next weights, after `step_s`, let as many begin again as a step has.

    `pause_s`: the part of `step_s` in which engines pause.
    """
    places = min(places, ahead * prompts)
    works_s = step_s - pause_s
    full_s = min(works_s, (ahead * prompts - places) * rollout_s / places)
    ended = places * (full_s / rollout_s - math.expm1((full_s - works_s) / rollout_s))
    return max(0.0, (prompts - ended) * rollout_s / places)


@functools.lru_cache(maxsize=256)
def longest_of_prompt(workload: Workload, n: int, correlation: float) -> float:
    """The expected tokens of the longest of a prompt's `n` responses.

    `correlation`: plan.simulation.correlation, of a Gaussian copula as in simulation.lengths.
    """
    if n == 1:
        return workload.response_tokens
    normal = NormalDist()
    step = workload.max_response_tokens / LENGTHS
    shorter = [1 - workload.survivors((point + 0.5) * step) for point in range(LENGTHS)]
    quantiles = np.array([normal.inv_cdf(min(max(p, 1e-12), 1 - 1e-12)) for p in shorter])
    shared = np.array([normal.inv_cdf((point + 0.5) / SHARED) for point in range(SHARED)])
    correlation = min(correlation, CORRELATED)
    # of a response's own part, given the shared part
    limits = (quantiles - math.sqrt(correlation) * shared[:, None]) / math.sqrt(1 - correlation)
    all_shorter = np.vectorize(normal.cdf)(limits) ** n
    return float((1 - all_shorter.mean(axis=0)).sum() * step)
