"""The head of reward models and critics: a linear map from hidden states to one number, computed in float32.

Every tensor rank holds the whole of it, and works on the positions that it has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.trainer import context
from megarl.trainer.groups import context_group, tensor_group
from megarl.trainer.microbatch import MicroBatch


class ScalarHead(torch.nn.Module):
    """Stands in for GPTModel's output layer, whose arguments it takes."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        # finalize_model_grads reads it: each tensor rank saw only its part of the sequence, so gradients are summed.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """[s, b, 1] float32 of hidden states [s, b, h]."""
        return F.linear(hidden.float(), self.weight.float()), None


def token_values(outputs: torch.Tensor, microbatch: MicroBatch, *, sequence_parallel: bool) -> torch.Tensor:
    """[t] float32: the head's output at each position, 0 where `microbatch.loss_mask` is not set.

    outputs: [t / cp, 1], or [t / cp / tp, 1] where the sequence is split over tensor ranks too. The results are the same on all tensor and
    context ranks, and differentiable if all of them go on to the same loss.
    """
    if sequence_parallel:
        outputs = gather_from_sequence_parallel_region(outputs, tensor_parallel_output_grad=False, group=tensor_group())
    values = context.join(outputs[:, 0], microbatch.plan.boundaries, context_group())
    return torch.where(microbatch.loss_mask, values, 0.0)
