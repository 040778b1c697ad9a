"""Reverse KL divergences KL(pi || q) of a policy pi from a teacher q, position by position, without
keeping logits.

As in chunked_logprobs.py, the logits of `chunk_tokens` rows at a time are computed, reduced over
this rank's slice of the vocabulary, and dropped; the backward pass computes them again. With the
policy's probabilities p and the log-ratio r = log p - log q of a token:

    forward   KL = sum of p r
    backward  dz = p (r - KL) g / T, where g is the gradient of KL; no collective

If only the teacher's likeliest k tokens K are known, all others form one bucket. With P and Q the
policy's and the teacher's probability of the bucket, r = log P - log Q for every token in it. The
result is the divergence of the two coarser distributions,

    KL_k = sum over K of p (log p - log q) + P (log P - log Q).

It is at most the whole divergence (log-sum inequality), equal to it if k is the size of the
vocabulary, and 0 only if pi agrees with q on every token of K.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from megarl.kernels.chunked_logprobs import (
    VocabularySlice,
    _add_product,
    _product,
    _scaled,
    all_shares,
    begin_weight_sum,
    end_weight_sum,
)

# Least probability of a teacher's bucket: the smallest that 1 minus a sum in float32 can
# distinguish from 0.
LEAST_REST = 2.0**-23


class Teacher(Protocol):
    def partial(self, rows: slice, z: torch.Tensor, vocab_slice: VocabularySlice) -> torch.Tensor:
        """[m, N] float32: this rank's share of a chunk's divergence, from the policy's scaled
        logits z [N, real]. `real` may be 0.
        """
        ...

    def combine(
        self, everyone: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """(KL [t], the policy's log Z [t], further values for `ratios`), from the shares of all
        ranks [tp, m, t].
        """
        ...

    def ratios(
        self,
        rows: slice,
        z: torch.Tensor,
        vocab_slice: VocabularySlice,
        saved: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """[N, real] the log-ratios of a chunk's tokens."""
        ...


class WholeDistribution(NamedTuple):
    """A teacher of whom all is known."""

    hidden: torch.Tensor  # [t, h'] with the teacher's own hidden size
    weight: torch.Tensor  # [padded_vocab / tp, h'] its output layer, sliced like the policy's

    def partial(self, rows: slice, z: torch.Tensor, vocab_slice: VocabularySlice) -> torch.Tensor:
        if not vocab_slice.real:
            empty = z.new_full((len(z),), float("-inf"))
            return torch.stack([empty, empty, torch.zeros_like(empty)])
        u = _logits(self.hidden[rows], self.weight, vocab_slice)
        log_z = z.logsumexp(dim=1)
        log_u = u.logsumexp(dim=1)
        mean = (z - log_z.unsqueeze(1)).exp_().mul_(u.neg_().add_(z)).sum(dim=1)
        return torch.stack([log_z, log_u, mean])

    def combine(
        self, everyone: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        log_sums, teacher_sums, means = everyone.unbind(dim=1)
        log_z = log_sums.logsumexp(dim=0)
        log_u = teacher_sums.logsumexp(dim=0)
        offset = log_u - log_z
        return ((log_sums - log_z).exp() * means).sum(dim=0) + offset, log_z, (offset,)

    def ratios(
        self,
        rows: slice,
        z: torch.Tensor,
        vocab_slice: VocabularySlice,
        saved: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        u = _logits(self.hidden[rows], self.weight, vocab_slice)
        return u.neg_().add_(z).add_(saved[0][rows].unsqueeze(1))


class LikeliestTokens(NamedTuple):
    """A teacher whose likeliest tokens are known.

    A token outside the policy's vocabulary counts neither as known nor in the bucket.
    """

    ids: torch.Tensor  # [t, k] int64, no id twice in a row
    logprobs: torch.Tensor  # [t, k] float32, at temperature 1

    def partial(self, rows: slice, z: torch.Tensor, vocab_slice: VocabularySlice) -> torch.Tensor:
        places = self._places(rows, vocab_slice)
        # a column for tokens of other ranks
        extended = torch.cat([z, z.new_zeros(len(z), 1)], dim=1)
        at_tokens = extended.gather(1, places)
        bucket_logits = extended.scatter(1, places, float("-inf"))[:, : vocab_slice.real]
        log_rest = bucket_logits.logsumexp(dim=1)
        return torch.cat([torch.stack([z.logsumexp(dim=1), log_rest]), at_tokens.t()])

    def combine(
        self, everyone: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        log_z = everyone[:, 0].logsumexp(dim=0)
        log_rest = everyone[:, 1].logsumexp(dim=0)
        log_p = everyone[:, 2:].sum(dim=0).t() - log_z.unsqueeze(1)
        in_vocabulary = self.ids < vocab_size
        log_p_rest = log_rest - log_z
        q_rest = (1 - self.logprobs.double().exp().sum(dim=1)).clamp(min=LEAST_REST)
        log_q_rest = q_rest.log().to(log_z.dtype)
        ratios = torch.where(in_vocabulary, log_p - self.logprobs, 0.0)
        rest_ratio = torch.where(log_p_rest == float("-inf"), 0.0, log_p_rest - log_q_rest)
        p = torch.where(in_vocabulary, log_p.exp(), 0.0)
        kl = (p * ratios).sum(dim=1) + log_p_rest.exp() * rest_ratio
        return kl, log_z, (ratios, rest_ratio)

    def ratios(
        self,
        rows: slice,
        z: torch.Tensor,
        vocab_slice: VocabularySlice,
        saved: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        ratios, rest_ratio = (values[rows] for values in saved)
        of_rest = rest_ratio.unsqueeze(1).repeat(1, vocab_slice.real + 1)
        return of_rest.scatter_(1, self._places(rows, vocab_slice), ratios)[:, : vocab_slice.real]

    def _places(self, rows: slice, vocab_slice: VocabularySlice) -> torch.Tensor:
        """[N, k] columns in this rank's slice.

        Tokens of other ranks get the column after the last.
        """
        local = self.ids[rows] - vocab_slice.first
        return torch.where((local >= 0) & (local < vocab_slice.real), local, vocab_slice.real)


class LinearKl(torch.autograd.Function):
    """See megarl.kernels.linear_kl."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher: Teacher,
        group: dist.ProcessGroup,
        vocab_size: int,
        temperature: float,
        chunk_tokens: int,
        weight_grad: torch.Tensor | None,
    ) -> torch.Tensor:
        vocab_slice = VocabularySlice.of(weight, group, vocab_size, temperature)
        parts = []
        for rows, z in _chunks(hidden, weight, vocab_slice, chunk_tokens):
            parts.append(teacher.partial(rows, z, vocab_slice))
        everyone = all_shares(torch.cat(parts, dim=1), group)
        kl, log_z, saved = teacher.combine(everyone, vocab_size)
        ctx.save_for_backward(hidden, weight, kl, log_z, *saved)
        ctx.teacher = teacher
        ctx.vocab_slice = vocab_slice
        ctx.chunk_tokens = chunk_tokens
        ctx.weight_grad = weight_grad
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, kl, log_z, *saved = ctx.saved_tensors
        factor = grads[0] / ctx.vocab_slice.temperature
        hidden_grad = torch.zeros_like(hidden)
        weight_sum = begin_weight_sum(ctx, weight)
        real = ctx.vocab_slice.real
        chunks = _chunks(hidden, weight, ctx.vocab_slice, ctx.chunk_tokens) if real else ()
        for rows, z in chunks:
            ratios = ctx.teacher.ratios(rows, z, ctx.vocab_slice, tuple(saved))
            p = z.sub_(log_z[rows].unsqueeze(1)).exp_()
            dz = p.mul_(ratios.sub_(kl[rows].unsqueeze(1))).mul_(factor[rows].unsqueeze(1))
            dz = dz.to(hidden.dtype)
            torch.mm(dz, weight[:real], out=hidden_grad[rows])
            if weight_sum is not None:
                _add_product(weight_sum[:real], dz.t(), hidden[rows])
        weight_grad = end_weight_sum(ctx, weight, weight_sum)
        return hidden_grad, weight_grad, None, None, None, None, None, None


def _chunks(
    hidden: torch.Tensor, weight: torch.Tensor, vocab_slice: VocabularySlice, chunk_tokens: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields the rows of each chunk (at least one chunk), and their scaled logits [N, real]."""
    for start in range(0, max(1, len(hidden)), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        yield rows, _logits(hidden[rows], weight, vocab_slice)


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, vocab_slice: VocabularySlice
) -> torch.Tensor:
    """[N, real] the scaled logits."""
    return _scaled(_product(hidden, weight)[:, : vocab_slice.real], vocab_slice.temperature)
