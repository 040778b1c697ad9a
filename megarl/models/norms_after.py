"""The norms after attention and MLP (OLMo 2). The trainer has them where outputs are added to the residual stream."""

from __future__ import annotations

from megarl.models.mlp import POST_NORM
from megarl.models.parameters import LAYER, LogicalTensor, Parameter, whole
from megarl.models.spec import ModelSpec

OF_ATTENTION, OF_MLP = POST_NORM, "model.layers.{layer}.post_feedforward_layernorm.weight"
_MEGATRON = {"self_attn_bda": OF_ATTENTION, "mlp_bda": OF_MLP}  # by Megatron's names of the modules that add


def logical(spec: ModelSpec) -> list[LogicalTensor]:
    return [LogicalTensor(name, (spec.hidden_size,), LAYER) for name in (OF_ATTENTION, OF_MLP)]


def megatron() -> list[Parameter]:
    return [whole(f"decoder.layers.{{layer}}.{module}.norm.weight", LAYER, name) for module, name in _MEGATRON.items()]


def sglang() -> list[Parameter]:
    return [whole(name, LAYER, name) for name in (OF_ATTENTION, OF_MLP)]
