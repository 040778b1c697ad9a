"""Attention in some layers and gated delta nets in the others: the blocks `attention` and
`gated_delta_net`, each in runs of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from types import ModuleType

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models import attention, gated_delta_net
from megarl.models.parameters import Layers, LogicalTensor, Parameter
from megarl.models.spec import ModelSpec


def _served(name: str) -> str:
    """SGLang's name of a parameter.

    SGLang's attention layers have no separate module for attention.
    """
    return name.replace(".self_attn.", ".")


QUANTISED = tuple(_served(name) for name in attention.QUANTISED) + gated_delta_net.QUANTISED


def logical(spec: ModelSpec) -> list[LogicalTensor]:
    result: list[LogicalTensor] = []
    for layers, block in _runs(spec):
        for tensor in block.logical(spec):
            result.append(replace(tensor, layers=layers))
    return result


def megatron(spec: ModelSpec, topology: TrainerTopology, layer_spec: str) -> list[Parameter]:
    result: list[Parameter] = []
    for layers, block in _runs(spec):
        for parameter in block.megatron(spec, topology, layer_spec):
            result.append(replace(parameter, layers=layers))
    return result


def sglang(spec: ModelSpec, topology: GeneratorTopology, device: str) -> list[Parameter]:
    parameters = []
    for layers, block in _runs(spec):
        for parameter in block.sglang(spec, topology, device):
            parameters.append((layers, parameter))
    result: list[Parameter] = []
    for layers, parameter in parameters:
        result.append(replace(parameter, name=_served(parameter.name), layers=layers))
    return result


def sglang_norms(spec: ModelSpec) -> list[Parameter]:
    """The norm before attention or gated delta nets, even if all layers have attention."""
    if not spec.linear_layers:
        return [attention.sglang_norm()]
    return [replace(attention.sglang_norm(), layers=layers) for layers, _ in _runs(spec)]


def absent(spec: ModelSpec) -> tuple[str, ...]:
    """The parameters in QUANTISED that a model lacks if it has too few layers for both kinds."""
    blocks = (
        (spec.attention_layers, attention.QUANTISED),
        (len(spec.linear_layers), gated_delta_net.QUANTISED),
    )
    return tuple(_served(name) for count, names in blocks if not count for name in names)


def _runs(spec: ModelSpec) -> Iterator[tuple[Layers, ModuleType]]:
    """The runs of equal layers, each with its block."""
    for linear, run in groupby(
        range(spec.num_layers), key=lambda layer: layer in spec.linear_layers
    ):
        layers = [*run]
        yield (layers[0], layers[-1] + 1), gated_delta_net if linear else attention
