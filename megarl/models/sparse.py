"""Families with grouped-query attention in which every layer is a mixture of experts: Qwen3-MoE and Mixtral."""

from __future__ import annotations

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models import attention, experts, mlp, vocabulary
from megarl.models.parameters import LogicalTensor, Parameter
from megarl.models.spec import ModelSpec


def logical_tensors(spec: ModelSpec, module: str) -> tuple[LogicalTensor, ...]:
    return vocabulary.logical(spec, attention.logical(spec) + [mlp.norm(spec)] + experts.logical(spec, module))


def megatron_parameters(spec: ModelSpec, topology: TrainerTopology, layer_spec: str, module: str) -> tuple[Parameter, ...]:
    layers = attention.megatron(spec, topology, layer_spec) + [mlp.megatron_norm("local")]
    return vocabulary.megatron(spec, topology, layers + experts.megatron(spec, topology, layer_spec, module))


def sglang_parameters(spec: ModelSpec, topology: GeneratorTopology, device: str, module: str) -> tuple[Parameter, ...]:
    layers = attention.sglang(spec, topology, device) + experts.sglang(spec, topology, device, module)
    return vocabulary.sglang(spec, topology, device, layers + [attention.sglang_norm(), mlp.sglang_norm()])
