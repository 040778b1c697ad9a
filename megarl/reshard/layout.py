"""The three layouts of the weights: the HF checkpoint's, the Megatron trainer's, the SGLang generator's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.config.errors import ConfigError
from megarl.kernels.quantise_rules import BLOCK, CHANNEL, TENSOR, Rule
from megarl.models.adapter_pool import is_of_stack, pool_parameters
from megarl.models.adapters import Lora, adapter_parameters, lora_tensors, trainer_adapters
from megarl.models.parameters import ATTENTION, DENSE, EXPERT, FIRST, LAST, LAYER, Layers, LogicalTensor, Parameter, whole
from megarl.models.registry import family
from megarl.models.spec import ModelSpec
from megarl.reshard.kinds import ITEM_BYTES, Kind, Layout, LocalTensor, Piece
from megarl.reshard.scales import with_scales
from megarl.reshard.shards import local_tensor
from megarl.reshard.sizes import generator_parameters, trainer_parameters
from megarl.topology import GeneratorTopology, TrainerTopology

__all__ = [
    "Kind", "Layout", "LocalTensor", "Piece", "generator_layout", "hf_layout", "pool_layout", "stage_of_layer", "together",
    "trainer_layout",
]  # fmt: skip

LAYER_SPECS = ("local", "te")
DEVICES = ("cpu", "cuda")
QUANTISATIONS = {"fp8_block": BLOCK, "fp8_channel": CHANNEL, "fp8_tensor": TENSOR}


def hf_layout(spec: ModelSpec, dtype: str, lora: Lora | None = None) -> Layout:
    """The layout of an HF checkpoint, for import and export: one rank that holds every logical tensor under its own name. With `lora`, that
    of its adapters alone."""
    logical = lora_tensors(spec, lora) if lora else family(spec).logical_tensors(spec)
    parameters = [whole(tensor.name, tensor.place, tensor.name, layers=tensor.layers, dtype=tensor.dtype) for tensor in logical]
    ranks = np.zeros((1, 1, 1), dtype=np.int64)
    stages = np.zeros(spec.num_layers, dtype=np.int64)
    return Layout("hf", 1, tuple(_kinds("hf", spec, parameters, dtype, stages, {DENSE: ranks, EXPERT: ranks}, (1, 1), lora)))


def parameter_count(spec: ModelSpec, lora: Lora | None = None) -> int:
    """The parameters of the whole model, or of its adapters; a tied output layer counts once."""
    kinds = hf_layout(spec, "bfloat16", lora).kinds
    return sum(kind.instances * int(np.prod(shard.shape, dtype=np.int64)) for kind in kinds for shard in kind.shards)


def trainer_layout(spec: ModelSpec, topology: TrainerTopology, dtype: str, layer_spec: str = "local", lora: Lora | None = None) -> Layout:
    """The tensors of every trainer rank under Megatron's names, with global layer and expert numbers; with `lora`, those of its adapters
    alone. DP and CP ranks are replicas.

    layer_spec: "local" | "te", the layer spec in use. Raises ConfigError if the topology does not divide the model.
    """
    if layer_spec not in LAYER_SPECS:
        raise ConfigError(f"layer_spec = {layer_spec!r} is not one of {', '.join(LAYER_SPECS)}")
    t = topology
    parameters = trainer_parameters(spec, t, layer_spec)
    if lora:
        parameters = adapter_parameters(trainer_adapters(spec, t, layer_spec, lora))
    dense = np.arange(t.world_size).reshape(t.pp, t.dp * t.cp, t.tp).transpose(0, 2, 1)  # [pp, tp, replicas]
    expert = dense
    if spec.num_experts:
        expert = np.arange(t.world_size).reshape(t.pp, t.expert_dp, t.ep * t.etp).transpose(0, 2, 1)
    stages = np.array(stage_of_layer(spec.num_layers, t))
    kinds = _kinds("trainer", spec, parameters, dtype, stages, {DENSE: dense, EXPERT: expert}, (t.ep, t.etp), lora)
    return Layout("trainer", t.world_size, tuple(kinds))


def generator_layout(
    spec: ModelSpec,
    topology: GeneratorTopology,
    dtype: str,
    device: str = "cuda",
    quantization: str | Rule | None = None,
) -> Layout:
    """The tensors of every generator rank under SGLang's names. Each engine is one replica.

    device: "cuda" | "cpu". They differ only if tp does not divide heads, ffn or vocabulary: the CPU engine pads, GPU engines replicate
    kv heads. quantization: None, "fp8_block", "fp8_channel", "fp8_tensor", or a rule with other blocks; unless it is None, the family's
    `quantised_parameters` are e4m3, each with a tensor of scales. Raises ConfigError if SGLang could not start.
    """
    if device not in DEVICES:
        raise ConfigError(f"device = {device!r} is not one of {', '.join(DEVICES)}")
    if isinstance(quantization, str) and quantization not in QUANTISATIONS:
        raise ConfigError(f"generator.quantization = {quantization!r} is not one of {', '.join(QUANTISATIONS)}")
    rule = QUANTISATIONS[quantization] if isinstance(quantization, str) else quantization
    parameters = generator_parameters(spec, topology, device, rule)
    stages, meshes = np.zeros(spec.num_layers, dtype=np.int64), _generator_meshes(topology)
    kinds = _kinds("generator", spec, parameters, dtype, stages, meshes, (topology.ep, topology.tp // topology.ep))
    if rule is not None:
        kinds = with_scales(kinds, family(spec).quantised_parameters(spec), rule, _logical(spec))
    return Layout("generator", topology.world_size, tuple(kinds))


def pool_layout(spec: ModelSpec, topology: GeneratorTopology, dtype: str, device: str, lora: Lora) -> Layout:
    """The adapters on every generator rank, in the slot that SGLang's pool has for them. `dtype` is that of activations."""
    parameters, meshes = pool_parameters(spec, topology, device, lora), _generator_meshes(topology)
    stages = np.zeros(spec.num_layers, dtype=np.int64)
    kinds = _kinds("generator", spec, parameters, dtype, stages, meshes, (topology.ep, topology.tp // topology.ep), lora)
    return Layout("generator", topology.world_size, tuple(_as_shown(kind) for kind in kinds))


def _as_shown(kind: Kind) -> Kind:
    """SGLang shows the factor that all experts share with a dim of 1 for them."""
    if not is_of_stack(kind.name) or kind.shards[0].experts is not None:
        return kind
    return replace(kind, shards=tuple(replace(tensor, engine_shape=(1, *tensor.shape)) for tensor in kind.shards))


def together(one: Layout, other: Layout) -> Layout:
    """What both hold, on the same ranks."""
    assert one.world_size == other.world_size
    return Layout(one.name, one.world_size, one.kinds + other.kinds)


def _generator_meshes(topology: GeneratorTopology) -> dict[str, np.ndarray]:
    ranks = np.arange(topology.world_size).reshape(topology.engines, topology.tp).T[None]
    attention = np.arange(topology.world_size).reshape(-1, topology.attention_tp).T[None]
    return {DENSE: ranks, EXPERT: ranks, ATTENTION: ranks if topology.dp_attention == 1 else attention}


def stage_of_layer(num_layers: int, topology: TrainerTopology) -> tuple[int, ...]:
    """The pipeline stage of each layer, [num_layers], like Megatron's get_transformer_layer_offset.

    Every stage has vpp chunks of equal size. They go round the stages: every stage's first chunk, then every stage's second, … Layers
    that the first and the last stage do not claim are shared evenly. Raises ConfigError if the numbers do not fit.
    """
    t = topology
    told = {stage: n for stage, n in ((0, t.first_stage_layers), (t.pp - 1, t.last_stage_layers)) if n is not None}
    keys = {"trainer.first_stage_layers": t.first_stage_layers, "trainer.last_stage_layers": t.last_stage_layers}
    said = ", ".join(f"{key}={n}" for key, n in keys.items() if n is not None)
    sizes = f"trainer.pp={t.pp}" + (f" * trainer.vpp={t.vpp}" if t.vpp > 1 else "")
    others, rest = t.pp - len(told), num_layers - sum(told.values())
    shared = rest // others if others else 0
    if not told and num_layers % (t.pp * t.vpp):
        raise ConfigError(f"{sizes}: must divide the model's {num_layers} layers")
    if told and t.pp == 1:
        raise ConfigError(f"{said}: needs trainer.pp of at least 2; it is 1")
    if told and not others and t.vpp > 1:  # get_transformer_layer_offset divides by the number of other stages
        raise ConfigError(f"{said}: with {sizes} there must be a stage between the first and the last")
    if told and not others and rest:
        raise ConfigError(f"{said}: must be the model's {num_layers} layers together, because {sizes} has no other stages")
    if rest < others:
        raise ConfigError(f"{said}: must leave at least one of the model's {num_layers} layers to each other stage of {sizes}")
    if rest != shared * others or any(n % t.vpp for n in (*told.values(), shared)):
        left = f"{rest} of {num_layers} are left{_ends_that_fit(num_layers, t.pp, t.vpp)}"
        raise ConfigError(f"{said}: must leave layers that the other {others} of {sizes} stages can share evenly; {left}")
    chunk = [told.get(stage, shared) // t.vpp for stage in range(t.pp)]
    return tuple(stage for _ in range(t.vpp) for stage in range(t.pp) for _ in range(chunk[stage]))


def _ends_that_fit(layers: int, pp: int, vpp: int) -> str:
    """The equal first and last stages that are nearest to an even share, for the message."""
    others = (pp - 2) * vpp
    sizes = [n for n in range(vpp, layers // 2, vpp) if others and (layers - 2 * n) % others == 0 and layers - 2 * n >= others]
    best = min(sizes, key=lambda n: abs(n - layers / pp), default=None)
    return "" if best is None else f"; first and last of {best} each would do"


def _kinds(
    name: str,
    spec: ModelSpec,
    parameters: Sequence[Parameter],
    dtype: str,
    stages: np.ndarray,  # of layers, [num_layers]
    meshes: dict[str, np.ndarray],  # [stages, shards, replicas]; attention has one of its own where it is data-parallel
    expert_shards: tuple[int, int],  # ep, etp
    lora: Lora | None = None,
) -> list[Kind]:
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype = {dtype!r} of the {name} layout is not one of {', '.join(ITEM_BYTES)}")
    logical = _logical(spec, lora)
    ends = {FIRST: np.zeros(1, dtype=np.int64), LAST: np.full(1, meshes[DENSE].shape[0] - 1)}
    spans: dict[Layers, np.ndarray] = {}  # shared by the kinds of the same layers
    kinds = []
    for parameter in parameters:
        first, end = parameter.layers or (0, spec.num_layers)
        if first == end:
            continue
        ranks = meshes[parameter.mesh]
        cut = expert_shards if parameter.of_expert else (1, ranks.shape[1])
        shards: list[LocalTensor] = []
        for shard in range(ranks.shape[1]):
            same = parameter.dim is None and shard and not parameter.of_expert  # built once, since all of them hold the same
            shards.append(shards[0] if same else local_tensor(parameter, logical, shard, cut, parameter.dtype or dtype))
        of_place = spans.setdefault((first, end), stages[first:end]) if parameter.place == LAYER else ends[parameter.place]
        kinds.append(Kind(parameter.name, parameter.place, tuple(shards), of_place, ranks, first if parameter.place == LAYER else 0))
    return kinds


def _logical(spec: ModelSpec, lora: Lora | None = None) -> dict[str, LogicalTensor]:
    """The logical tensors by name. If a name occurs twice, for different layers, the tensors are alike."""
    tensors = lora_tensors(spec, lora) if lora else family(spec).logical_tensors(spec)
    return {tensor.name: replace(tensor, layers=None) for tensor in tensors}
