"""Messages between pipeline stages, whose shapes every stage knows from the plan of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.trainer.microbatch import MicrobatchPlan
from megarl.trainer.parallel import pipeline_group

Tensors = Any  # as P2PCommunicator has them: a list with one tensor


class PlannedShapes(P2PCommunicator):
    """Of one run of Megatron's schedule without virtual stages, which receives microbatches in their order in both directions. Megatron
    itself knows one shape for all, or has stages tell each other the shapes of every message, for which the host waits twice."""

    def __init__(self, config: TransformerConfig, plan: Sequence[MicrobatchPlan], split: int):
        """`split`: over how many ranks the positions of a microbatch are cut."""
        super().__init__(pipeline_group(), config)
        shapes = [[(microbatch.positions // split, 1, config.hidden_size)] for microbatch in plan]
        self._forward, self._backward = iter(shapes), iter(shapes)

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Tensors:
        return super().recv_forward(next(self._forward), is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Tensors:
        return super().recv_backward(next(self._backward), is_last_stage)

    def send_forward_recv_backward(self, output_tensors: Tensors, tensor_shapes: Any, is_last_stage: bool) -> Tensors:
        return super().send_forward_recv_backward(output_tensors, next(self._backward), is_last_stage)

    def send_backward_recv_forward(self, input_tensor_grads: Tensors, tensor_shapes: Any, is_first_stage: bool) -> Tensors:
        return super().send_backward_recv_forward(input_tensor_grads, next(self._forward), is_first_stage)
