"""The loss of an algorithm on a test's tensors."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import torch

from megarl.algorithms.base import LossOutput
from megarl.algorithms.registry import make_algorithm
from megarl.config.schema import AlgorithmConfig

F64 = torch.float64


def loss_of(
    logprobs, mu, advantages, mask, reference=None, proximal=None, entropy=None, **settings
) -> LossOutput:
    """The loss of the algorithm with these settings (AIPO by default).

    All tensors are [b, s]: b sequences of s tokens, packed end to end.
    """
    flat = [
        None if values is None else values.flatten()
        for values in (logprobs, mu, advantages, mask, reference, proximal, entropy)
    ]
    return packed_loss_of([logprobs.size(1)] * len(logprobs), *flat, **settings)


def packed_loss_of(
    lengths, logprobs, mu, advantages, mask, reference=None, proximal=None, entropy=None, **settings
) -> LossOutput:
    """The same for sequences of these lengths. All tensors are [sum of the lengths]."""
    boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    microbatch = SimpleNamespace(
        boundaries=boundaries,
        advantages=advantages,
        loss_mask=mask,
        mu_logprobs=mu,
        reference_logprobs=reference,
        proximal_logprobs=proximal,
        entropy=entropy,
    )
    return make_algorithm(AlgorithmConfig(**settings)).loss(logprobs, microbatch)


def gradient(loss: torch.Tensor, variable: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, variable, retain_graph=True)[0]


def assert_same_gradient(loss: torch.Tensor, expected: torch.Tensor, inputs: torch.Tensor) -> None:
    torch.testing.assert_close(
        gradient(loss, inputs), gradient(expected, inputs), rtol=1e-9, atol=1e-12
    )
