"""Log-probabilities and entropy of given tokens from hidden states and a slice of the output layer,
without keeping logits.

The logits of `chunk_tokens` rows at a time are computed, reduced over this rank's slice of the
vocabulary, and dropped; the backward pass computes them again. So memory depends on the chunk and
not on the number of rows, at the cost of a fourth product beside the other three. With the logits z
scaled by 1/T:

    forward   every rank contributes log sum e^z, the entropy of its own softmax, and z at the
              target or 0: one collective, for all rows
              log Z = logsumexp over ranks; log p = z[target] - log Z
              H = sum of s (H_rank - log s), with the ranks' shares s of Z
    backward  dz = (g (1[target] - p) - g_H p (log p + H)) / T, where g and g_H are the gradients
              of log p and H; no collective

If a token was drawn from a part of the vocabulary (`allowed`), the softmax is over that part. After
the product, the logits of the part are gathered into rows as wide as the chunk's largest set. They
are padded with `ABSENT`, whose exponential is 0. All other logits have gradient 0.

The products are done by the matrix library. The work between them is done by a kernel on CUDA
(chunked_logprobs_triton.py), elsewhere by torch (below). Logits are float32 even if hidden states
and weights are bfloat16, except on a CPU, whose products round them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# an absent logit: finite, so that nothing becomes NaN if a rank has no token of a set
ABSENT = -1e20


class LinearLogprobs(torch.autograd.Function):
    """See megarl.kernels.linear_logprobs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        group: dist.ProcessGroup,
        vocab_size: int,
        temperature: float,
        chunk_tokens: int,
        weight_grad: torch.Tensor | None,
        allowed: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = group.rank() * len(weight)
        # without padding rows of the vocabulary
        real = min(max(vocab_size - first, 0), len(weight))
        local_targets = torch.where(
            (targets >= first) & (targets < first + real), targets - first, -1
        )
        local = _local(hidden)
        parts = []
        for rows, sets in _chunks(len(hidden) if real else 0, chunk_tokens, allowed, first, real):
            logits = _product(hidden[rows], weight)
            chunk_targets = local_targets[rows]
            if sets is None:
                parts.append(local.local_forward(logits, chunk_targets, real, temperature))
            else:
                parts.append(
                    local.local_forward(
                        _gathered(logits, sets),
                        _place(chunk_targets, sets),
                        sets.size(1),
                        temperature,
                    )
                )
        if parts:
            partial_sums = torch.cat(parts, dim=1)
        else:
            partial_sums = hidden.new_zeros((3, len(hidden)), dtype=torch.float32)
        if not real:
            partial_sums[0] = float("-inf")
        everyone = partial_sums.unsqueeze(0)  # [tp, 3, t]
        if group.size() > 1 and len(hidden):
            everyone = partial_sums.new_empty((group.size(), *partial_sums.shape))
            dist.all_gather_into_tensor(everyone.view(-1), partial_sums.view(-1), group=group)
        log_sums, entropies, at_target = everyone.unbind(dim=1)
        log_z = log_sums.logsumexp(dim=0)
        shares = (log_sums - log_z).exp()
        entropy = (shares * entropies - torch.xlogy(shares, shares)).sum(dim=0)
        ctx.save_for_backward(hidden, weight, local_targets, log_z, entropy)
        ctx.local = local
        ctx.real = real
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        ctx.weight_grad = weight_grad
        ctx.allowed = allowed
        ctx.first = first
        ctx.set_materialize_grads(False)
        return at_target.sum(dim=0) - log_z, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad, entropy_grad = grads
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        grad = torch.zeros_like(log_z) if grad is None else grad.contiguous()
        entropy_grad = None if entropy_grad is None else entropy_grad.contiguous()
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            if ctx.weight_grad is None:
                weight_grad = weight.new_zeros(weight.shape, dtype=torch.float32)
            else:
                weight_grad = ctx.weight_grad
        for rows, sets in _chunks(
            len(hidden) if ctx.real else 0, ctx.chunk_tokens, ctx.allowed, ctx.first, ctx.real
        ):
            logits = _product(hidden[rows], weight)
            chunk_targets = targets[rows]
            entropy_rows = None if entropy_grad is None else (entropy_grad[rows], entropy[rows])
            local_backward = partial(
                ctx.local.local_backward,
                log_z=log_z[rows],
                grad=grad[rows],
                of_entropy=entropy_rows,
                temperature=ctx.temperature,
                dtype=hidden.dtype,
            )
            if sets is None:
                dlogits = local_backward(logits, chunk_targets, real=ctx.real)
            else:
                dsets = local_backward(
                    _gathered(logits, sets), _place(chunk_targets, sets), real=sets.size(1)
                )
                dlogits = logits.zero_()
                if logits.dtype != hidden.dtype:
                    dlogits = torch.zeros_like(logits, dtype=hidden.dtype)
                dlogits.scatter_add_(1, sets.clamp(min=0), dsets)  # absent tokens add 0
            torch.mm(dlogits, weight, out=hidden_grad[rows])
            if weight_grad is not None:
                _add_product(weight_grad, dlogits.t(), hidden[rows])
        if weight_grad is not None:
            if ctx.weight_grad is None:
                weight_grad = weight_grad.to(weight.dtype)
            else:
                weight_grad = weight.new_zeros(()).expand_as(weight)
        return hidden_grad, weight_grad, None, None, None, None, None, None, None


