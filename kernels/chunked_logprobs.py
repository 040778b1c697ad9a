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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# an absent logit: finite, so that nothing becomes NaN if a rank has no token of a set
ABSENT = -1e20


class VocabularySlice(NamedTuple):
    """This rank's part of the vocabulary."""

    first: int
    real: int  # number of tokens; padding follows
    temperature: float

    @classmethod
    def of(
        cls, weight: torch.Tensor, group: dist.ProcessGroup, vocab_size: int, temperature: float
    ) -> VocabularySlice:
        first = group.rank() * len(weight)
        return cls(first, min(max(vocab_size - first, 0), len(weight)), temperature)


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
        vocab_slice = VocabularySlice.of(weight, group, vocab_size, temperature)
        local_targets = _in_slice(targets, vocab_slice)
        local = _local(hidden)
        parts = []
        for rows, sets in _chunks(len(hidden), chunk_tokens, allowed, vocab_slice):
            logits = _product(hidden[rows], weight)
            columns, places, real = _selected(logits, local_targets[rows], sets, vocab_slice)
            parts.append(local.local_forward(columns, places, real, temperature))
        if parts:
            partial_sums = torch.cat(parts, dim=1)
        else:
            partial_sums = hidden.new_zeros((3, len(hidden)), dtype=torch.float32)
        if not vocab_slice.real:
            partial_sums[0] = float("-inf")
        log_sums, entropies, at_target = all_shares(partial_sums, group).unbind(dim=1)
        log_z = log_sums.logsumexp(dim=0)
        shares = (log_sums - log_z).exp()
        entropy = (shares * entropies - torch.xlogy(shares, shares)).sum(dim=0)
        ctx.save_for_backward(hidden, weight, local_targets, log_z, entropy)
        ctx.local = local
        ctx.vocab_slice = vocab_slice
        ctx.chunk_tokens = chunk_tokens
        ctx.weight_grad = weight_grad
        ctx.allowed = allowed
        ctx.set_materialize_grads(False)
        return at_target.sum(dim=0) - log_z, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad, entropy_grad = grads
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        grad = torch.zeros_like(log_z) if grad is None else grad.contiguous()
        if entropy_grad is not None:
            entropy_grad = entropy_grad.contiguous()
        hidden_grad = torch.zeros_like(hidden)
        weight_sum = begin_weight_sum(ctx, weight)
        for rows, sets in _chunks(len(hidden), ctx.chunk_tokens, ctx.allowed, ctx.vocab_slice):
            logits = _product(hidden[rows], weight)
            columns, places, real = _selected(logits, targets[rows], sets, ctx.vocab_slice)
            of_entropy = None
            if entropy_grad is not None:
                of_entropy = (entropy_grad[rows], entropy[rows])
            dlogits = ctx.local.local_backward(
                columns,
                places,
                log_z=log_z[rows],
                grad=grad[rows],
                of_entropy=of_entropy,
                real=real,
                temperature=ctx.vocab_slice.temperature,
                dtype=hidden.dtype,
            )
            if sets is not None:
                dsets = dlogits
                dlogits = logits.zero_()
                if logits.dtype != hidden.dtype:
                    dlogits = torch.zeros_like(logits, dtype=hidden.dtype)
                dlogits.scatter_add_(1, sets.clamp(min=0), dsets)  # absent tokens add 0
            torch.mm(dlogits, weight, out=hidden_grad[rows])
            if weight_sum is not None:
                _add_product(weight_sum, dlogits.t(), hidden[rows])
        weight_grad = end_weight_sum(ctx, weight, weight_sum)
        return hidden_grad, weight_grad, None, None, None, None, None, None, None


def all_shares(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[tp, m, t] from the shares [m, t] of all ranks."""
    if group.size() == 1 or not partial.size(1):
        return partial.unsqueeze(0)
    everyone = partial.new_empty((group.size(), *partial.shape))
    dist.all_gather_into_tensor(everyone.view(-1), partial.contiguous().view(-1), group=group)
    return everyone


def begin_weight_sum(ctx: Any, weight: torch.Tensor) -> torch.Tensor | None:
    """The float32 tensor to which the gradient of `weight` is added; None if nobody needs it."""
    if not ctx.needs_input_grad[1]:
        return None
    if ctx.weight_grad is not None:
        return ctx.weight_grad
    return weight.new_zeros(weight.shape, dtype=torch.float32)


def end_weight_sum(
    ctx: Any, weight: torch.Tensor, weight_sum: torch.Tensor | None
) -> torch.Tensor | None:
    """What autograd gets for `weight`: the sum, or zeros if the caller's tensor has it."""
    if weight_sum is None:
        return None
    if ctx.weight_grad is not None:
        return weight.new_zeros(()).expand_as(weight)
    return weight_sum.to(weight.dtype)


def local_forward(
    logits: torch.Tensor, targets: torch.Tensor, real: int, temperature: float
) -> torch.Tensor:
    """[3, N] float32: log sum e^z, the entropy of softmax(z), and z at the target.

    Covers the columns below `real`, which is at least 1.

    logits: [N, local vocab], overwritten; targets: [N] int64, -1 for a target on another rank
    """
    z = _scaled(logits[:, :real], temperature)
    target_logits = z.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    at_target = torch.where(targets >= 0, target_logits, 0.0)
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
    vocab_slice: VocabularySlice,
) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """Yields the rows of each chunk, and the columns of their sets in this rank's slice: [N, size
    of the largest set] int64, -1 for none. Nothing if the slice is empty.
    """
    begin = 0
    for start in range(0, tokens if vocab_slice.real else 0, chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        sets = None
        if allowed is not None:
            sizes = allowed[0][rows]
            ids = allowed[1]
            is_member = torch.arange(int(sizes.max())) < sizes.unsqueeze(1)
            if ids.is_cuda:
                is_member = is_member.pin_memory().to(ids.device, non_blocking=True)
            end = begin + int(sizes.sum())
            local = _in_slice(ids[begin:end].long(), vocab_slice)
            sets = torch.full(is_member.shape, -1, device=ids.device)
            sets.masked_scatter_(is_member, local)
            begin = end
        yield rows, sets


def _in_slice(ids: torch.Tensor, vocab_slice: VocabularySlice) -> torch.Tensor:
    """The columns of these tokens in this rank's slice; -1 for tokens of other ranks."""
    local = ids - vocab_slice.first
    return torch.where((local >= 0) & (local < vocab_slice.real), local, -1)


def _selected(
    logits: torch.Tensor,
    targets: torch.Tensor,
    sets: torch.Tensor | None,
    vocab_slice: VocabularySlice,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(the logits of the sets, the index of each target in its set or -1 if another rank has it,
    the columns that count); without sets, of the whole slice.
    """
    if sets is None:
        return logits, targets, vocab_slice.real
    set_logits = logits.gather(1, sets.clamp(min=0)).masked_fill_(sets < 0, ABSENT)
    is_target = (sets == targets.unsqueeze(1)) & (sets >= 0)
    places = torch.where(is_target.any(dim=1), is_target.int().argmax(dim=1), -1)
    return set_logits, places, sets.size(1)


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
