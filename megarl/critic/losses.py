"""Advantages of tokens from a critic's values (PPO)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SMALLEST_VARIANCE = 1e-8


@dataclass(frozen=True)
class Gae:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equation 16), over
    the policy's T tokens in a response. The environment's tokens in between are skipped, as if the
    policy's next token followed at once:

        d_t = r_t + gamma V_(t+1) - V_t
        A_t = sum over l >= t of (gamma lambda)^(l - t) d_l
        R_t = A_t + V_t, the target of V_t

    V_t is the value of the text before token t. V_T = 0, since a response ends, even if it was cut.
    """

    gamma: float
    gae_lambda: float
    whiten: bool

    def advantages(
        self, rewards: Sequence[np.ndarray], values: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """[T] float64 for each response, from its tokens' rewards [T] and values [T]."""
        lengths = list(map(len, rewards))
        # Responses are rows, padded with zeros, so that values end in 0.
        padded = np.zeros((2, len(lengths), max(lengths, default=0) + 1))
        rows = zip(lengths, rewards, values, strict=True)
        for row, (length, row_rewards, row_values) in enumerate(rows):
            padded[0, row, :length] = row_rewards
            padded[1, row, :length] = row_values
        reward, value = padded
        result = np.zeros_like(reward)
        next_advantage = np.zeros(len(lengths))
        for t in reversed(range(reward.shape[1] - 1)):
            next_advantage = (
                reward[:, t]
                + self.gamma * value[:, t + 1]
                - value[:, t]
                + self.gamma * self.gae_lambda * next_advantage
            )
            result[:, t] = next_advantage
        return [row[:length] for row, length in zip(result, lengths)]


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
