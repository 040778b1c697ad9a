"""The layouts of the three holders of weights: the HF checkpoint, the Megatron trainer, the SGLang generator."""

from __future__ import annotations

from typing import Optional, Sequence

import numpy as np

from megarl.config.errors import ConfigError
from megarl.models.parameters import FIRST, LAST, LAYER, LogicalTensor, Parameter, whole
from megarl.models.registry import family
from megarl.models.spec import ModelSpec
from megarl.plan.topology import GeneratorTopology, TrainerCoordinate, TrainerTopology
from megarl.reshard.box import Box, whole_box
from megarl.reshard.kinds import ITEM_BYTES, Kind, Layout, LocalTensor, Piece

__all__ = ["Kind", "Layout", "LocalTensor", "Piece", "generator_layout", "hf_layout", "stage_of_layer", "trainer_layout"]


def hf_layout(spec: ModelSpec, dtype: str) -> Layout:
    """One rank that holds the HF checkpoint: every logical tensor under its own name. For import and export."""
    logical = family(spec).logical_tensors(spec)
    parameters = [whole(tensor.name, tensor.place, tensor.name) for tensor in logical]
    ranks = np.zeros((1, 1, 1), dtype=np.int64)
    stages = np.zeros(spec.num_layers, dtype=np.int64)
    return _layout("hf", spec, parameters, dtype, 1, {FIRST: (0, ranks), LAST: (0, ranks)}, stages, ranks)


def trainer_layout(
    spec: ModelSpec,
    topology: TrainerTopology,
    dtype: str,
    norm_names: str = "local",
    stage_layers: Optional[Sequence[int]] = None,
) -> Layout:
    """Megatron's names, with global layer numbers, on every trainer rank. DP and CP ranks are replicas.

    norm_names: "local" | "te", the layer spec in use. stage_layers: layers per pipeline stage when they are uneven, [pp].
    Raises ConfigError when the topology does not divide the model.
    """
    parameters = family(spec).megatron_parameters(spec, topology.tp, topology.pp, norm_names)
    stages = np.array(stage_of_layer(spec.num_layers, topology.pp, topology.vpp, stage_layers))
    ranks = np.array(
        [
            [
                [topology.rank(TrainerCoordinate(tp=tp, cp=cp, dp=dp, pp=pp)) for dp in range(topology.dp) for cp in range(topology.cp)]
                for tp in range(topology.tp)
            ]
            for pp in range(topology.pp)
        ]
    )
    ends = {FIRST: (0, ranks), LAST: (topology.pp - 1, ranks)}
    return _layout("trainer", spec, parameters, dtype, topology.world_size, ends, stages, ranks)


def generator_layout(spec: ModelSpec, topology: GeneratorTopology, dtype: str, device: str = "cuda") -> Layout:
    """SGLang's names on every generator rank; each engine is one replica.

    device: "cuda" | "cpu". The two differ only where tp does not divide heads, ffn or vocabulary: the CPU engine pads, GPU
    engines replicate kv heads. Raises ConfigError where SGLang could not start.
    """
    parameters = family(spec).sglang_parameters(spec, topology.tp, device)
    ranks = np.arange(topology.world_size).reshape(topology.engines, topology.tp).T[None]
    stages = np.zeros(spec.num_layers, dtype=np.int64)
    return _layout("generator", spec, parameters, dtype, topology.world_size, {FIRST: (0, ranks), LAST: (0, ranks)}, stages, ranks)


