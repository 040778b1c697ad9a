"""Estimates of KL(pi || ref) from tokens that pi has sampled (Schulman, "Approximating KL divergence", 2020).

Of d = log pi - log ref each is a term whose mean over tokens of pi estimates the divergence: k1 and k3 without bias, k2 and k3 never
negative. As a loss what counts is the gradient: k2's, d grad log pi, is that of KL(pi || ref) in the mean, k3's that of KL(ref || pi), and
k1's, grad log pi, is 0 in the mean: k1 is for rewards alone.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_MOST = 20.0  # bound of -d in k3, whose exponential one absurd token must not make infinite


def k1(difference: Tensor) -> Tensor:
    return difference


def k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    return (-difference).clamp(max=_MOST).exp() - 1 + difference


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
