"""Corrects marks on parameters by which Megatron reduces gradients and computes their norm. Imports no Megatron."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_WHOLE = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")


def mend_marks(named: Iterable[tuple[str, torch.nn.Parameter]], layer_spec: str) -> None:
    """`named`: all parameters of the model, by Megatron's names; `layer_spec`: the layer spec, "te" or "local"."""
    for name, parameter in named:
        # Megatron marks experts as apart from the dense mesh only for ep > 1. At ep = 1 it would sum their gradients over the wrong
        # ranks if etp is not tp, and no checkpoint of ep > 1 would fit its optimizer.
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
            # Every rank's part of them counts in the norm. Transformer Engine marks them so only up to 2.12.
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        # Transformer Engine marks every weight as cut over the tensor ranks, even the two that every rank holds whole. They would count
        # tp times in the norm, which is reported and used for clipping. (megatron-core 0.17 fixes it in TELinear.)
        if layer_spec == "te" and name.endswith(_WHOLE):
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