def stage_of_layer(num_layers: int, pp: int, vpp: int = 1, stage_layers: Optional[Sequence[int]] = None) -> tuple[int, ...]:
    """Pipeline stage of each layer, [num_layers].

    Even split over pp * vpp chunks, chunk c on stage c % pp (Megatron's interleaving), or contiguous runs of `stage_layers`.
    """
    if stage_layers is not None:
        if vpp != 1 or len(stage_layers) != pp or sum(stage_layers) != num_layers:
            raise ConfigError(f"stage_layers = {list(stage_layers)} must name {pp} stages (vpp 1) that sum to {num_layers} layers")
        return tuple(stage for stage, count in enumerate(stage_layers) for _ in range(count))
    chunks = pp * vpp
    if num_layers % chunks:
        keys = f"trainer.pp = {pp}" if vpp == 1 else f"trainer.pp * trainer.vpp = {pp} * {vpp}"
        raise ConfigError(f"{keys} does not divide num_hidden_layers = {num_layers}")
    return tuple(layer // (num_layers // chunks) % pp for layer in range(num_layers))


def _layout(
    name: str,
    spec: ModelSpec,
    parameters: Sequence[Parameter],
    dtype: str,
    world_size: int,
    ends: dict[str, tuple[int, np.ndarray]],  # FIRST and LAST: (stage, ranks)
    layer_stages: np.ndarray,  # [num_layers]
    layer_ranks: np.ndarray,  # [stages, shards, replicas]
) -> Layout:
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype = {dtype!r} of the {name} layout is not one of {', '.join(ITEM_BYTES)}")
    logical = {tensor.name: tensor for tensor in family(spec).logical_tensors(spec)}
    kinds = []
    for parameter in parameters:
        if parameter.place == LAYER:
            stages, ranks = layer_stages, layer_ranks
        else:
            stage, ranks = ends[parameter.place]
            stages = np.array([stage])
        shards = tuple(local_tensor(parameter, logical, shard, ranks.shape[1], dtype) for shard in range(ranks.shape[1]))
        kinds.append(Kind(parameter.name, parameter.place, shards, stages, ranks))
    return Layout(name, world_size, tuple(kinds))


def local_tensor(parameter: Parameter, logical: dict[str, LogicalTensor], shard: int, shards: int, dtype: str) -> LocalTensor:
    """What shard `shard` of `shards` holds of a parameter: the shard-th contiguous chunk of its groups (see models.parameters)."""
    first = logical[parameter.parts[0].logical_name]
    if parameter.dim is None:
        box = whole_box(first.shape)
        return LocalTensor(parameter.name, first.shape, dtype, (Piece(box, first.name, box),))
    dim, groups = parameter.dim, parameter.groups
    slice_sizes = []  # per part: extent of one group's slice
    for part in parameter.parts:
        padded = part.padded or logical[part.logical_name].shape[dim]
        slice_sizes.append(padded * part.replicas // groups)
    extent, rest = divmod(sum(slice_sizes) * groups, shards)
    if rest:
        raise ConfigError(f"{parameter.name}: {sum(slice_sizes) * groups} rows or columns cannot be cut into {shards} equal shards")
    window = (shard * extent, (shard + 1) * extent)
    pieces = []
    for group in range(window[0] // sum(slice_sizes), -(-window[1] // sum(slice_sizes))):
        offset = group * sum(slice_sizes)
        for part, size in zip(parameter.parts, slice_sizes):
            tensor = logical[part.logical_name]
            skipped = max(0, window[0] - offset)  # a group may begin before the window and end after it
            start = group // part.replicas * size + skipped
            count = min(size, window[1] - offset, tensor.shape[dim] - group // part.replicas * size) - skipped
            if count > 0:
                local = offset + skipped - window[0]
                pieces.append(Piece(_cut(tensor.shape, dim, local, count), tensor.name, _cut(tensor.shape, dim, start, count)))
            offset += size
    shape = first.shape[:dim] + (extent,) + first.shape[dim + 1 :]
    return LocalTensor(parameter.name, shape, dtype, tuple(pieces))


def _cut(shape: tuple[int, ...], dim: int, start: int, count: int) -> Box:
    return Box(tuple(start if d == dim else 0 for d in range(len(shape))), tuple(count if d == dim else n for d, n in enumerate(shape)))
