"""Families with experts.

The first layers may be dense, and there may be shared experts beside the routed ones.

`attention` is a family's block of attention: the module `megarl.models.attention`,
`latent_attention` or `hybrid_attention`.
"""

from __future__ import annotations

from types import ModuleType

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models import attention as grouped_attention
from megarl.models import experts, hybrid_attention, mlp, vocabulary
from megarl.models.parameters import Layers, LogicalTensor, Parameter
from megarl.models.spec import ModelSpec


def logical_tensors(
    spec: ModelSpec, module: str = mlp.MLP, attention: ModuleType = grouped_attention
) -> tuple[LogicalTensor, ...]:
    dense, sparse, shared = _layers(spec)
    layers = [
        *attention.logical(spec),
        mlp.norm(spec, sparse),
        *experts.logical(spec, module, sparse),
    ]
    if dense:
        layers += [mlp.norm(spec, dense), *mlp.logical(spec, spec.intermediate_size, layers=dense)]
    if shared:
        layers += mlp.logical(
            spec, spec.shared_intermediate_size, mlp.shared_module(spec), shared
        ) + mlp.shared_gate(spec, shared)
    return vocabulary.logical(spec, layers)


def megatron_parameters(
    spec: ModelSpec,
    topology: TrainerTopology,
    layer_spec: str,
    module: str = mlp.MLP,
    attention: ModuleType = grouped_attention,
) -> tuple[Parameter, ...]:
    """Megatron names the norms before dense layers and before experts differently."""
    dense, sparse, shared = _layers(spec)
    layers = [*attention.megatron(spec, topology, layer_spec), mlp.megatron_norm("local", sparse)]
    layers += experts.megatron(spec, topology, layer_spec, module, sparse)
    if dense:
        layers += [
            mlp.megatron_norm(layer_spec, dense),
            *mlp.megatron(topology, spec.intermediate_size, layers=dense),
        ]
    if shared:
        layers += mlp.megatron(
            topology, spec.shared_intermediate_size, mlp.shared_module(spec), shared
        )
        layers += mlp.megatron_shared_gate(spec, shared)
    return vocabulary.megatron(spec, topology, layers)


def sglang_parameters(
    spec: ModelSpec,
    topology: GeneratorTopology,
    device: str,
    module: str = mlp.MLP,
    attention: ModuleType = grouped_attention,
    router_dtype: str | None = None,
) -> tuple[Parameter, ...]:
    """`router_dtype`: the dtype of the router's weight, if it differs from the model's."""
    dense, sparse, shared = _layers(spec)
    layers = [
        *attention.sglang(spec, topology, device),
        *hybrid_attention.sglang_norms(spec),
        mlp.sglang_norm(sparse),
    ]
    layers += experts.sglang(spec, topology, device, module, sparse, router_dtype)
    if dense:
        layers += [
            mlp.sglang_norm(dense),
            *mlp.sglang(topology, device, spec.intermediate_size, layers=dense),
        ]
    if shared:
        layers += mlp.sglang(
            topology, device, spec.shared_intermediate_size, mlp.shared_module(spec), shared
        )
        layers += mlp.sglang_shared_gate(spec, shared)
    return vocabulary.sglang(spec, topology, device, layers)


def quantised_parameters(
    spec: ModelSpec, module: str = mlp.MLP, attention: ModuleType = grouped_attention
) -> tuple[str, ...]:
    """All linear layers except the router and the output layer, as in DeepSeek's own fp8
    checkpoints.
    """
    dense, sparse, shared = _layers(spec)
    names = (
        attention.QUANTISED
        + (mlp.QUANTISED if dense else ())
        + (mlp.quantised(mlp.shared_module(spec)) if shared else ())
    )
    return names + (experts.quantised(module) if sparse[0] < sparse[1] else ())


def _layers(spec: ModelSpec) -> tuple[Layers | None, Layers, Layers | None]:
    """The dense layers, the layers with experts, and the layers with shared experts; None if there
    are none.
    """
    dense = (0, spec.first_dense_layers)
    sparse = (spec.first_dense_layers, spec.num_layers)
    return (
        dense if dense[1] else None,
        sparse,
        sparse if spec.shared_intermediate_size and sparse[0] < sparse[1] else None,
    )
