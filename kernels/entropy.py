"""Entropy of the policy at each position, from logits split over tensor-parallel ranks by vocabulary. A metric, without gradient.

With its logits z scaled by 1/T, every rank contributes log sum e^z and the mean of z under its own softmax. Over all ranks
H = log Z - E[z], where E[z] is the mean of the ranks' means weighted by their shares of Z. It is computed in chunks of positions, so that
the scratch memory does not grow with their number.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

CHUNK = 1024  # positions


@torch.no_grad()
def vocab_parallel_entropy(logits: torch.Tensor, group: dist.ProcessGroup, vocab_size: int, temperature: float) -> torch.Tensor:
    """See megarl.kernels.vocab_parallel_entropy."""
    local_vocab = logits.size(-1)
    real = min(max(vocab_size - group.rank() * local_vocab, 0), local_vocab)  # rows of the padded vocabulary have no token
    flat = logits.reshape(-1, local_vocab)[:, :real]
    partial = torch.cat([_partial(rows, temperature) for rows in flat.split(CHUNK)], dim=1)
    everyone = partial.unsqueeze(0)  # [tp, 2, N]
    if group.size() > 1:
        everyone = partial.new_empty((group.size(), *partial.shape))
        dist.all_gather_into_tensor(everyone.view(-1), partial.reshape(-1), group=group)
    log_sums, means = everyone.unbind(dim=1)
    log_z = log_sums.logsumexp(dim=0)
    return (log_z - ((log_sums - log_z).exp() * means).sum(dim=0)).view(logits.shape[:-1])


def _partial(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[2, N] float32: log sum e^z, and the mean of z under softmax(z)."""
    z = logits.float() / temperature
    if not z.size(-1):
        return torch.stack([z.new_full((len(z),), float("-inf")), z.new_zeros(len(z))])
    log_sum = z.logsumexp(dim=-1)
    p = (z - log_sum.nan_to_num(neginf=0.0).unsqueeze(-1)).exp_()
    return torch.stack([log_sum, torch.where(p > 0, p * z, 0.0).sum(dim=-1)])  # a token that cannot be sampled has z = -inf, and no share
