"""Log-probabilities of given tokens from logits that are split over tensor-parallel ranks by vocabulary."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megarl.trainer import context


class _VocabParallelLogprobs(torch.autograd.Function):
    """One collective forward, none backward. With logits z of this rank scaled by 1/T, m = max z, e = exp(z - m):

    forward   every rank contributes (m, sum e, z at the target or 0); log Z = logsumexp over ranks of m + log sum e
    backward  d logp / d z = (1[target] - e * exp(m - log Z)) / T
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: Any, vocab_size: int, temperature: float) -> torch.Tensor:
        local_vocab = logits.size(-1)
        first = group.rank() * local_vocab
        # Rows of the padded vocabulary have no token: they take no part in the softmax and get no gradient.
        real = min(max(vocab_size - first, 0), local_vocab)
        z = logits[..., :real].float()
        if temperature != 1.0:
            z = z / temperature

        local_targets = targets - first
        mine = (local_targets >= 0) & (local_targets < real)
        local_targets = torch.where(mine, local_targets, 0)
        if real:
            peak = z.amax(dim=-1)
            e = torch.exp(z - peak.unsqueeze(-1))
            at_target = torch.where(mine, z.gather(-1, local_targets.unsqueeze(-1)).squeeze(-1), 0.0)
            partial = torch.stack([peak + e.sum(dim=-1).log(), at_target])
        else:
            peak, e = z.new_zeros(targets.shape), z
            partial = torch.stack([z.new_full(targets.shape, float("-inf")), z.new_zeros(targets.shape)])

        everyone = partial.unsqueeze(0)  # [tp, 2, ...]
        if group.size() > 1:
            everyone = partial.new_empty((group.size(), *partial.shape))
            dist.all_gather_into_tensor(everyone.view(-1), partial.view(-1), group=group)
        log_z = torch.logsumexp(everyone[:, 0], dim=0)

        ctx.save_for_backward(e, peak - log_z, local_targets, mine)
        ctx.local_vocab, ctx.temperature, ctx.dtype = local_vocab, temperature, logits.dtype
        return everyone[:, 1].sum(dim=0) - log_z

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        e, log_scale, local_targets, mine = ctx.saved_tensors
        grad = grad.float() / ctx.temperature
        dz = e.mul_((-grad * log_scale.exp()).unsqueeze(-1))  # e is not needed again: the largest tensor here is not copied
        if dz.size(-1):
            dz.scatter_add_(-1, local_targets.unsqueeze(-1), torch.where(mine, grad, 0.0).unsqueeze(-1))
        padding = ctx.local_vocab - dz.size(-1)
        return (F.pad(dz, (0, padding)) if padding else dz).to(ctx.dtype), None, None, None, None


def vocab_parallel_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup, vocab_size: int, temperature: float = 1.0
) -> torch.Tensor:
    """log softmax(logits / temperature) at `targets`, computed in float32; differentiable in `logits`.

    logits:  [..., padded_vocab / tp] this rank's slice of the vocabulary, any float dtype
    targets: [...] global token ids, int64, the same on all ranks of `group`, all below `vocab_size`
    returns: [...] float32, the same on all ranks of `group`

    Every rank of `group` must call it, with the same shapes.
    """
    return _VocabParallelLogprobs.apply(logits, targets, group, vocab_size, temperature)


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    cp_group: Optional[dist.ProcessGroup] = None,
) -> torch.Tensor:
    """[b, s] float32: entry i is log p(token i | tokens < i), and 0 at i = 0. The same on all ranks of both groups.

    logits: [b, (s - 1) / cp, padded_vocab / tp], of this rank's positions; position i predicts token i + 1. tokens: [b, s].
    Differentiable, if all ranks of `cp_group` (None: whole sequences) go on to the same loss.
    """
    if cp_group is None:
        return F.pad(vocab_parallel_logprobs(logits, tokens[:, 1:], group, vocab_size, temperature), (1, 0))
    logprobs = vocab_parallel_logprobs(logits, context.cut(tokens[:, 1:], cp_group), group, vocab_size, temperature)
    return F.pad(context.join(logprobs, cp_group), (1, 0))
