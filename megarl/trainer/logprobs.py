"""Log-probabilities and entropy of whole sequences, from logits split by vocabulary and, under context parallelism, by position."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megarl.kernels import vocab_parallel_entropy, vocab_parallel_logprobs
from megarl.trainer import context


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """[b, s] float32: entry i is log p(token i | tokens < i), and 0 at i = 0. The same on all ranks of both groups.

    logits: [b, (s - 1) / cp, padded_vocab / tp], of this rank's positions; position i predicts token i + 1. tokens: [b, s].
    Differentiable, if all ranks of `cp_group` (None: whole sequences) go on to the same loss.
    """
    if cp_group is None:
        return F.pad(vocab_parallel_logprobs(logits, tokens[:, 1:], group, vocab_size, temperature), (1, 0))
    logprobs = vocab_parallel_logprobs(logits, context.cut(tokens[:, 1:], cp_group), group, vocab_size, temperature)
    return F.pad(context.join(logprobs, cp_group), (1, 0))


def token_entropy(
    logits: torch.Tensor, group: dist.ProcessGroup, vocab_size: int, temperature: float = 1.0, cp_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """[b, s] float32: entry i is the entropy, in nats, at the choice of token i, and 0 at i = 0. No gradient; see `token_logprobs`."""
    entropy = vocab_parallel_entropy(logits, group, vocab_size, temperature)
    return F.pad(entropy if cp_group is None else context.join(entropy, cp_group), (1, 0))
