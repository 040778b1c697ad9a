"""Log-probabilities of given tokens from logits split over tensor-parallel ranks by vocabulary.

The forward pass takes one collective, the backward pass none. With this rank's logits z scaled by 1/T, and m = max z:

    forward   every rank contributes log sum e^z = m + log sum e^(z - m), and z at the target or 0; log Z = logsumexp over ranks
    backward  d logp / d z = (1[target] - e^(z - log Z)) / T

The work on a rank's own slice is done by a kernel on CUDA (logprobs_triton.py), and elsewhere by torch (below).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


def local_forward(logits: torch.Tensor, local_targets: torch.Tensor, real: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, for the columns below `real`: partial [2, N] float32 (log sum e^z, and z at the target), and what the backward needs.

    logits: [N, local vocab] any float dtype; local_targets: [N] int64, -1 for a target that another rank holds
    """
    z = logits[:, :real].float()
    if temperature != 1.0:
        z = z / temperature
    if not real:
        return torch.stack([z.new_full((len(z),), float("-inf")), z.new_zeros(len(z))]), z
    peak = z.amax(dim=-1)
    shift = torch.where(peak == float("-inf"), 0.0, peak)  # a slice of all -inf: e^(-inf - -inf) would be NaN
    log_sum = shift + (z - shift.unsqueeze(-1)).exp_().sum(dim=-1).log()
    at_target = z.gather(-1, local_targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.stack([log_sum, torch.where(local_targets >= 0, at_target, 0.0)]), z


def local_backward(
    kept: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, log_z: torch.Tensor, grad: torch.Tensor, real: int, temperature: float
) -> torch.Tensor:
    """The gradient of the logits, in their dtype. kept: from the forward; grad, log_z: [N] float32; targets: local ids."""
    grad = grad / temperature
    dz = (kept - log_z.unsqueeze(-1)).exp_().mul_(-grad.unsqueeze(-1))  # in place: this is the largest tensor here
    if real:
        dz.scatter_add_(-1, targets.clamp(min=0).unsqueeze(-1), torch.where(targets >= 0, grad, 0.0).unsqueeze(-1))
    return F.pad(dz, (0, logits.shape[-1] - real)).to(logits.dtype)


class VocabParallelLogprobs(torch.autograd.Function):
    """See megarl.kernels.vocab_parallel_logprobs."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: Any, vocab_size: int, temperature: float) -> torch.Tensor:
        local_vocab = logits.size(-1)
        first = group.rank() * local_vocab
        # Padding rows of the vocabulary have no token: they are left out of the softmax and get no gradient.
        real = min(max(vocab_size - first, 0), local_vocab)
        mine = (targets >= first) & (targets < first + real)
        local_targets = torch.where(mine, targets - first, -1).reshape(-1)
        flat = logits.reshape(-1, local_vocab)
        local = _local(logits)
        partial, kept = local.local_forward(flat, local_targets, real, temperature)
        everyone = partial.unsqueeze(0)  # [tp, 2, N]
        if group.size() > 1:
            everyone = partial.new_empty((group.size(), *partial.shape))
            dist.all_gather_into_tensor(everyone.view(-1), partial.reshape(-1), group=group)
        log_z = torch.logsumexp(everyone[:, 0], dim=0)
        ctx.save_for_backward(kept, flat, local_targets, log_z)
        ctx.local, ctx.real, ctx.temperature, ctx.shape = local, real, temperature, logits.shape
        return (everyone[:, 1].sum(dim=0) - log_z).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (grad,) = grads
        kept, flat, local_targets, log_z = ctx.saved_tensors
        gradient = ctx.local.local_backward(kept, flat, local_targets, log_z, grad.reshape(-1).float(), ctx.real, ctx.temperature)
        return gradient.view(ctx.shape), None, None, None, None


def _local(logits: torch.Tensor):
    """The module whose `local_forward` and `local_backward` work on these logits."""
    if logits.is_cuda:
        from megarl.kernels import logprobs_triton

        return logprobs_triton
    import sys

    return sys.modules[__name__]
