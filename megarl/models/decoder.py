"""The tensors of a whole decoder, composed of the spec's blocks: what a family has that declares
none of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models import mlp, vocabulary
from megarl.models.parameters import LAYER, Layers, LogicalTensor, Parameter, whole
from megarl.models.spec import ModelSpec


def logical_tensors(spec: ModelSpec) -> tuple[LogicalTensor, ...]:
    layers: list[LogicalTensor] = []
    for mixer, mixed in spec.mixers:
        layers += _in_layers(spec.norms.input_logical(spec) + mixer.logical(spec), mixed)
    dense, sparse = _mlp_layers(spec)
    experts = spec.experts
    if experts:
        layers += spec.norms.mlp_logical(spec, sparse) + experts.logical(spec, sparse)
    if dense:
        layers += spec.norms.mlp_logical(spec, dense)
        layers += mlp.logical(spec.hidden_size, spec.intermediate_size, layers=dense)
    if experts:
        layers += experts.shared_logical(spec, sparse)
    return vocabulary.logical(spec, layers)


def megatron_parameters(
    spec: ModelSpec, topology: TrainerTopology, layer_spec: str
) -> tuple[Parameter, ...]:
    layers: list[Parameter] = []
    for mixer, mixed in spec.mixers:
        norm = spec.norms.input_megatron(mixer, layer_spec)
        layers += _in_layers(norm + mixer.megatron(spec, topology, layer_spec), mixed)
    dense, sparse = _mlp_layers(spec)
    experts = spec.experts
    if experts:
        layers += spec.norms.mlp_megatron("local", sparse)
        layers += experts.megatron(topology, layer_spec, sparse)
    if dense:
        layers += spec.norms.mlp_megatron(layer_spec, dense)
        layers += mlp.megatron(topology, spec.intermediate_size, layers=dense)
    if experts:
        layers += experts.shared_megatron(topology, sparse)
    return vocabulary.megatron(spec, topology, layers)


def sglang_parameters(
    spec: ModelSpec, topology: GeneratorTopology, device: str
) -> tuple[Parameter, ...]:
    return vocabulary.sglang(spec, topology, device, sglang_layers(spec, topology, device))


def sglang_layers(spec: ModelSpec, topology: GeneratorTopology, device: str) -> list[Parameter]:
    """SGLang's parameters without embedding, last norm and output layer."""
    layers: list[Parameter] = []
    input_norms: list[Parameter] = []
    for mixer, mixed in spec.mixers:
        for parameter in _in_layers(mixer.sglang(spec, topology, device), mixed):
            layers.append(replace(parameter, name=_served(spec, parameter.name)))
        input_norms += _whole(_in_layers(spec.norms.input_logical(spec), mixed))
    dense, sparse = _mlp_layers(spec)
    experts = spec.experts
    mlp_norms = _whole(spec.norms.mlp_logical(spec, dense)) if dense else []
    dense_mlp = mlp.sglang(topology, device, spec.intermediate_size, layers=dense) if dense else []
    if experts is None:  # in the order of SGLang's modules
        return layers + dense_mlp + input_norms + mlp_norms
    layers += input_norms + _whole(spec.norms.mlp_logical(spec, sparse))
    layers += experts.sglang(spec, topology, device, sparse)
    layers += mlp_norms + dense_mlp
    return layers + experts.shared_sglang(topology, device, sparse)


def quantised_parameters(spec: ModelSpec) -> tuple[str, ...]:
    """All linear layers except the router and the output layer, as in DeepSeek's own fp8
    checkpoints.
    """
    names: list[str] = []
    for mixer, _ in spec.mixers:
        names += [_served(spec, name) for name in mixer.QUANTISED]
    if spec.dense_layers:
        names += mlp.QUANTISED
    if spec.experts and spec.dense_layers < spec.num_layers:
        names += spec.experts.quantised
    return tuple(names)


def _in_layers[Tensor: (LogicalTensor, Parameter)](
    tensors: Iterable[Tensor], layers: Layers
) -> list[Tensor]:
    return [replace(tensor, layers=layers) for tensor in tensors]


def _whole(tensors: Iterable[LogicalTensor]) -> list[Parameter]:
    """Norms, which SGLang keeps as checkpoints do."""
    return [whole(norm.name, LAYER, norm.name, layers=norm.layers) for norm in tensors]


def _served(spec: ModelSpec, name: str) -> str:
    """SGLang's name of a mixer's parameter.

    Where some layers have linear attention, the others have no separate module for attention.
    """
    if spec.linear_attention is None:
        return name
    return name.replace(".self_attn.", ".")


def _mlp_layers(spec: ModelSpec) -> tuple[Layers | None, Layers]:
    """The dense layers, or None, and the layers with experts."""
    dense = tuple(range(spec.dense_layers)) or None
    return dense, tuple(range(spec.dense_layers, spec.num_layers))
