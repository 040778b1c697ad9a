"""The loss of an algorithm on tensors of a test."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megarl.algorithms.base import LossOutput
from megarl.algorithms.registry import make_algorithm
from megarl.config.schema import AlgorithmConfig

F64 = torch.float64


def loss_of(logprobs, mu, advantages, mask, reference=None, **settings) -> LossOutput:
    """That of the algorithm with these settings (AIPO by default), all tensors [b, s]."""
    microbatch = SimpleNamespace(mu_logprobs=mu, advantages=advantages, loss_mask=mask, reference_logprobs=reference)
    return make_algorithm(AlgorithmConfig(**settings)).loss(logprobs, microbatch)


def gradient(loss: torch.Tensor, variable: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, variable, retain_graph=True)[0]
