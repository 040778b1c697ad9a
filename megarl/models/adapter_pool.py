"""Where SGLang keeps the adapters that it serves: a pool of memory, in which every adapter has a slot.

Each linear layer of SGLang's has an A [parts * rank, in] and a B [out, rank] in a slot. Dense layers multiply what they add by alpha / rank
when requests run; for experts B has to hold it (`LoraTrainer.served_parameters`). Both are cut as the layer is, in the way that
models/adapters.py shows for the trainer:

    rows are cut (qkv, gate and up)     A whole, one below the other        B cut by rows, in the layer's order of groups
    columns are cut (o, down)           A cut by columns                    B whole

Here they are named after the layer: `….self_attn.qkv_proj.lora_A`, and `….mlp.experts.w13.lora_A` for stacked experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megarl.models.adapters import A, B, Lora, adapted, factor_name
from megarl.models.parameters import LAYER, LAYER_FIELD, Parameter
from megarl.models.registry import family
from megarl.models.spec import ModelSpec
from megarl.topology import GeneratorTopology

POOL_A, POOL_B = "lora_A", "lora_B"
SERVED = {"qkv_proj": 3, "o_proj": 1, "gate_up_proj": 2, "down_proj": 1}  # layers by SGLang's names, and how many parts they have
EXPERTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}  # stacked experts, and the projections that SGLang knows


def is_adapter(name: str) -> bool:
    """Whether a tensor of a generator rank belongs to the pool."""
    return name.endswith((f".{POOL_A}", f".{POOL_B}"))


def is_of_stack(name: str) -> bool:
    """Whether the engine has this tensor of the pool once for several experts."""
    return name.rpartition(".")[0].endswith(tuple(f".experts.{stack}" for stack in EXPERTS))


def pool_parameters(spec: ModelSpec, topology: GeneratorTopology, device: str, lora: Lora) -> list[Parameter]:
    """The adapters of one slot, as parameters of SGLang's."""
    found = []
    for parameter in _adapted(spec, topology, device, lora):
        for letter, suffix, cut in ((POOL_A, A, 1), (POOL_B, B, 0)):
            parts = tuple(replace(part, logical_name=factor_name(parameter, part.logical_name, suffix, lora)) for part in parameter.parts)
            dim, groups = (cut, parameter.groups) if parameter.dim == cut else (None, 1)
            found.append(replace(parameter, name=f"{_layer(parameter)}.{letter}", parts=parts, dim=dim, groups=groups, units=()))
    return found


def unserved(spec: ModelSpec, topology: GeneratorTopology, device: str, lora: Lora) -> list[str]:
    """Why engines on `device` cannot serve the adapters; empty if they can."""
    if topology.dp_attention > 1:
        return [f"with generator.dp_attention={topology.dp_attention} nobody has written to SGLang's pool"]
    if spec.kv_lora_rank:
        return [f"nobody has written adapters of a {spec.family} model's latent attention to SGLang's pool"]
    layers = _adapted(spec, topology, device, lora)
    problems = [problem for parameter in layers for problem in _problems(parameter, device, lora)]
    served = {target for parameter in layers for target in _targets(parameter)}
    missing = {part.logical_name for parameter in adapted(spec, lora) for part in parameter.parts if lora.wants(part.logical_name)} - served
    problems += [f"SGLang has no linear layer of its own for {name.removesuffix('.weight')}" for name in sorted(missing)]
    experts = {_layer(parameter).rpartition(".")[2] for parameter in layers if parameter.of_expert}
    if len(experts) == 1:
        problems.append("SGLang serves adapters of experts only on gate, up and down together")
    if spec.num_experts and any(_layer(parameter).endswith(("gate_up_proj", "down_proj")) for parameter in layers):
        problems.append("SGLang does not tell the adapters of dense and shared layers from those of experts")
    return [problem.replace(LAYER_FIELD, "*") for problem in dict.fromkeys(problems)]


def _problems(parameter: Parameter, device: str, lora: Lora) -> Iterator[str]:
    layer = _layer(parameter)
    own = layer.rpartition(".")[2]
    if lacking := [target for target in _targets(parameter) if not lora.wants(target)]:
        names = " and ".join(name.removesuffix(".weight").rpartition(".")[2] for name in lacking)
        yield f"SGLang keeps the parts of {layer} in one tensor, and lora.targets leaves out {names}"
    elif parameter.of_expert and device == "cpu":
        yield f"SGLang's kernels for adapters of {layer} need a GPU"
    elif parameter.of_expert and [name.split(".")[-2] for name in _targets(parameter)] != list(EXPERTS.get(own, ())):
        yield f"SGLang does not know the names of the projections of {layer}"
    elif not parameter.of_expert and SERVED.get(own) != len(parameter.parts):
        yield f"SGLang's pool has no place for {layer}"


def _adapted(spec: ModelSpec, topology: GeneratorTopology, device: str, lora: Lora) -> list[Parameter]:
    """SGLang's linear layers of which any part has an adapter."""
    wanted = {part.logical_name for parameter in adapted(spec, lora) for part in parameter.parts if lora.wants(part.logical_name)}
    parameters = family(spec).sglang_parameters(spec, topology, device)
    return [parameter for parameter in parameters if parameter.place == LAYER and wanted.intersection(_targets(parameter))]


def _targets(parameter: Parameter) -> list[str]:
    return [part.logical_name for part in parameter.parts]


def _layer(parameter: Parameter) -> str:
    return parameter.name.removesuffix("weight").rstrip("._")
