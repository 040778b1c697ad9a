"""Which parameters of a layer count as cut over tensor ranks, and which as apart from the dense mesh."""

from __future__ import annotations

import pytest
import torch

from megarl.trainer.marks import mend_marks

OWN = "decoder.layers.0."
CUT = {OWN + "self_attention.linear_q_up_proj.weight", OWN + "self_attention.linear_proj.weight", OWN + "mlp.experts.linear_fc1.weight0"}
DOWN = {OWN + "self_attention.linear_q_down_proj.weight", OWN + "self_attention.linear_kv_down_proj.weight"}


@pytest.mark.parametrize(("spec", "whole"), [("te", DOWN), ("local", set())])
def test_what_every_tensor_rank_holds_whole_counts_once_in_the_norm(spec: str, whole: set[str]) -> None:
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in CUT | DOWN}
    for parameter in parameters.values():  # as Transformer Engine 2.11 leaves them: pytorch/module/linear.py, reset_parameters
        parameter.tensor_model_parallel = parameter.allreduce = True
    mend_marks(parameters.items(), spec)
    assert {name for name, parameter in parameters.items() if not parameter.tensor_model_parallel} == whole
    del parameters[OWN + "mlp.experts.linear_fc1.weight0"].tensor_model_parallel  # as 2.13 and later leave an expert's
    mend_marks(parameters.items(), spec)
    assert parameters[OWN + "mlp.experts.linear_fc1.weight0"].tensor_model_parallel
    assert {name for name, parameter in parameters.items() if not parameter.allreduce} == {OWN + "mlp.experts.linear_fc1.weight0"}
