"""Log-probabilities and entropy of a microbatch, from logits split by vocabulary and, under context parallelism, by position."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.kernels import vocab_parallel_entropy, vocab_parallel_logprobs
from megarl.trainer import context
from megarl.trainer.microbatch import MicroBatch


def token_logprobs(
    logits: torch.Tensor,
    microbatch: MicroBatch,
    group: dist.ProcessGroup,
    cp_group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """[t] float32: the log-prob of each position's target. The same on all ranks of both groups.

    logits: [t / cp, padded_vocab / tp], of this rank's positions. Differentiable, if all ranks of `cp_group` go on to the same loss.
    """
    boundaries = microbatch.plan.boundaries
    targets = context.cut(microbatch.targets, boundaries, cp_group)
    return context.join(vocab_parallel_logprobs(logits, targets, group, vocab_size, temperature), boundaries, cp_group)


def token_entropy(
    logits: torch.Tensor,
    microbatch: MicroBatch,
    group: dist.ProcessGroup,
    cp_group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """[t] float32: the entropy, in nats, at each position's choice. No gradient; see `token_logprobs`."""
    return context.join(vocab_parallel_entropy(logits, group, vocab_size, temperature), microbatch.plan.boundaries, cp_group)
