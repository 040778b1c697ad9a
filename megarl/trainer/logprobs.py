"""Log-probabilities and entropy of a microbatch, from hidden states, of the positions that the loss is about."""

from __future__ import annotations

import numpy as np
import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from megarl.kernels import linear_logprobs
from megarl.trainer import context
from megarl.trainer.groups import context_group, tensor_group
from megarl.trainer.microbatch import MicroBatch


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.nn.Parameter,
    microbatch: MicroBatch,
    vocab_size: int,
    *,
    temperature: float,
    chunk_tokens: int,
    sequence_parallel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[t] and [t] float32: the log-prob of each position's target, and the entropy of its choice in nats; 0 where not `microbatch.scored`.
    Both are over `microbatch.kept` where that is known.

    hidden: [t / cp, h], or [t / cp / tp, h] where the sequence is split over tensor ranks too; weight: [padded vocabulary / tp, h].

    The results are the same on all tensor and context ranks, and differentiable if all of them go on to the same loss. The gradient of
    `weight` is added to its main_grad, where Megatron's DDP has given it one.
    """
    tensor, ranks = tensor_group(), context_group()
    boundaries, scored = microbatch.plan.boundaries, microbatch.scored
    held = context.held_positions(boundaries, ranks.size(), ranks.rank()).numpy() if ranks.size() > 1 else np.arange(len(scored))
    here = np.flatnonzero(scored[held])
    chosen, positions = (torch.from_numpy(index).to(hidden.device) for index in (here, held[here]))
    # Every tensor rank works out its vocabulary's share of the gradient: both sum it.
    if sequence_parallel:
        rows = gather_from_sequence_parallel_region(hidden, group=tensor)[chosen]
    else:
        rows = copy_to_tensor_model_parallel_region(hidden[chosen], group=tensor)
    total = _main_grad(weight)
    kept = microbatch.kept.of(held[here], hidden.device) if microbatch.kept else None
    values = linear_logprobs(rows, weight, microbatch.targets[positions], tensor, vocab_size, temperature, chunk_tokens, total, kept)
    spread = values[0].new_zeros((len(held), 2)).index_copy(0, chosen, torch.stack(values, dim=1))
    logprobs, entropy = context.join(spread, boundaries, ranks).unbind(dim=1)
    return logprobs, entropy


def _main_grad(weight: torch.nn.Parameter) -> torch.Tensor | None:
    """Where the weight's gradient is added. DDP is told so, as Megatron's own layers do it under gradient_accumulation_fusion.

    DDP then ignores what autograd gives it: zeros. Where the weight is also the embedding of this rank (zero_out_wgrad), it adds them,
    since the embedding's gradient is among them.
    """
    total: torch.Tensor | None = getattr(weight, "main_grad", None)
    if total is None or total.dtype != torch.float32 or not torch.is_grad_enabled():
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return total
