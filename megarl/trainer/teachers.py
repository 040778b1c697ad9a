"""What a step is told by its teachers: each of these classes makes, from a microbatch, what the loss takes of one teacher.

A teacher on engines has sent numbers of each token; one on the trainer's ranks is a frozen model there. The temperature of both
distributions, the policy's and the teacher's, is rollout.temperature, as it is for the reference. SGLang gives log-probs of a prompt at
temperature 1 alone, so with a teacher on engines it must be 1 (plan/teachers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.algorithms.distill import Taught
from megarl.kernels import linear_kl
from megarl.kernels.chunked_kl import Likeliest, Teacher, Whole
from megarl.trainer.groups import tensor_group
from megarl.trainer.logprobs import Rows, main_grad, spread
from megarl.trainer.megatron_model import MegatronModel
from megarl.trainer.microbatch import MicroBatch, lay
from megarl.trainer.model import output_weight
from megarl.trainer.sending import sent

Divergence = Callable[[Callable[[np.ndarray], Teacher]], torch.Tensor]
"""[t] float32 the policy's divergence from a teacher, of whom the argument makes what is known at given positions [N]."""


@dataclass(frozen=True)
class OfTokens:
    """Log-probs of the tokens themselves."""

    logprobs: Sequence[np.ndarray]  # [L] of each sequence; NaN where the teacher has said nothing

    def __call__(self, microbatch: MicroBatch, divergence: Divergence) -> Taught:
        row = sent(torch.from_numpy(lay(microbatch.plan, lambda i: self.logprobs[i], np.float32)), microbatch.targets.device)
        return Taught(row.nan_to_num(), microbatch.loss_mask & ~row.isnan())


@dataclass(frozen=True)
class OfLikeliest:
    """The likeliest tokens at each place."""

    ids: Sequence[np.ndarray]  # [L, k] of each sequence
    logprobs: Sequence[np.ndarray]  # [L, k]; NaN where the teacher has said nothing

    def __call__(self, microbatch: MicroBatch, divergence: Divergence) -> Taught:
        plan, device = microbatch.plan, microbatch.targets.device
        shape = next((row.shape[1:] for row in self.ids if row.ndim == 2), (1,))
        ids = lay(plan, lambda i: self.ids[i], np.int64, shape)
        logprobs = lay(plan, lambda i: self.logprobs[i], np.float32, shape)
        known = np.isfinite(logprobs[:, 0])  # all of a place, or nothing

        def at(positions: np.ndarray) -> Teacher:
            some = np.where(known[positions][:, None], ids[positions], np.arange(shape[0]))
            return Likeliest(sent(torch.from_numpy(some), device), sent(torch.from_numpy(np.nan_to_num(logprobs[positions])), device))

        return Taught(divergence(at), microbatch.loss_mask & sent(torch.from_numpy(known), device))


class OfModel:
    """The whole vocabulary at each place, from a frozen model, which computes the step's microbatches before the policy does."""

    def __init__(self, model: MegatronModel, hidden: dict[tuple[int, ...], torch.Tensor]):
        self._model, self._hidden = model, hidden

    def __call__(self, microbatch: MicroBatch, divergence: Divergence) -> Taught:
        hidden, weight = self._hidden[microbatch.plan.indices], output_weight(self._model.chunks[-1]).detach()
        return Taught(divergence(lambda positions: Whole(hidden.to(weight.device), weight)), microbatch.loss_mask)


TeacherOfStep = OfTokens | OfLikeliest | OfModel


def token_divergence(
    make: Callable[[np.ndarray], Teacher],
    rows: Rows,
    weight: torch.nn.Parameter,
    microbatch: MicroBatch,
    vocab_size: int,
    *,
    temperature: float,
    chunk_tokens: int,
) -> torch.Tensor:
    """[t] float32: the divergence at each position, 0 where not `microbatch.scored`; with gradients as token_logprobs."""
    of_rows = make(rows.positions)
    values = linear_kl(rows.rows, weight, of_rows, tensor_group(), vocab_size, temperature, chunk_tokens, main_grad(weight))
    return spread(values, rows, microbatch)
