"""Low-rank adapters as logical tensors, and their layouts: on the trainer, and in the pool from
which SGLang serves them. Both follow from a family's definition of its linear layers.

Next to `….q_proj.weight` [out, in] there are `….q_proj.lora_A.weight` [rank, in] and
`….q_proj.lora_B.weight` [out, rank], as in PEFT. There is one pair for every target, even if
Megatron fuses several targets into one layer. Such a layer has the As one below the other, and the
Bs fused and cut like its own rows:

    rows are cut (qkv, gate and up)  A whole on every tensor rank  B cut by rows, in the layer's
                                                                   order of groups
    columns are cut (o, down)        A cut by columns              B whole
    nothing is cut                   A whole                       B whole

With shared experts, the outer factor (A of gate and up, B of down) has no `{expert}` in its name,
and is whole on every rank of a stage.

In SGLang's pool every adapter has a slot. In a slot, each of SGLang's linear layers has an A [parts
* rank, in] and a B [out, rank], cut like the layer, as above. They are named after the layer:
`….self_attn.qkv_proj.lora_A`, and `….mlp.experts.w13.lora_A` for stacked experts. At run time,
dense layers multiply what they add by alpha / rank. For experts, B must include this factor
(`LoraTrainer.served_parameters`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.lora.settings import LoraConfig
from megarl.models.attention import Attention
from megarl.models.parameters import (
    EXPERT_FIELD,
    LAYER,
    LAYER_FIELD,
    LogicalTensor,
    Parameter,
    Part,
)
from megarl.models.registry import family
from megarl.models.spec import ModelSpec
from megarl.reshard.layout import (
    Kind,
    Layout,
    elements,
    generator_layout_of,
    hf_layout_of,
    trainer_layout_of,
    trainer_parameters,
)

ALL = "all"
A = ".lora_A.weight"
B = ".lora_B.weight"  # replace ".weight"
_LINEAR = re.compile(r"(decoder\.layers\.\{layer\}\..*\.linear_\w+)\.weight(|\{expert\})")
POOL_A = "lora_A"
POOL_B = "lora_B"
# SGLang's layer -> number of parts
SERVED = {"qkv_proj": 3, "o_proj": 1, "gate_up_proj": 2, "down_proj": 1}
# stacked experts -> projections that SGLang knows
EXPERTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    targets: tuple[str, ...]
    shared: bool = False  # whether all experts of a layer share the outer factor

    @classmethod
    def of(cls, config: LoraConfig) -> Lora | None:
        """The adapters that `config` describes; None if all weights are trained."""
        if not config.rank:
            return None
        return cls(config.rank, config.alpha, tuple(config.targets), config.experts == "shared")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def names(self, spec: ModelSpec) -> tuple[str, ...]:
        """The names of targets that the model has."""
        return tuple(name for name in targets(spec) if ALL in self.targets or name in self.targets)

    def wants(self, logical_name: str) -> bool:
        return ALL in self.targets or target(logical_name) in self.targets

    def hf_layout(self, spec: ModelSpec, dtype: str) -> Layout:
        """One rank that holds all adapters under their own names."""
        return hf_layout_of(lora_tensors(spec, self), spec, dtype)

    def parameter_count(self, spec: ModelSpec) -> int:
        return elements(self.hf_layout(spec, "bfloat16"))

    def trainer_layout(
        self, spec: ModelSpec, topology: TrainerTopology, dtype: str, layer_spec: str = "local"
    ) -> Layout:
        """The adapters on every trainer rank, whole on each data-parallel rank.

        Raises ConfigError if the topology does not divide the model.
        """
        trainer_parameters(spec, topology, layer_spec)
        parameters = adapter_parameters(trainer_adapters(spec, topology, layer_spec, self))
        unsharded = replace(topology, zero=min(topology.zero, 1))
        return trainer_layout_of(parameters, lora_tensors(spec, self), spec, unsharded, dtype)

    def pool_layout(
        self, spec: ModelSpec, topology: GeneratorTopology, dtype: str, device: str
    ) -> Layout:
        """The adapters on every generator rank, in the slot that SGLang's pool has for them.

        `dtype` is that of activations.
        """
        parameters = pool_parameters(spec, topology, device, self)
        layout = generator_layout_of(parameters, lora_tensors(spec, self), spec, topology, dtype)
        return replace(layout, kinds=tuple(map(_as_shown, layout.kinds)))


@dataclass(frozen=True)
class Adapter:
    """The adapters of one of the trainer's linear layers."""

    weight: Parameter  # the layer's weight
    a: Parameter
    b: Parameter
    rows: tuple[int, ...]  # rows of each part of the weight in a group
    has_adapter: tuple[bool, ...]  # which parts have an adapter
    rank: int

    def on_rank(self, rank: int, ranks: int) -> Adapter:
        """The adapter on tensor rank `rank`, with the rows that it has of each part if several ranks
        share a group of the weight's rows.
        """
        if self.weight.of_expert or self.weight.dim != 0 or ranks <= self.weight.groups:
            return self
        period = sum(self.rows)
        size = period * self.weight.groups // ranks
        first = rank * size % period
        local_rows = []
        start = 0
        for count in self.rows:
            common = min(start + count, first + size) - max(start, first)
            local_rows.append(max(0, common))
            start += count
        return replace(self, rows=tuple(local_rows))

    def shares(self, factor: Parameter) -> bool:
        """Whether the experts of a layer share this factor."""
        return self.weight.of_expert and not factor.of_expert


