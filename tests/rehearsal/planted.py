"""Faults in code that runs only on GPUs, for the rehearsal to find: `rank.py --plant NAME`."""

from __future__ import annotations

import dataclasses
from typing import Any


def tensor_of_the_host() -> None:
    """Advantages stay on the host."""
    from megarl.trainer import step

    build = step.build

    def wrong(*args: Any, **kwargs: Any) -> Any:
        import torch

        rows = build(*args, **kwargs)
        return dataclasses.replace(rows, advantages=torch.zeros(len(rows.scored)))

    step.build = wrong


def wrong_keyword() -> None:
    """The packed sequences have a field that Transformer Engine's attention does not take."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    make = TEDotProductAttention.__init__

    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.kept_packed_seq_params.add("boundaries")

    TEDotProductAttention.__init__ = wrong


def wait_per_parameter() -> None:
    """The host reads a norm of every parameter before the optimizer's step."""
    from megarl.trainer.optimizer import LearningRate

    advance = LearningRate.advance

    def wrong(self: Any) -> float:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.norm().item()
        return advance(self)

    LearningRate.advance = wrong


def marks_of_experts() -> None:
    """Megatron leaves the marks of experts' weights as Transformer Engine sets them."""
    from megatron.core.extensions import transformer_engine

    transformer_engine._set_expert_parameter_attributes = (
        lambda module, parallel_mode, use_expert_pgs: None
    )


def marks_of_whole_weights() -> None:
    """Megatron also leaves the marks of linear layers that every tensor-parallel rank holds whole."""
    from megatron.core.extensions.transformer_engine import TELinear

    make = TELinear.__init__

    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.weight.tensor_model_parallel = True

    TELinear.__init__ = wrong
