"""The norms after attention and MLP (OLMo 2, Gemma 3).

The trainer applies them where outputs are added to the residual stream.

If there are also norms before, the norm after the MLP has a different name in checkpoints.
"""

from __future__ import annotations

from megarl.models.mlp import MLP_NORM_NAMES, POST_NORM
from megarl.models.parameters import LAYER, LogicalTensor, Parameter, whole
from megarl.models.spec import ModelSpec

_L = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
OF_ATTENTION = POST_NORM
BEFORE_MLP = _L + "pre_feedforward_layernorm.weight"
OF_MLP = _L + "post_feedforward_layernorm.weight"


def logical(spec: ModelSpec) -> list[LogicalTensor]:
    return [LogicalTensor(name, (spec.hidden_size,), LAYER) for name in _names(spec)]


def megatron(spec: ModelSpec, layer_spec: str) -> list[Parameter]:
    places = {
        OF_ATTENTION: "self_attn_bda.norm.weight",
        BEFORE_MLP: MLP_NORM_NAMES[layer_spec],
        OF_MLP: "mlp_bda.norm.weight",
    }
    return [whole(_MEGATRON + places[name], LAYER, name) for name in _names(spec)]


def sglang(spec: ModelSpec) -> list[Parameter]:
    return [whole(name, LAYER, name) for name in _names(spec)]


def _names(spec: ModelSpec) -> tuple[str, ...]:
    if spec.norms_before:
        return (OF_ATTENTION, BEFORE_MLP, OF_MLP)
    return (OF_ATTENTION, OF_MLP)