def local_forward(
    logits: torch.Tensor, targets: torch.Tensor, real: int, temperature: float
) -> torch.Tensor:
    """[3, N] float32: log sum e^z, the entropy of softmax(z), and z at the target.

    Covers the columns below `real`, which is at least 1.

    logits: [N, local vocab], overwritten; targets: [N] int64, -1 for a target on another rank
    """
    z = _scaled(logits[:, :real], temperature)
    at_target = torch.where(
        targets >= 0, z.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1), 0.0
    )
    peak = z.amax(dim=-1, keepdim=True)
    z.sub_(peak)
    weights = z.exp()
    total = weights.sum(dim=-1)
    mean = weights.mul_(z).sum(dim=-1) / total
    return torch.stack([peak[:, 0] + total.log(), total.log() - mean, at_target])


def local_backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_z: torch.Tensor,
    grad: torch.Tensor,
    of_entropy: tuple[torch.Tensor, torch.Tensor] | None,
    real: int,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of the logits, [N, local vocab] in `dtype`.

    logits: as in `local_forward`; log_z, grad: [N] float32, over all ranks; of_entropy: gradient
    and value of the entropy, [N] float32
    """
    logits[:, real:] = 0
    log_p = _scaled(logits[:, :real], temperature).sub_(log_z.unsqueeze(-1))
    grad = grad / temperature
    factor = -grad.unsqueeze(-1)
    if of_entropy is not None:
        entropy_grad, entropy = (x.unsqueeze(-1) for x in of_entropy)
        factor = (log_p + entropy).mul_(entropy_grad / -temperature).add_(factor)
    dlogits = log_p.exp_().mul_(factor)
    dlogits.scatter_add_(
        -1, targets.clamp(min=0).unsqueeze(-1), torch.where(targets >= 0, grad, 0.0).unsqueeze(-1)
    )
    return logits.to(dtype)


def _chunks(
    tokens: int,
    chunk_tokens: int,
    allowed: tuple[torch.Tensor, torch.Tensor] | None,
    first: int,
    real: int,
) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """Yields the rows of each chunk, and the columns of their sets in this rank's slice: [N, size
    of the largest set] int64, -1 for none.
    """
    begin = 0
    for start in range(0, tokens, chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        sets = None
        if allowed is not None:
            sizes = allowed[0][rows]
            ids = allowed[1]
            is_member = torch.arange(int(sizes.max())) < sizes.unsqueeze(1)
            if ids.is_cuda:
                is_member = is_member.pin_memory().to(ids.device, non_blocking=True)
            else:
                is_member = is_member
            end = begin + int(sizes.sum())
            local = ids[begin:end].long() - first
            local = torch.where((local >= 0) & (local < real), local, -1)
            sets = torch.full(is_member.shape, -1, device=ids.device).masked_scatter_(
                is_member, local
            )
            begin = end
        yield rows, sets


def _gathered(logits: torch.Tensor, sets: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, sets.clamp(min=0)).masked_fill_(sets < 0, ABSENT)


def _place(targets: torch.Tensor, sets: torch.Tensor) -> torch.Tensor:
    """The index of each target in its set; -1 if another rank has it."""
    is_target = (sets == targets.unsqueeze(1)) & (sets >= 0)
    return torch.where(is_target.any(dim=1), is_target.int().argmax(dim=1), -1)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature == 1.0:
        return logits
    return logits.div_(temperature)


def _product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[N, local vocab] float32: the logits."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return torch.mm(hidden, weight.t()).float()


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where `total` is float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(torch.mm(a, b))


def _local(hidden: torch.Tensor):
    """The module with the `local_forward` and `local_backward` for the logits of these hidden
    states.
    """
    if hidden.is_cuda:
        from megarl.kernels import chunked_logprobs_triton

        return chunked_logprobs_triton
    return sys.modules[__name__]