def target(logical_name: str) -> str:
    """The target name of a linear layer: `q_proj` for
    `model.layers.{layer}.self_attn.q_proj.weight`.
    """
    return logical_name.removesuffix(".weight").rpartition(".")[2]


def targets(spec: ModelSpec) -> tuple[str, ...]:
    """All names that may be targets, in forward order."""
    names = []
    for parameter in _linear(spec, TrainerTopology(), "local"):
        for part in parameter.parts:
            names.append(target(part.logical_name))
    return tuple(dict.fromkeys(names))


def lora_tensors(spec: ModelSpec, lora: Lora) -> tuple[LogicalTensor, ...]:
    """The logical tensors of all adapters."""
    logical = _logical(spec)
    tensors = []
    for parameter in _linear(spec, TrainerTopology(), "local"):
        for part in parameter.parts:
            if not lora.wants(part.logical_name):
                continue
            tensor = logical[part.logical_name]
            out, into = tensor.shape
            for suffix, shape in ((A, (lora.rank, into)), (B, (out, lora.rank))):
                name = factor_name(parameter, part.logical_name, suffix, lora)
                experts = tensor.experts if EXPERT_FIELD in name else 0
                tensors.append(LogicalTensor(name, shape, LAYER, parameter.layers, experts))
    return tuple(tensors)


def trainer_adapters(
    spec: ModelSpec, topology: TrainerTopology, layer_spec: str, lora: Lora
) -> tuple[Adapter, ...]:
    """The adapters of all of the trainer's layers."""
    logical = _logical(spec)
    adapters = []
    for parameter in _linear(spec, topology, layer_spec):
        adapter = _adapter(parameter, logical, lora)
        if any(adapter.has_adapter):
            adapters.append(adapter)
    return tuple(adapters)


def adapter_parameters(adapters: Sequence[Adapter]) -> list[Parameter]:
    """The adapters as parameters of the trainer."""
    result: list[Parameter] = []
    for adapter in adapters:
        result.extend((adapter.a, adapter.b))
    return result


