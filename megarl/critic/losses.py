"""Advantages of tokens, and targets of a critic's values, from its values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_SMALLEST_VARIANCE = 1e-8


class Truncation(NamedTuple):
    """The upper bounds of V-trace's importance weights."""

    rho_bar: float  # of the weight of a token's own error: sets which policy's values are learned
    c_bar: float  # of the weight of later errors: sets the variance


class TokenEstimates(NamedTuple):
    advantages: np.ndarray  # [T] float64
    returns: np.ndarray  # [T] float64, the targets of the values


@dataclass(frozen=True)
class Gae:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equation 16), over
    the policy's T tokens in a response. The environment's tokens in between are skipped, as if the
    policy's next token followed at once:

        d_t = r_t + gamma V_(t+1) - V_t
        A_t = sum over l >= t of (gamma lambda)^(l - t) d_l
        R_t = A_t + V_t, the target of V_t

    V_t is the value of the text before token t. V_T = 0, since a response ends, even if it was cut.

    With `truncation`, the targets are V-trace's (Espeholt et al. 2018, arXiv:1802.01561, equation
    1; its remark 2 has lambda). The ratio k_t is pi/mu, where pi is the policy before the batch:

        R_t = V_t + sum over l >= t of gamma^(l - t) (c_t ... c_(l - 1)) rho_l d_l
        rho_l = min(rho_bar, k_l),  c_l = lambda min(c_bar, k_l)
        A_t = d_t + gamma lambda (R_(t + 1) - V_(t + 1))

    A_t is that of DeepMind's rlax, and with lambda = 1 the paper's r_t + gamma R_(t + 1) - V_t. It
    has no factor rho_t, since the rule of the policy's loss weighs token t by its ratio. With all
    ratios 1, both R_t and A_t are those of GAE.
    """

    gamma: float
    gae_lambda: float
    whiten: bool
    truncation: Truncation | None = None

    def estimates(
        self,
        rewards: Sequence[np.ndarray],
        values: Sequence[np.ndarray],
        ratios: Sequence[np.ndarray] = (),
    ) -> list[TokenEstimates]:
        """For each response, from its tokens' rewards [T], values [T] and, with `truncation`,
        ratios [T].
        """
        lengths = list(map(len, rewards))
        reward = _padded(rewards)
        value = _padded(values)
        rho = c = np.ones_like(reward)
        if self.truncation is not None:
            ratio = _padded(ratios)
            rho = np.minimum(ratio, self.truncation.rho_bar)
            c = np.minimum(ratio, self.truncation.c_bar)
        advantage = np.zeros_like(reward)
        correction = np.zeros_like(reward)  # R - V
        decay = self.gamma * self.gae_lambda
        for t in reversed(range(reward.shape[1] - 1)):
            delta = reward[:, t] + self.gamma * value[:, t + 1] - value[:, t]
            advantage[:, t] = delta + decay * correction[:, t + 1]
            correction[:, t] = rho[:, t] * delta + decay * c[:, t] * correction[:, t + 1]
        results = []
        for row, length in enumerate(lengths):
            returns = correction[row, :length] + value[row, :length]
            results.append(TokenEstimates(advantage[row, :length], returns))
        return results


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """[n, longest + 1] float64: the rows, with zeros after them, so that values end in 0."""
    padded = np.zeros((len(rows), max(map(len, rows), default=0) + 1))
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded


class Moments:
    """Counts, sums and sums of squares, which add up over ranks."""

    def __init__(self, sums: Sequence[float]):
        self.count, self._sum, self._squares = sums

    @staticmethod
    def of(values: Sequence[np.ndarray]) -> list[float]:
        """The sums of one rank's values."""
        joined = np.concatenate([*values, np.empty(0)])
        return [float(len(joined)), float(joined.sum()), float(np.square(joined).sum())]

    @property
    def mean(self) -> float:
        if self.count:
            return self._sum / self.count
        return math.nan

    @property
    def variance(self) -> float:
        if self.count:
            return max(0.0, self._squares / self.count - self.mean**2)
        return math.nan

    def whitened(self, values: np.ndarray) -> np.ndarray:
        return (values - self.mean) / math.sqrt(self.variance + _SMALLEST_VARIANCE)
