"""Turns a batch of scored groups into training sequences and the batch's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from megarl.algorithms.base import Algorithm
from megarl.rewards.failures import failure_metrics
from megarl.types import Batch, Prompt, Sample, TrainSequence, Version


def batch_rewards(batch: Batch) -> Tensor:
    """Rewards [G, n], float64. Raises ValueError if groups have different numbers of samples."""
    if len({len(group.samples) for group in batch.groups}) != 1:
        raise ValueError(f"groups of step {batch.step} have different numbers of samples")
    return torch.tensor([[sample.reward for sample in group.samples] for group in batch.groups], dtype=torch.float64)


def policy_tokens(batch: Batch) -> int:
    """The number of tokens in all responses that the policy produced."""
    return sum(sample.policy_tokens for group in batch.groups for sample in group.samples)


def to_train_sequences(batch: Batch, advantages: Tensor, skip_zero: bool) -> list[TrainSequence]:
    """Sequences to train on, in the batch's order.

    Args: advantages [G, n], one per sample (constant over its tokens: LlamaRL, section 6).
    `skip_zero` leaves out samples of zero advantage, and possibly all. The gradient stays the same, as they add nothing to it and
    `denominator` still counts them. `Algorithm.skip_zero` says whether that holds: a KL penalty has a gradient at zero advantage.
    """
    return [
        _train_sequence(group.prompt, sample, advantage)
        for group, row in zip(batch.groups, advantages.tolist(), strict=True)
        for sample, advantage in zip(group.samples, row, strict=True)
        if advantage != 0.0 or not skip_zero
    ]


def denominator(batch: Batch, algorithm: Algorithm) -> float:
    """The divisor of the summed loss: counts the whole batch, even if parts are left out of training."""
    return algorithm.denominator(policy_tokens(batch), sum(len(group.samples) for group in batch.groups))


def _train_sequence(prompt: Prompt, sample: Sample, advantage: float) -> TrainSequence:
    """Masks the environment's tokens like the prompt's: both are context that the policy did not choose."""
    p = len(prompt.token_ids)
    mask = sample.policy_mask or [True] * len(sample.token_ids)
    return TrainSequence(
        token_ids=prompt.token_ids + sample.token_ids,
        loss_mask=[False] * p + mask,
        mu_logprobs=[0.0] * p + [logprob if mine else 0.0 for logprob, mine in zip(sample.logprobs, mask, strict=True)],
        advantages=[0.0] * p + [advantage if mine else 0.0 for mine in mask],
        routing=sample.routing,
    )


def batch_metrics(batch: Batch, version: Version) -> dict[str, float]:
    """Metrics of a batch, used by a trainer at weight version `version`.

    A token's staleness is `version` minus the version that produced it; the environment's tokens have none. reward/std is over all
    samples. rollout/<name> and reward/<name>/mean are means of Sample.metrics and reward_parts over the samples that have them.
    """
    rewards = batch_rewards(batch)
    samples = [sample for group in batch.groups for sample in group.samples]
    staleness = torch.tensor([version - v for sample in samples for v in sample.policy_versions], dtype=torch.float64)
    tokens = sum(len(sample.token_ids) for sample in samples)
    counted = {f"rollout/{name}": value for name, value in _means([sample.metrics for sample in samples]).items()}
    parts = {f"reward/{name}/mean": value for name, value in _means([sample.reward_parts for sample in samples]).items()}
    return {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "staleness/mean": staleness.mean().item(),
        "staleness/max": staleness.max().item(),
        "response_tokens/mean": tokens / len(samples),
        "environment_tokens/fraction": 1 - policy_tokens(batch) / tokens,
        "turns/mean": sum(sample.turns for sample in samples) / len(samples),
        "truncated_fraction": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        "zero_advantage_fraction": (rewards == rewards[:, :1]).all(dim=1).double().mean().item(),
        **failure_metrics(samples),
        **parts,
        **counted,
    }


def _means(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the mappings that have it."""
    names = sorted({name for each in counts for name in each})
    return {name: fmean(each[name] for each in counts if name in each) for name in names}
