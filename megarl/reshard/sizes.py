"""The parameters of both sides, where the parallel sizes fit the model: each rule of what divides what stands here, once.

Problems name the key, its value, and what it must divide; a ConfigError holds all of one side's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megarl.config.errors import ConfigError
from megarl.kernels.quantise_rules import Rule
from megarl.models.parameters import ATTENTION, DENSE, EXPERT, EXPERT_FIELD, LAYER_FIELD, LogicalTensor, Parameter
from megarl.models.registry import family
from megarl.models.spec import ModelSpec
from megarl.topology import DP_ATTENTION_FAMILIES, GeneratorTopology, TrainerTopology

Cut = tuple[str, int]  # the key with its value, and the number of shards


def trainer_parameters(spec: ModelSpec, topology: TrainerTopology, layer_spec: str = "local") -> Sequence[Parameter]:
    """Megatron's parameters. Raises ConfigError if the topology does not divide the model."""
    t, problems = topology, []
    if spec.num_experts:
        ranks = t.tp * t.cp * t.dp
        if ranks % (t.ep * t.etp):
            product = f"trainer.ep={t.ep} * trainer.etp={t.etp}"
            problems.append(f"{product}: must divide trainer.tp * trainer.cp * trainer.dp = {ranks}, the ranks of a stage")
        problems += _indivisible((f"trainer.ep={t.ep}", t.ep), {"experts": spec.num_experts})
    parameters = family(spec).megatron_parameters(spec, t, layer_spec)
    problems += _uneven(parameters, {DENSE: (f"trainer.tp={t.tp}", t.tp), EXPERT: (f"trainer.etp={t.etp}", t.etp)})
    if problems:
        raise ConfigError(problems)
    return parameters


def generator_parameters(spec: ModelSpec, topology: GeneratorTopology, device: str, rule: Rule | None = None) -> Sequence[Parameter]:
    """SGLang's parameters, of an engine quantised by `rule`. Raises ConfigError if SGLang could not start."""
    t, problems = topology, []
    tp, ep, replicas = f"generator.tp={t.tp}", f"generator.ep={t.ep}", f"generator.dp_attention={t.dp_attention}"
    if t.dp_attention > 1 and spec.family not in DP_ATTENTION_FAMILIES:
        problems.append(f"{replicas}: must be 1 for a {spec.family} model; others are for {', '.join(DP_ATTENTION_FAMILIES)}")
    elif t.tp % t.dp_attention:
        problems.append(f"{replicas}: must divide {tp}")
    if spec.num_experts:
        problems += [f"{ep}: must divide {tp}"] if t.tp % t.ep else []
        problems += _indivisible((ep, t.ep), {"experts": spec.num_experts})
    if problems:
        raise ConfigError(problems)
    parameters = family(spec).sglang_parameters(spec, t, device)
    attention = f"{tp} / {replicas}" if t.dp_attention > 1 else tp
    expert = f"{tp} / {ep}" if t.ep > 1 else tp
    problems = _uneven(parameters, {DENSE: (tp, t.tp), ATTENTION: (attention, t.attention_tp), EXPERT: (expert, t.tp // t.ep)})
    if rule is not None and rule.rows and rule.cols and not problems:
        problems = _cut_blocks(spec, t, parameters, rule.rows, rule.cols)
    if problems:
        raise ConfigError(problems)
    return parameters


def _uneven(parameters: Sequence[Parameter], cuts: Mapping[str, Cut]) -> list[str]:
    uneven: dict[Cut, dict[str, int]] = {}
    for parameter in parameters:
        if parameter.layers is None or parameter.layers[0] < parameter.layers[1]:
            uneven.setdefault(cuts[parameter.mesh], {}).update(parameter.units)
    return [problem for cut, units in uneven.items() for problem in _indivisible(cut, units)]


def _indivisible(cut: Cut, units: Mapping[str, int]) -> list[str]:
    key, shards = cut
    uneven = [f"{count} {name}" for name, count in units.items() if count % shards]
    return [f"{key}: must divide the model's {' and '.join(uneven)}"] if uneven else []


def _cut_blocks(spec: ModelSpec, topology: GeneratorTopology, parameters: Sequence[Parameter], rows: int, cols: int) -> list[str]:
    """Fused or cut tensors must consist of whole blocks, as in SGLang's Fp8LinearMethod.validate_block_quant_shapes and Fp8MoEMethod."""
    t, problems, names = topology, [], family(spec).quantised_parameters(spec)
    logical = {tensor.name: tensor for tensor in family(spec).logical_tensors(spec)}
    quantised = [parameter for parameter in parameters if parameter.name in names]
    if fused := [text for parameter in quantised for text in _unevenly_fused(parameter, logical, rows)]:
        must = f"at any generator.tp SGLang fuses rows that must be multiples of {rows}, and are {', '.join(fused)}"
        problems.append(f"generator.quantization=fp8_block: must be null for this model: {must}")
    if cut := [text for parameter in quantised for text in _unevenly_cut(parameter, logical, (rows, cols), t)]:
        sizes = f"generator.tp={t.tp}" + (f", generator.ep={t.ep}" if spec.num_experts else "")
        sizes += f", generator.dp_attention={t.dp_attention}" if t.dp_attention > 1 else ""
        blocks = f"multiples of {rows}" if rows == cols else f"whole blocks of {rows} by {cols}"
        problems.append(f"generator.quantization=fp8_block: with {sizes} a rank must hold {blocks}; it holds {', '.join(cut)}")
    return problems


def _unevenly_fused(parameter: Parameter, logical: Mapping[str, LogicalTensor], block: int) -> Iterator[str]:
    """Finds parts whose last block would overlap the next part, in a tensor that every rank holds whole."""
    for part in parameter.parts[:-1] if parameter.dim is None else ():
        if (rows := logical[part.logical_name].shape[0]) % block:
            yield f"{rows} of {part.logical_name.replace(LAYER_FIELD, '*')}"


def _unevenly_cut(
    parameter: Parameter, logical: Mapping[str, LogicalTensor], blocks: tuple[int, int], topology: GeneratorTopology
) -> Iterator[str]:
    if parameter.dim is None:  # whole on every rank: SGLang rounds up
        return
    shards = {DENSE: topology.tp, ATTENTION: topology.attention_tp, EXPERT: topology.tp // topology.ep}[parameter.mesh]
    fused = len(parameter.parts) > 1 or parameter.of_expert
    block, what = blocks[parameter.dim], ("rows", "columns")[parameter.dim]
    for part in parameter.parts:
        held = logical[part.logical_name].shape[parameter.dim] * part.replicas // shards
        if (fused or shards > 1) and held % block:
            yield f"{held} {what} of {part.logical_name.replace(LAYER_FIELD, '*').replace(EXPERT_FIELD, '*')}"