def _adapter(parameter: Parameter, logical: Mapping[str, LogicalTensor], lora: Lora) -> Adapter:
    has_adapter = tuple(lora.wants(part.logical_name) for part in parameter.parts)
    parts = [part for part, is_adapted in zip(parameter.parts, has_adapter) if is_adapted]
    match = _LINEAR.fullmatch(parameter.name)
    assert match is not None
    module, expert = match.groups()

    def factor(suffix: str, letter: str, cut: int) -> Parameter:
        factor_parts = _factor_parts(parameter, parts, suffix, lora)
        name = f"{module}.adapter.{letter}{expert}"
        if parts and EXPERT_FIELD not in factor_parts[0].logical_name and parameter.of_expert:
            name = f"{module.partition('.experts.')[0]}.shared_adapter.{letter}"
        dim, groups = (cut, parameter.groups) if parameter.dim == cut else (None, 1)
        return Parameter(name, LAYER, factor_parts, dim=dim, groups=groups, layers=parameter.layers)

    shapes = [logical[part.logical_name].shape for part in parameter.parts]
    rows = tuple(shape[0] // (parameter.groups if parameter.dim == 0 else 1) for shape in shapes)
    return Adapter(parameter, factor(A, "a", 1), factor(B, "b", 0), rows, has_adapter, lora.rank)


def _factor_parts(
    parameter: Parameter, parts: Iterable[Part], suffix: str, lora: Lora
) -> tuple[Part, ...]:
    result = []
    for part in parts:
        name = factor_name(parameter, part.logical_name, suffix, lora)
        result.append(replace(part, logical_name=name))
    return tuple(result)


def adapted(spec: ModelSpec, lora: Lora) -> list[Parameter]:
    """The trainer's linear layers in which any part has an adapter."""
    linear = _linear(spec, TrainerTopology(), "local")
    result: list[Parameter] = []
    for parameter in linear:
        if any(lora.wants(part.logical_name) for part in parameter.parts):
            result.append(parameter)
    return result


def factor_name(parameter: Parameter, logical_name: str, suffix: str, lora: Lora) -> str:
    """The logical name of a factor.

    The outer factor is the one that is not cut: A if the layer's rows are cut, B if its columns
    are.
    """
    name = logical_name.removesuffix(".weight") + suffix
    outer = A if parameter.dim == 0 else B
    if lora.shared and suffix == outer:
        return name.replace(f"{EXPERT_FIELD}.", "")
    return name


def _linear(spec: ModelSpec, topology: TrainerTopology, layer_spec: str) -> list[Parameter]:
    """The weights of the decoder's linear layers."""
    parameters = family(spec).megatron_parameters(spec, topology, layer_spec)
    result: list[Parameter] = []
    for parameter in parameters:
        if parameter.place == LAYER and _LINEAR.fullmatch(parameter.name):
            result.append(parameter)
    return result


def _logical(spec: ModelSpec) -> dict[str, LogicalTensor]:
    return {tensor.name: tensor for tensor in family(spec).logical_tensors(spec)}


def is_adapter(name: str) -> bool:
    """Whether a tensor of a generator rank belongs to the pool."""
    return name.endswith((f".{POOL_A}", f".{POOL_B}"))


def is_of_stack(name: str) -> bool:
    """Whether this tensor of the pool covers several experts."""
    return name.rpartition(".")[0].endswith(tuple(f".experts.{stack}" for stack in EXPERTS))


def _as_shown(kind: Kind) -> Kind:
    """The kind as SGLang has it: the factor that all experts share has a dim of 1 for experts."""
    if not is_of_stack(kind.name) or kind.shards[0].experts is not None:
        return kind
    return replace(
        kind,
        shards=tuple(
            structs.replace(tensor, engine_shape=(1, *tensor.shape)) for tensor in kind.shards
        ),
    )


def pool_parameters(
    spec: ModelSpec, topology: GeneratorTopology, device: str, lora: Lora
) -> list[Parameter]:
    """The adapters of one slot as parameters of SGLang."""
    parameters = []
    for parameter in _adapted(spec, topology, device, lora):
        for letter, suffix, cut in ((POOL_A, A, 1), (POOL_B, B, 0)):
            parts = _factor_parts(parameter, parameter.parts, suffix, lora)
            dim, groups = (cut, parameter.groups) if parameter.dim == cut else (None, 1)
            parameters.append(
                replace(
                    parameter,
                    name=f"{_layer(parameter)}.{letter}",
                    parts=parts,
                    dim=dim,
                    groups=groups,
                    units=(),
                )
            )
    return parameters


def unserved(spec: ModelSpec, topology: GeneratorTopology, device: str, lora: Lora) -> list[str]:
    """The reasons why engines on `device` cannot serve the adapters; empty if they can."""
    if topology.dp_attention > 1:
        return [
            f"with generator.dp_attention={topology.dp_attention} writing to SGLang's pool has not "
            "been tried"
        ]
    if spec.norms.after:
        return [f"writing adapters of a {spec.family} model to SGLang's pool has not been tried"]
    if spec.attention.NAME != Attention.NAME:
        return [
            f"writing adapters of a {spec.family} model's {spec.attention.NAME} to SGLang's pool "
            "has not been tried"
        ]
    layers = _adapted(spec, topology, device, lora)
    problems = []
    for parameter in layers:
        problems.extend(_problems(parameter, device, lora))
    missing: set[str] = set()
    for parameter in adapted(spec, lora):
        missing.update(part.logical_name for part in parameter.parts)
    for parameter in layers:
        missing.difference_update(_targets(parameter))
    for name in filter(lora.wants, sorted(missing)):
        layer = name.removesuffix(".weight")
        problems.append(f"SGLang has no linear layer of its own for {layer}")
    experts = {_layer(parameter).rpartition(".")[2] for parameter in layers if parameter.of_expert}
    if len(experts) == 1:
        problems.append("SGLang serves adapters of experts only on gate, up and down together")
    dense_names = ("gate_up_proj", "down_proj")
    if spec.experts and any(_layer(layer).endswith(dense_names) for layer in layers):
        problems.append(
            "SGLang confuses the adapters of dense and shared layers with those of experts"
        )
    return [problem.replace(LAYER_FIELD, "*") for problem in dict.fromkeys(problems)]


def _problems(parameter: Parameter, device: str, lora: Lora) -> Iterator[str]:
    layer = _layer(parameter)
    module_name = layer.rpartition(".")[2]
    lacking = [target for target in _targets(parameter) if not lora.wants(target)]
    if lacking:
        names = " and ".join(name.removesuffix(".weight").rpartition(".")[2] for name in lacking)
        yield (
            f"SGLang keeps the parts of {layer} in one tensor, and lora.targets leaves out {names}"
        )
    elif parameter.of_expert and device == "cpu":
        yield f"SGLang's kernels for adapters of {layer} need a GPU"
    elif parameter.of_expert and [name.split(".")[-2] for name in _targets(parameter)] != list(
        EXPERTS.get(module_name, ())
    ):
        yield f"SGLang does not know the names of the projections of {layer}"
    elif not parameter.of_expert and SERVED.get(module_name) != len(parameter.parts):
        yield f"SGLang's pool has no place for {layer}"


def _adapted(
    spec: ModelSpec, topology: GeneratorTopology, device: str, lora: Lora
) -> list[Parameter]:
    """SGLang's linear layers in which any part has an adapter."""
    adapted_names = set()
    for parameter in adapted(spec, lora):
        for part in parameter.parts:
            if lora.wants(part.logical_name):
                adapted_names.add(part.logical_name)
    parameters = family(spec).sglang_parameters(spec, topology, device)
    result: list[Parameter] = []
    for parameter in parameters:
        if parameter.place == LAYER and adapted_names.intersection(_targets(parameter)):
            result.append(parameter)
    return result


def _targets(parameter: Parameter) -> list[str]:
    return [part.logical_name for part in parameter.parts]


def _layer(parameter: Parameter) -> str:
    return parameter.name.removesuffix("weight").rstrip("._")
