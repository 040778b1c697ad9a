"""Log-probabilities and entropy from hidden states, for the positions of a microbatch that count in
the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megarl.kernels import linear_logprobs
from megarl.trainer import layers
from megarl.trainer.distributed import to_device
from megarl.trainer.microbatch import MicroBatch
from megarl.trainer.parallel import context_group, tensor_group


class Rows(NamedTuple):
    """The rows of a microbatch on this context rank whose predictions count in the loss."""

    rows: (
        torch.Tensor
        # [N, h] hidden states, whole on each tensor rank; every tensor rank computes the gradient
        # from its part of the vocabulary
    )
    positions: np.ndarray  # [N] in the microbatch
    indices: torch.Tensor  # [N] their indices among the rows on this rank
    row_count: int


def scored_rows(hidden: torch.Tensor, microbatch: MicroBatch, sequence_parallel: bool) -> Rows:
    """hidden: [t / cp, h], or [t / cp / tp, h] if the sequence is also split over tensor ranks."""
    tensor = tensor_group()
    ranks = context_group()
    scored = microbatch.scored
    positions = np.arange(len(scored))
    if ranks.size() > 1:
        positions = layers.held_positions(
            microbatch.plan.boundaries, ranks.size(), ranks.rank()
        ).numpy()
    scored_positions = np.flatnonzero(scored[positions])
    row_indices = to_device(torch.from_numpy(scored_positions), hidden.device)
    if sequence_parallel:
        rows = gather_from_sequence_parallel_region(hidden, group=tensor)[row_indices]
    else:
        rows = copy_to_tensor_model_parallel_region(hidden[row_indices], group=tensor)
    return Rows(rows, positions[scored_positions], row_indices, len(positions))


def spread(values: torch.Tensor, rows: Rows, microbatch: MicroBatch) -> torch.Tensor:
    """[t, ...] from values [N, ...], 0 elsewhere.

    The same on all context ranks, and differentiable if all compute the same loss from it.
    """
    all_rows = values.new_zeros((rows.row_count, *values.shape[1:])).index_copy(
        0, rows.indices, values
    )
    return layers.join(all_rows, microbatch.plan.boundaries, context_group())


def token_logprobs(
    rows: Rows,
    weight: torch.Tensor,
    microbatch: MicroBatch,
    vocab_size: int,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[t] and [t] float32: the log-prob of each position's target, and the entropy of its
    distribution in nats; 0 if not `microbatch.scored`. Both are over `microbatch.kept` if that is
    known.

    weight: [padded vocabulary / tp, h].

    The results are the same on all tensor and context ranks, and differentiable if all of them
    compute the same loss. The gradient of `weight` is added to its main_grad, if Megatron's DDP has
    given it one.
    """
    targets = microbatch.targets[to_device(torch.from_numpy(rows.positions), rows.rows.device)]
    allowed = microbatch.kept.of(rows.positions, rows.rows.device) if microbatch.kept else None
    total = main_grad(weight)
    values = linear_logprobs(
        rows.rows,
        weight,
        targets,
        tensor_group(),
        vocab_size,
        temperature,
        chunk_tokens,
        total,
        allowed,
    )
    logprobs, entropy = spread(torch.stack(values, dim=1), rows, microbatch).unbind(dim=1)
    return logprobs, entropy


def main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """The tensor to which the weight's gradient is added.

    DDP is notified as by Megatron's own layers with gradient_accumulation_fusion.

    DDP then ignores the gradient from autograd, which is zeros. If the weight is also the embedding
    of this rank (zero_out_wgrad), DDP adds that gradient, since it includes the embedding's.
    """
    total: torch.Tensor | None = getattr(weight, "main_grad", None)
    if total is None or total.dtype != torch.float32 or not torch.is_grad_enabled():
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return total
