"""Low-rank adapters as logical tensors, and where the trainer keeps them: derived from what the family states of its linear layers.

Next to `….q_proj.weight` [out, in] there are `….q_proj.lora_A.weight` [rank, in] and `….q_proj.lora_B.weight` [out, rank], as in PEFT: one
pair for every target, also where Megatron fuses several targets into one layer. Such a layer keeps the As one below the other, and the
Bs fused and cut as its own rows are:

    rows are cut (qkv, gate and up)     A whole on every tensor rank        B cut by rows, in the layer's order of groups
    columns are cut (o, down)           A cut by columns                    B whole
    nothing is cut                      A whole                             B whole

With shared experts, the outer factor (A of gate and up, B of down) has no `{expert}` in its name and is whole on every rank of a stage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.config.lora import LoraConfig
from megarl.models.parameters import EXPERT_FIELD, LAYER, LogicalTensor, Parameter
from megarl.models.registry import family
from megarl.models.spec import ModelSpec
from megarl.topology import TrainerTopology

ALL = "all"
A, B = ".lora_A.weight", ".lora_B.weight"  # in the place of ".weight"
_LINEAR = re.compile(r"(decoder\.layers\.\{layer\}\..*\.linear_\w+)\.weight(|\{expert\})")


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    targets: tuple[str, ...]
    shared: bool = False  # whether all experts of a layer share the outer factor

    @classmethod
    def of(cls, config: LoraConfig) -> Lora | None:
        """None if all weights are trained."""
        if not config.rank:
            return None
        return cls(config.rank, config.alpha, tuple(config.targets), config.experts == "shared")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def names(self, spec: ModelSpec) -> tuple[str, ...]:
        """The targets that the model has."""
        return tuple(name for name in targets(spec) if ALL in self.targets or name in self.targets)

    def wants(self, logical_name: str) -> bool:
        return ALL in self.targets or target(logical_name) in self.targets


@dataclass(frozen=True)
class Adapter:
    """The adapters of one of the trainer's linear layers."""

    of: Parameter  # the layer's weight
    a: Parameter
    b: Parameter
    rows: tuple[int, ...]  # of each part of the weight, in each of its groups
    wanted: tuple[bool, ...]  # which parts have an adapter
    rank: int

    def shares(self, factor: Parameter) -> bool:
        """Whether the experts of a layer share this factor."""
        return self.of.of_expert and not factor.of_expert


def target(logical_name: str) -> str:
    """The name by which a linear layer is a target: `q_proj` of `model.layers.{layer}.self_attn.q_proj.weight`."""
    return logical_name.removesuffix(".weight").rpartition(".")[2]


def targets(spec: ModelSpec) -> tuple[str, ...]:
    """All names that may be targets, in forward order."""
    names = [target(part.logical_name) for parameter in _linear(spec, TrainerTopology(), "local") for part in parameter.parts]
    return tuple(dict.fromkeys(names))


def lora_tensors(spec: ModelSpec, lora: Lora) -> tuple[LogicalTensor, ...]:
    """The logical tensors of all adapters."""
    logical, found = _logical(spec), []
    for parameter in _linear(spec, TrainerTopology(), "local"):
        for part in parameter.parts:
            if not lora.wants(part.logical_name):
                continue
            tensor = logical[part.logical_name]
            out, into = tensor.shape
            for suffix, shape in ((A, (lora.rank, into)), (B, (out, lora.rank))):
                name = factor_name(parameter, part.logical_name, suffix, lora)
                experts = tensor.experts if EXPERT_FIELD in name else 0
                found.append(LogicalTensor(name, shape, LAYER, parameter.layers, experts))
    return tuple(found)


def trainer_adapters(spec: ModelSpec, topology: TrainerTopology, layer_spec: str, lora: Lora) -> tuple[Adapter, ...]:
    """The adapters of all of the trainer's layers."""
    logical = _logical(spec)
    made = (_adapter(parameter, logical, lora) for parameter in _linear(spec, topology, layer_spec))
    return tuple(adapter for adapter in made if any(adapter.wanted))


def adapter_parameters(adapters: Sequence[Adapter]) -> list[Parameter]:
    """As parameters of the trainer."""
    return [parameter for adapter in adapters for parameter in (adapter.a, adapter.b)]


def _adapter(parameter: Parameter, logical: Mapping[str, LogicalTensor], lora: Lora) -> Adapter:
    wanted = tuple(lora.wants(part.logical_name) for part in parameter.parts)
    parts = [part for part, there in zip(parameter.parts, wanted) if there]
    found = _LINEAR.fullmatch(parameter.name)
    assert found is not None
    module, expert = found.groups()

    def factor(suffix: str, letter: str, cut: int) -> Parameter:
        own = tuple(replace(part, logical_name=factor_name(parameter, part.logical_name, suffix, lora)) for part in parts)
        name = f"{module}.adapter.{letter}{expert}"
        if parts and EXPERT_FIELD not in own[0].logical_name and parameter.of_expert:
            name = f"{module.partition('.experts.')[0]}.shared_adapter.{letter}"
        dim, groups = (cut, parameter.groups) if parameter.dim == cut else (None, 1)
        return Parameter(name, LAYER, own, dim=dim, groups=groups, layers=parameter.layers)

    shapes = [logical[part.logical_name].shape for part in parameter.parts]
    rows = tuple(shape[0] // (parameter.groups if parameter.dim == 0 else 1) for shape in shapes)
    return Adapter(parameter, factor(A, "a", 1), factor(B, "b", 0), rows, wanted, lora.rank)


def adapted(spec: ModelSpec, lora: Lora) -> list[Parameter]:
    """The trainer's linear layers of which any part has an adapter."""
    linear = _linear(spec, TrainerTopology(), "local")
    return [parameter for parameter in linear if any(lora.wants(part.logical_name) for part in parameter.parts)]


def factor_name(parameter: Parameter, logical_name: str, suffix: str, lora: Lora) -> str:
    """The logical name of a factor. The outer one is that which the layer does not cut: A where rows are cut, B where columns are."""
    name = logical_name.removesuffix(".weight") + suffix
    outer = A if parameter.dim == 0 else B
    return name.replace(f"{EXPERT_FIELD}.", "") if lora.shared and suffix == outer else name


def _linear(spec: ModelSpec, topology: TrainerTopology, layer_spec: str) -> list[Parameter]:
    """The weights of the decoder's linear layers."""
    parameters = family(spec).megatron_parameters(spec, topology, layer_spec)
    return [parameter for parameter in parameters if parameter.place == LAYER and _LINEAR.fullmatch(parameter.name)]


def _logical(spec: ModelSpec) -> dict[str, LogicalTensor]:
    return {tensor.name: tensor for tensor in family(spec).logical_tensors(spec)}
