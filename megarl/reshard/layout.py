"""The three layouts of the weights: of the HF checkpoint, of the Megatron trainer, and of the
SGLang generator.

A layout says which rank has which elements of which logical tensor, and under which local name. It
is kept factorised. A `Kind` is one parameter. It defines once what each of its shards has, with a
table of the ranks that have each shard on each pipeline stage. Layers, experts and replicas are
expanded only when the tensors of a rank are needed. In the definition of a shard, experts are a
leading dim of both boxes, whether the engine stacks them or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np
from msgspec import structs

from megarl.base.geometry import (
    DP_ATTENTION_FAMILIES,
    Box,
    GeneratorTopology,
    TrainerTopology,
    whole_box,
)
from megarl.config.errors import ConfigError
from megarl.kernels.quantise_rules import BLOCK, CHANNEL, TENSOR, Rule
from megarl.models.parameters import (
    ATTENTION,
    DENSE,
    EXPERT,
    EXPERT_FIELD,
    FIRST,
    LAST,
    LAYER,
    LAYER_FIELD,
    Layers,
    LogicalTensor,
    Parameter,
    Part,
    whole,
)
from megarl.models.registry import (
    fused_tensors,
    logical_tensors,
    megatron_parameters,
    quantised_parameters,
    sglang_parameters,
)
from megarl.models.spec import ModelSpec

# (kind, shard) -> (stage, replica) of everything that a rank has
Coordinates = dict[tuple[int, int], list[tuple[int, int]]]
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}
SCALE_DTYPE = "float32"
QUANTISED_DTYPE = "float8_e4m3fn"
Cut = tuple[str, int]  # the key with its value, and the number of shards
LAYER_SPECS = ("local", "te")
BUFFERS = ".router.expert_bias"  # ends the names of tensors that are no parameters
DEVICES = ("cpu", "cuda")
QUANTISATIONS = {"fp8_block": BLOCK, "fp8_channel": CHANNEL, "fp8_tensor": TENSOR}


class Piece(msgspec.Struct, frozen=True, gc=False):
    """`local`, a box of the local tensor, has the elements of `logical`, a box of the logical
    tensor. Both have the same shape.

    If an engine stacks experts, `local` belongs to one expert, and `logical` has a leading dim of 1
    for it.
    """

    local: Box
    logical_name: str
    logical: Box


class LocalTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor in a rank's memory.

    Elements that no piece covers are padding, which must be zero.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    # if the engine has the same memory in another shape: transposed, or a scalar
    engine_shape: tuple[int, ...] | None = None
    # first and end of the shard's experts, in an expert kind
    experts: tuple[int, int] | None = None
    transposed: bool = False  # in files of a checkpoint, rows and columns are exchanged

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def file_shape(self) -> tuple[int, ...]:
        if self.transposed:
            return whole_box(self.shape).transpose().shape
        return self.shape

    def expand(self, layer: int | None) -> tuple[LocalTensor, ...]:
        """The tensors that this template stands for in one layer, with names resolved.

        Experts that are not stacked have one tensor each.
        """
        if layer is None:
            return (self,)
        number = str(layer)
        pieces = []
        for piece in self.pieces:
            logical_name = piece.logical_name.replace(LAYER_FIELD, number)
            pieces.append(Piece(piece.local, logical_name, piece.logical))
        name = self.name.replace(LAYER_FIELD, number)
        tensor = structs.replace(self, name=name, pieces=tuple(pieces), experts=None)
        if self.experts is None:
            return (tensor,)
        expert_pieces: list[tuple[int, Piece]] = []
        for piece in pieces:
            expert_pieces.extend(_expert_pieces(piece))
        if EXPERT_FIELD not in self.name:  # stacked
            stacked = tuple([piece for _, piece in expert_pieces])
            return (structs.replace(tensor, pieces=stacked),)
        pieces_of_expert: dict[int, list[Piece]] = {e: [] for e in range(*self.experts)}
        for expert, piece in expert_pieces:
            pieces_of_expert[expert].append(
                Piece(piece.local.drop(), piece.logical_name, piece.logical.drop())
            )
        tensors = []
        for expert, pieces in pieces_of_expert.items():
            expert_name = name.replace(EXPERT_FIELD, str(expert))
            tensors.append(
                structs.replace(
                    tensor, name=expert_name, shape=self.shape[1:], pieces=tuple(pieces)
                )
            )
        return tuple(tensors)


class LayoutError(RuntimeError):
    """A live trainer rank or engine does not keep its weights as the reshard map assumes."""


@dataclass(frozen=True, eq=False)
class Kind:
    """One parameter of a layout.

    For place LAYER, instance i is the tensor of layer `layers[i]`; other places have one instance
    (i = 0). It is on stage `stages[i]`, where replica e of its shard s is on rank `ranks[stages[i],
    s, e]`.
    """

    name: str
    place: str  # FIRST | LAYER | LAST
    shards: tuple[LocalTensor, ...]  # [S]
    stages: np.ndarray  # [instances]
    ranks: np.ndarray  # [stages, S, replicas]
    layers: Layers | None = None  # [instances]; None: FIRST or LAST
    # of quantisation; if set, the shards are e4m3, and kind number `scales` has their scales
    rule: Rule | None = None
    scales: int | None = None
    scales_of: int | None = None  # for scales: number of the kind of their weights
    group: int = 0  # in a layout made by `side_by_side`: number of the original layout

    @property
    def instances(self) -> int:
        return len(self.stages)

    @property
    def replicas(self) -> int:
        return self.ranks.shape[2]

    @property
    def bytes(self) -> int:
        """The bytes of all instances, shards and replicas."""
        return sum(tensor.bytes for tensor in self.shards) * self.instances * self.replicas

    def layer(self, instance: int) -> int | None:
        return None if self.layers is None else self.layers[instance]

    def name_of(self, instance: int) -> str:
        """The name at one instance; it may still contain `{expert}`."""
        return self.name.replace(LAYER_FIELD, str(self.layer(instance)))

    def tensors(self, shard: int, instance: int) -> tuple[LocalTensor, ...]:
        """One tensor, or one per expert if the engine does not stack experts."""
        return self.shards[shard].expand(self.layer(instance))

    def tensor(self, shard: int, instance: int) -> LocalTensor:
        """The tensor of a kind that has one tensor per layer."""
        (tensor,) = self.tensors(shard, instance)
        return tensor

    def instances_on(self, stage: int) -> list[int]:
        return np.flatnonzero(self.stages == stage).tolist()

    def coordinates(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """(stage, shard, replica) of everything of this kind on `rank`."""
        positions = np.flatnonzero(self.ranks.ravel() == rank)
        if len(positions) == 0:
            return ()
        per_shard = self.ranks.shape[2]
        per_stage = self.ranks.shape[1] * per_shard
        places = []
        for position in positions.tolist():
            stage, place = divmod(position, per_stage)
            places.append((stage, *divmod(place, per_shard)))
        return tuple(places)


@dataclass(frozen=True, eq=False)
class Layout:
    """The place of every element among `world_size` ranks."""

    name: str  # "trainer" | "generator" | "hf": used in messages
    world_size: int
    kinds: tuple[Kind, ...]

    def tensors(self, rank: int) -> tuple[LocalTensor, ...]:
        """The local tensors of `rank` in forward order: of the first stage, layer by layer, of the
        last stage.
        """
        return tuple(tensor for _, _, tensor in self._in_order(rank))

    def _in_order(self, rank: int) -> list[tuple[int, int, LocalTensor]]:
        """(depth, number of the kind, tensor) for everything on `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{self.name} has ranks 0 to {self.world_size - 1}, not {rank}")
        entries = []
        for order, kind in enumerate(self.kinds):
            for stage, shard, _ in kind.coordinates(rank):
                for instance in kind.instances_on(stage):
                    depth = self.depth(kind, instance)
                    for tensor in kind.tensors(shard, instance):
                        entries.append((depth, order, tensor))
        return sorted(entries, key=lambda entry: entry[:2])

    def coordinates(self, rank: int) -> Coordinates:
        # kinds of one mesh share its table of ranks
        coordinates_of_mesh: dict[int, tuple[tuple[int, int, int], ...]] = {}
        coordinates: Coordinates = {}
        for k, kind in enumerate(self.kinds):
            mesh = id(kind.ranks)
            if mesh not in coordinates_of_mesh:
                coordinates_of_mesh[mesh] = kind.coordinates(rank)
            for stage, shard, replica in coordinates_of_mesh[mesh]:
                coordinates.setdefault((k, shard), []).append((stage, replica))
        return coordinates

    def shapes(self, rank: int) -> tuple[LocalTensor, ...]:
        """The local tensors of `rank` sorted by name, without their pieces.

        Ranks with equal tensors share the objects.
        """
        parts = []
        for (k, shard), places in self.coordinates(rank).items():
            parts += [(k, self._equal_shards[k][shard], stage) for stage, _ in places]
        key = tuple(parts)
        if key not in self._shapes:
            tensors: list[LocalTensor] = []
            for part in parts:
                if part not in self._shapes_of_parts:
                    self._shapes_of_parts[part] = self._shapes_of(*part)
                tensors += self._shapes_of_parts[part]
            self._shapes[key] = tuple(sorted(tensors, key=lambda tensor: tensor.name))
        return self._shapes[key]

    def _shapes_of(self, k: int, shard: int, stage: int) -> list[LocalTensor]:
        kind = self.kinds[k]
        template = structs.replace(kind.shards[shard], pieces=())
        tensors: list[LocalTensor] = []
        for instance in kind.instances_on(stage):
            tensors += template.expand(kind.layer(instance))
        return tensors

    @cached_property
    def _shapes(self) -> dict[tuple, tuple[LocalTensor, ...]]:
        return {}

    @cached_property
    def _shapes_of_parts(self) -> dict[tuple[int, int, int], list[LocalTensor]]:
        return {}

    @cached_property
    def _equal_shards(self) -> list[list[int]]:
        """For each kind and shard, the first shard that differs only in its pieces."""
        result = []
        for kind in self.kinds:
            shards = [structs.replace(shard, pieces=()) for shard in kind.shards]
            result.append(list(map(shards.index, shards)))
        return result

    def owned_pieces(self, rank: int) -> Iterator[tuple[LocalTensor, Piece]]:
        """The pieces that `rank` owns.

        Over all ranks, every element of every logical tensor is owned exactly once.

        The owner is the first replica among those with the same elements. A tensor with two names
        (a tied embedding on the first and the last stage) is owned under the first name. If several
        shards have the same elements, the first shard is the owner.
        """
        for tensor, piece, replica, _ in self.shared_pieces(rank):
            if not replica:
                yield tensor, piece

    def shared_pieces(self, rank: int) -> Iterator[tuple[LocalTensor, Piece, int, int]]:
        """(tensor, piece, replica, replicas) of the pieces that `rank` owns together with its
        replicas: like `owned_pieces`, but for every replica.
        """
        owner: dict[tuple[str, Layers | None], str] = {}
        for kind in self.kinds:
            for shard in kind.shards:
                for piece in shard.pieces:
                    owner.setdefault((piece.logical_name, kind.layers), kind.name)
        for kind in self.kinds:
            for stage, shard, replica in kind.coordinates(rank):
                earlier_boxes = set()
                for earlier_shard in kind.shards[:shard]:
                    for piece in earlier_shard.pieces:
                        earlier_boxes.add((piece.logical_name, piece.logical))
                pieces = []
                for piece in kind.shards[shard].pieces:
                    is_owner = owner[piece.logical_name, kind.layers] == kind.name
                    if is_owner and (piece.logical_name, piece.logical) not in earlier_boxes:
                        pieces.append(piece)
                template = structs.replace(kind.shards[shard], pieces=tuple(pieces))
                for instance in kind.instances_on(stage):
                    for tensor in template.expand(kind.layer(instance)):
                        for piece in tensor.pieces:
                            yield tensor, piece, replica, kind.replicas

    @cached_property
    def num_layers(self) -> int:
        return max((1 + kind.layers[-1] for kind in self.kinds if kind.layers), default=0)

    def depth(self, kind: Kind, instance: int) -> int:
        """The position in the forward pass: 0 for tensors of the first stage, 1 + layer for layers,
        then those of the last stage.
        """
        if kind.layers is not None:
            return 1 + kind.layers[instance]
        if kind.place == FIRST:
            return 0
        return 1 + self.num_layers


def hf_layout(spec: ModelSpec, dtype: str, fused: bool = False) -> Layout:
    """The layout of an HF checkpoint: one rank that holds every logical tensor under its own name.

    If `fused`, it holds the tensors of the checkpoint's files, each of which may contain several
    logical tensors (`file_places`).
    """
    joined = {}
    for parameter in fused_tensors(spec) if fused else ():
        for part in parameter.parts:
            joined[part.logical_name] = parameter
    return hf_layout_of(logical_tensors(spec), spec, dtype, joined)


def hf_layout_of(
    logical: Sequence[LogicalTensor],
    spec: ModelSpec,
    dtype: str,
    joined: Mapping[str, Parameter] = {},
) -> Layout:
    """One rank that holds each of these tensors of the model's layers under its own name, or as a
    part of a `joined` tensor.
    """
    parameters: dict[Parameter, None] = {}  # a set that keeps its order
    for tensor in logical:
        parameter = joined.get(tensor.name) or whole(tensor.name, tensor.place, tensor.name)
        parameters[replace(parameter, layers=tensor.layers, dtype=tensor.dtype)] = None
    ranks = np.zeros((1, 1, 1), dtype=np.int64)
    stages = np.zeros(spec.num_layers + spec.mtp_layers, dtype=np.int64)
    meshes = {DENSE: ranks, EXPERT: ranks}
    return _layout("hf", spec, list(parameters), logical, dtype, stages, meshes, (1, 1))


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where a checkpoint's files have a logical tensor: in box `box` of tensor `name`, before it is
    transposed.
    """

    name: str
    box: Box
    transposed: bool

    def place(self, logical: Box) -> Box:
        """The box in tensor `name`, untransposed, of a box of the logical tensor.

        Files may stack the tensors of experts.
        """
        stacked = len(self.box.shape) - len(logical.shape)
        return Box((0,) * stacked + logical.start, (1,) * stacked + logical.shape).move(
            whole_box(self.box.shape), self.box
        )


def file_places(tensors: Iterable[LocalTensor]) -> dict[str, FilePlace]:
    """Logical name -> place."""
    places: dict[str, FilePlace] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            places[piece.logical_name] = FilePlace(tensor.name, piece.local, tensor.transposed)
    return places


def parameter_count(spec: ModelSpec) -> int:
    """The parameters of the whole model; a tied output layer counts once."""
    return elements(hf_layout(spec, "bfloat16"))


def elements(checkpoint: Layout) -> int:
    """The number of elements of a layout that has each tensor once."""
    count = 0
    for kind in checkpoint.kinds:
        for shard in kind.shards:
            count += kind.instances * math.prod(shard.shape)
    return count


def trainer_layout(
    spec: ModelSpec, topology: TrainerTopology, dtype: str, layer_spec: str = "local"
) -> Layout:
    """The tensors of every trainer rank under Megatron's names, with global layer and expert
    numbers. DP and CP ranks are replicas; with zero=3 each has some rows of every parameter.

    layer_spec: "local" | "te", the layer spec in use. Raises ConfigError if the topology does not
    divide the model.
    """
    if layer_spec not in LAYER_SPECS:
        raise ConfigError(f"layer_spec = {layer_spec!r} is not one of {', '.join(LAYER_SPECS)}")
    return trainer_layout_of(
        trainer_parameters(spec, topology, layer_spec), logical_tensors(spec), spec, topology, dtype
    )


def trainer_layout_of(
    parameters: Sequence[Parameter],
    logical: Sequence[LogicalTensor],
    spec: ModelSpec,
    topology: TrainerTopology,
    dtype: str,
) -> Layout:
    """Like `trainer_layout`, for these parameters of the model's layers, which hold the `logical`
    tensors.
    """
    t = topology
    # [pp, tp, replicas]
    dense = np.arange(t.world_size).reshape(t.pp, t.dp * t.cp, t.tp).transpose(0, 2, 1)
    expert = dense
    if spec.experts:
        expert = np.arange(t.world_size).reshape(t.pp, t.expert_dp, t.ep * t.etp).transpose(0, 2, 1)
    stages = np.array(stage_of_layer(spec.num_layers, t) + (t.pp - 1,) * spec.mtp_layers)
    meshes = {DENSE: dense, EXPERT: expert}
    layout = _layout("trainer", spec, parameters, logical, dtype, stages, meshes, (t.ep, t.etp))
    return fully_sharded(layout) if t.zero == 3 else layout


def fully_sharded(layout: Layout) -> Layout:
    """The layout after PyTorch's fully_shard has cut every parameter into chunks of rows, one for
    each replica. As by torch.chunk, the last chunks may be smaller, or empty. Buffers stay whole.
    """
    meshes: dict[tuple[int, bool], np.ndarray] = {}  # shared by the kinds of one mesh
    kinds = []
    for kind in layout.kinds:
        if kind.name.endswith(BUFFERS):
            kinds.append(kind)
            continue
        whole_shards = kind.shards
        stages, shards, replicas = kind.ranks.shape
        is_uncut = all(shard is whole_shards[0] for shard in whole_shards)
        key = (id(kind.ranks), is_uncut)
        if key not in meshes:
            of_chunks = kind.ranks.transpose(0, 2, 1)
            if not is_uncut:
                of_chunks = kind.ranks.reshape(stages, shards * replicas, 1)
            meshes[key] = of_chunks
        if is_uncut:  # all of its shards are the same, so they become the replicas
            whole_shards = whole_shards[:1]
        chunks: list[LocalTensor] = []
        for shard in whole_shards:
            chunks.extend(row_chunks(shard, replicas))
        kinds.append(replace(kind, shards=tuple(chunks), ranks=meshes[key]))
    return replace(layout, kinds=tuple(kinds))


def row_chunks(tensor: LocalTensor, count: int) -> Iterator[LocalTensor]:
    """Cuts the tensor into `count` chunks of rows, as torch.chunk does and then empty ones.

    If the tensor stands for one tensor per expert, each of these is cut.
    """
    dim = 1 if tensor.experts is not None and EXPERT_FIELD in tensor.name else 0
    rows = tensor.shape[dim]
    most = -(-rows // count)
    for chunk in range(count):
        first = min(chunk * most, rows)
        box = _cut(tensor.shape, dim, first, min(most, rows - first))
        target = Box((0,) * len(box.shape), box.shape)
        pieces = []
        for piece in tensor.pieces:
            common = piece.local.intersect(box)
            if common is not None:
                logical = common.move(piece.local, piece.logical)
                pieces.append(Piece(common.move(box, target), piece.logical_name, logical))
        yield structs.replace(tensor, shape=box.shape, pieces=tuple(pieces))


def generator_layout(
    spec: ModelSpec,
    topology: GeneratorTopology,
    dtype: str,
    device: str = "cuda",
    quantization: str | Rule | None = None,
) -> Layout:
    """The tensors of every generator rank under SGLang's names. Each engine is one replica.

    device: "cuda" | "cpu". They differ only if tp does not divide heads, ffn or vocabulary: CPU
    engines pad, GPU engines replicate kv heads. quantization: None, "fp8_block", "fp8_channel",
    "fp8_tensor", or a rule with other blocks. Unless it is None, the family's
    `quantised_parameters` are e4m3, each with a tensor of scales. Raises ConfigError if SGLang
    could not start.
    """
    if device not in DEVICES:
        raise ConfigError(f"device = {device!r} is not one of {', '.join(DEVICES)}")
    if isinstance(quantization, str) and quantization not in QUANTISATIONS:
        raise ConfigError(
            f"generator.quantization = {quantization!r} is not one of {', '.join(QUANTISATIONS)}"
        )
    rule = QUANTISATIONS[quantization] if isinstance(quantization, str) else quantization
    logical = logical_tensors(spec)
    layout = generator_layout_of(
        generator_parameters(spec, topology, device, rule), logical, spec, topology, dtype
    )
    if rule is None:
        return layout
    kinds = with_scales(layout.kinds, quantised_parameters(spec), rule, _by_name(logical))
    return replace(layout, kinds=tuple(kinds))


def generator_layout_of(
    parameters: Sequence[Parameter],
    logical: Sequence[LogicalTensor],
    spec: ModelSpec,
    topology: GeneratorTopology,
    dtype: str,
) -> Layout:
    """Like `generator_layout`, for these parameters of the engine, which hold the `logical`
    tensors.
    """
    stages = np.zeros(spec.num_layers + spec.mtp_layers, dtype=np.int64)
    ranks = np.arange(topology.world_size).reshape(topology.engines, topology.tp).T[None]
    attention = ranks
    if topology.dp_attention > 1:
        attention = np.arange(topology.world_size).reshape(-1, topology.attention_tp).T[None]
    meshes = {DENSE: ranks, EXPERT: ranks, ATTENTION: attention}
    expert_shards = (topology.ep, topology.tp // topology.ep)
    return _layout("generator", spec, parameters, logical, dtype, stages, meshes, expert_shards)


def combined_layout(first: Layout, second: Layout) -> Layout:
    """The tensors of both layouts, on the same ranks."""
    assert first.world_size == second.world_size
    return Layout(first.name, first.world_size, first.kinds + second.kinds)


def side_by_side(layouts: Sequence[Layout]) -> Layout:
    """The tensors of all layouts.

    Each layout has its own ranks, which follow the ranks of the previous layout.
    """
    if len(layouts) == 1:
        return layouts[0]
    kinds: list[Kind] = []
    first_rank = 0
    for group, layout in enumerate(layouts):
        # kinds that shared a table still share one
        meshes = {id(kind.ranks): kind.ranks + first_rank for kind in layout.kinds}
        kind_offset = len(kinds)
        for kind in layout.kinds:
            scales = kind.scales
            if scales is not None:
                scales += kind_offset
            scales_of = kind.scales_of
            if scales_of is not None:
                scales_of += kind_offset
            kinds.append(
                replace(
                    kind,
                    ranks=meshes[id(kind.ranks)],
                    scales=scales,
                    scales_of=scales_of,
                    group=group,
                )
            )
        first_rank += layout.world_size
    return Layout(layouts[0].name, first_rank, tuple(kinds))


def stage_of_layer(num_layers: int, topology: TrainerTopology) -> tuple[int, ...]:
    """The pipeline stage of each layer, [num_layers], like Megatron's get_transformer_layer_offset.

    Every stage has vpp chunks of equal size. They go round the stages: first chunks of all stages,
    then second chunks, … The layers that the first and the last stage do not claim are shared
    evenly. Raises ConfigError if the numbers do not fit.
    """
    t = topology
    end_layers = {}
    end_settings = []
    if t.first_stage_layers is not None:
        end_layers[0] = t.first_stage_layers
        end_settings.append(f"trainer.first_stage_layers={t.first_stage_layers}")
    if t.last_stage_layers is not None:
        end_layers[t.pp - 1] = t.last_stage_layers
        end_settings.append(f"trainer.last_stage_layers={t.last_stage_layers}")
    settings = ", ".join(end_settings)
    sizes = f"trainer.pp={t.pp}" + (f" * trainer.vpp={t.vpp}" if t.vpp > 1 else "")
    middle_stages = t.pp - len(end_layers)
    middle_layers = num_layers - sum(end_layers.values())
    layers_per_stage = middle_layers // middle_stages if middle_stages else 0
    if not end_layers and num_layers % (t.pp * t.vpp):
        raise ConfigError(f"{sizes}: must divide the model's {num_layers} layers")
    if end_layers and t.pp == 1:
        raise ConfigError(f"{settings}: needs trainer.pp of at least 2; it is 1")
    # get_transformer_layer_offset divides by the number of other stages
    if end_layers and not middle_stages and t.vpp > 1:
        raise ConfigError(
            f"{settings}: with {sizes} there must be a stage between the first and the last"
        )
    if end_layers and not middle_stages and middle_layers:
        raise ConfigError(
            f"{settings}: must be the model's {num_layers} layers together, because {sizes} has no "
            "other stages"
        )
    if middle_layers < middle_stages:
        raise ConfigError(
            f"{settings}: must leave at least one of the model's {num_layers} layers to each other "
            f"stage of {sizes}"
        )
    stage_sizes = [end_layers.get(stage, layers_per_stage) for stage in range(t.pp)]
    leaves_rest = middle_layers != layers_per_stage * middle_stages
    if leaves_rest or any(size % t.vpp for size in [*stage_sizes, layers_per_stage]):
        raise ConfigError(
            f"{settings}: must leave layers that the other {middle_stages} of {sizes} stages can "
            f"share evenly; {middle_layers} of {num_layers} are left"
            f"{_ends_that_fit(num_layers, t.pp, t.vpp)}"
        )
    stages: list[int] = []
    for stage, size in enumerate(stage_sizes):
        stages += [stage] * (size // t.vpp)
    return tuple(stages * t.vpp)


def _ends_that_fit(layers: int, pp: int, vpp: int) -> str:
    """A hint for the message: the equal sizes of first and last stage that are nearest to an even
    share.
    """
    middle_chunks = (pp - 2) * vpp
    sizes = []
    for size in range(vpp, layers // 2, vpp):
        middle = layers - 2 * size
        if middle_chunks and middle % middle_chunks == 0 and middle >= middle_chunks:
            sizes.append(size)
    if not sizes:
        return ""
    best = min(sizes, key=lambda size: abs(size - layers / pp))
    return f"; first and last of {best} each would do"


def _layout(
    name: str,
    spec: ModelSpec,
    parameters: Sequence[Parameter],
    tensors: Sequence[LogicalTensor],  # held by the parameters
    dtype: str,
    # [num_layers] stages of layers, followed by those of layers for multi-token prediction
    stages: np.ndarray,
    # [stages, shards, replicas]; data-parallel attention has its own
    meshes: dict[str, np.ndarray],
    expert_shards: tuple[int, int],  # ep, etp
) -> Layout:
    if dtype not in ITEM_BYTES:
        raise ConfigError(
            f"dtype = {dtype!r} of the {name} layout is not one of {', '.join(ITEM_BYTES)}"
        )
    logical = _by_name(tensors)
    ends = {FIRST: np.zeros(1, dtype=np.int64), LAST: np.full(1, meshes[DENSE].shape[0] - 1)}
    all_layers = tuple(range(spec.num_layers))
    stages_of: dict[Layers, np.ndarray] = {}  # shared by kinds with the same layers
    kinds = []
    for parameter in parameters:
        layers = None
        if parameter.place == LAYER:
            layers = all_layers if parameter.layers is None else parameter.layers
            if not layers:
                continue
        ranks = meshes[parameter.mesh]
        cut = expert_shards if parameter.of_expert else (1, ranks.shape[1])
        shards: list[LocalTensor] = []
        for shard in range(ranks.shape[1]):
            if shard and parameter.dim is None and not parameter.of_expert:
                shards.append(shards[0])  # all shards are the same
            else:
                shards.append(
                    local_tensor(parameter, logical, shard, cut, parameter.dtype or dtype)
                )
        if layers is None:
            stages_of_instances = ends[parameter.place]
        else:
            stages_of_instances = stages_of.setdefault(layers, stages[list(layers)])
        kinds.append(
            Kind(
                name=parameter.name,
                place=parameter.place,
                shards=tuple(shards),
                stages=stages_of_instances,
                ranks=ranks,
                layers=layers,
            )
        )
    return Layout(name, meshes[DENSE].size, tuple(kinds))


def _by_name(tensors: Iterable[LogicalTensor]) -> dict[str, LogicalTensor]:
    """If a name occurs twice, for different layers, the tensors are equal."""
    return {tensor.name: replace(tensor, layers=None) for tensor in tensors}


def _expert_pieces(piece: Piece) -> Iterator[tuple[int, Piece]]:
    """Yields (global expert, its piece)."""
    for i in range(piece.local.shape[0]):
        expert = piece.logical.start[0] + i
        name = piece.logical_name.replace(EXPERT_FIELD, str(expert))
        yield expert, Piece(piece.local.entry(i), name, _stack(piece.logical.drop(), 0, 1))


def local_tensor(
    parameter: Parameter,
    logical: Mapping[str, LogicalTensor],
    shard: int,
    cut: tuple[int, int],
    dtype: str,
) -> LocalTensor:
    """Shard number `shard` of `cut` = (expert shards, shards of each tensor).

    Shards are contiguous chunks; the second index is faster.
    """
    expert_shard, tensor_shard = divmod(shard, cut[1])
    if parameter.dim is None:
        tensor = _whole(parameter, logical, dtype)
    else:
        tensor = _chunk(parameter, logical, tensor_shard, cut[1], dtype)
    if not parameter.of_expert:
        return tensor
    count = logical[parameter.parts[0].logical_name].experts // cut[0]
    first = expert_shard * count
    pieces = []
    for piece in tensor.pieces:
        local = _stack(piece.local, 0, count)
        pieces.append(Piece(local, piece.logical_name, _stack(piece.logical, first, count)))
    return structs.replace(
        tensor,
        shape=(count,) + tensor.shape,
        pieces=tuple(pieces),
        experts=(first, first + count),
    )


def flat_boxes(shape: tuple[int, ...], first: int, end: int) -> Iterator[Box]:
    """Splits elements `first` to `end` of the flattened tensor into boxes.

    In two dims there are at most three boxes: two cut rows, and the rows between them.
    """
    if first >= end:
        return
    if len(shape) <= 1:
        yield Box((first,) * len(shape), (end - first,) * len(shape))
        return
    size = math.prod(shape[1:])
    row = first // size
    if row == (end - 1) // size:
        for box in flat_boxes(shape[1:], first - row * size, end - row * size):
            yield _stack(box, row, 1)
        return
    head = -(-first // size)
    tail = end // size
    yield from flat_boxes(shape, first, min(head * size, end))
    if head < tail:
        yield _stack(whole_box(shape[1:]), head, tail - head)
    yield from flat_boxes(shape, tail * size, end)


def _whole(parameter: Parameter, logical: Mapping[str, LogicalTensor], dtype: str) -> LocalTensor:
    """The whole parameter, with its parts one below the other."""
    shapes = [logical[part.logical_name].shape for part in parameter.parts]
    pieces = []
    row = 0
    for part, shape in zip(parameter.parts, shapes):
        local = Box((row,) + (0,) * (len(shape) - 1), shape)
        pieces.append(Piece(local, part.logical_name, whole_box(shape)))
        row += shape[0]
    return LocalTensor(
        parameter.name,
        (row,) + shapes[0][1:],
        dtype,
        tuple(pieces),
        transposed=parameter.transposed,
    )


def _chunk(
    parameter: Parameter, logical: Mapping[str, LogicalTensor], shard: int, shards: int, dtype: str
) -> LocalTensor:
    """Chunk `shard` of `shards` contiguous chunks of the parameter's groups (see
    models.parameters).
    """
    dim = parameter.dim
    groups = parameter.groups
    assert dim is not None
    tensors = [logical[part.logical_name] for part in parameter.parts]
    extents = []
    slices = []  # extent of one group's slice of each part
    for part, tensor in zip(parameter.parts, tensors):
        extents.append(_extent(part, tensor.shape[dim]))
        slices.append((part.padded or extents[-1]) * part.replicas // groups)
    period = sum(slices)
    extent, remainder = divmod(period * groups, shards)
    if remainder:
        raise ConfigError(
            f"{parameter.name}: {period * groups} rows or columns cannot be cut into {shards} "
            "equal shards"
        )
    begin = shard * extent
    end = (shard + 1) * extent
    pieces = []
    for group in range(begin // period, -(-end // period)):
        offset = group * period
        for part, tensor, whole_extent, size in zip(parameter.parts, tensors, extents, slices):
            skipped = max(0, begin - offset)  # a group may begin before the chunk and end after it
            start = group // part.replicas * size
            count = min(size, end - offset, whole_extent - start) - skipped
            local_start = offset + skipped - begin
            for first, length in _places(part, start + skipped, count):
                last = pieces[-1] if pieces and pieces[-1].logical_name == tensor.name else None
                # adjacent runs are one piece
                if last and last.local.end[dim] == local_start and last.logical.end[dim] == first:
                    pieces.pop()
                    local_start = last.local.start[dim]
                    first = last.logical.start[dim]
                    length = last.logical.shape[dim] + length
                pieces.append(
                    Piece(
                        _cut(tensor.shape, dim, local_start, length),
                        tensor.name,
                        _cut(tensor.shape, dim, first, length),
                    )
                )
                local_start += length
            offset += size
    shape = tensors[0].shape
    return LocalTensor(
        parameter.name, shape[:dim] + (extent,) + shape[dim + 1 :], dtype, tuple(pieces)
    )


def _extent(part: Part, tensor_extent: int) -> int:
    """The extent of the part along the cut dim, from that of its logical tensor."""
    if part.run:
        return part.run.extent(tensor_extent)
    return tensor_extent


def _places(part: Part, first: int, count: int) -> Iterator[tuple[int, int]]:
    """For `count` elements of the part from `first` on: (first, count) in the logical tensor of
    each contiguous piece.
    """
    if part.run is not None:
        yield from part.run.places(first, count)
    elif count > 0:
        yield first, count


def _stack(box: Box, start: int, count: int) -> Box:
    return Box((start,) + box.start, (count,) + box.shape)


def _cut(shape: tuple[int, ...], dim: int, start: int, count: int) -> Box:
    zeros = (0,) * len(shape)
    return Box(zeros[:dim] + (start,) + zeros[dim + 1 :], shape[:dim] + (count,) + shape[dim + 1 :])


def trainer_parameters(
    spec: ModelSpec, topology: TrainerTopology, layer_spec: str = "local"
) -> Sequence[Parameter]:
    """Megatron's parameters.

    Raises ConfigError if the topology does not divide the model. Its problems name the key, its
    value, and what it must divide.
    """
    t = topology
    problems = []
    if spec.experts:
        ranks = t.tp * t.cp * t.dp
        if ranks % (t.ep * t.etp):
            product = f"trainer.ep={t.ep} * trainer.etp={t.etp}"
            problems.append(
                f"{product}: must divide trainer.tp * trainer.cp * trainer.dp = {ranks}, the "
                "ranks of a stage"
            )
        problems += _indivisible((f"trainer.ep={t.ep}", t.ep), {"experts": spec.experts.count})
    parameters = megatron_parameters(spec, t, layer_spec)
    problems += _uneven(
        parameters, {DENSE: (f"trainer.tp={t.tp}", t.tp), EXPERT: (f"trainer.etp={t.etp}", t.etp)}
    )
    if problems:
        raise ConfigError(problems)
    return parameters


def generator_parameters(
    spec: ModelSpec, topology: GeneratorTopology, device: str, rule: Rule | None = None
) -> Sequence[Parameter]:
    """SGLang's parameters of one engine, quantised by `rule`.

    Raises ConfigError if SGLang could not start.
    """
    t = topology
    problems = []
    tp = f"generator.tp={t.tp}"
    ep = f"generator.ep={t.ep}"
    replicas = f"generator.dp_attention={t.dp_attention}"
    if t.dp_attention > 1 and spec.family not in DP_ATTENTION_FAMILIES:
        problems.append(
            f"{replicas}: must be 1 for a {spec.family} model; others are for "
            f"{', '.join(DP_ATTENTION_FAMILIES)}"
        )
    elif t.tp % t.dp_attention:
        problems.append(f"{replicas}: must divide {tp}")
    if spec.experts:
        problems += [f"{ep}: must divide {tp}"] if t.tp % t.ep else []
        problems += _indivisible((ep, t.ep), {"experts": spec.experts.count})
    if problems:
        raise ConfigError(problems)
    parameters = sglang_parameters(spec, t, device)
    attention = f"{tp} / {replicas}" if t.dp_attention > 1 else tp
    expert = f"{tp} / {ep}" if t.ep > 1 else tp
    problems = _uneven(
        parameters,
        {DENSE: (tp, t.tp), ATTENTION: (attention, t.attention_tp), EXPERT: (expert, t.tp // t.ep)},
    )
    if rule is not None and rule.rows and rule.cols and not problems:
        problems = _cut_blocks(spec, t, parameters, rule.rows, rule.cols)
    if problems:
        raise ConfigError(problems)
    return parameters


def with_scales(
    kinds: Sequence[Kind], names: Sequence[str], rule: Rule, logical: Mapping[str, LogicalTensor]
) -> list[Kind]:
    """The `kinds`, after quantising those called `names` by `rule`.

    Each of these is followed by the kind of its scales. Tiles are defined on the logical tensor, as
    in a quantised checkpoint, independently of how either side cuts it:

        fp8_block    <weight>_scale_inv  a scale for each 128x128 block of a logical tensor
        fp8_channel  <weight>_scale      a scale for each row of a logical tensor, even if an
                                         engine's rank holds only part of the row
        fp8_tensor   <weight>_scale      one scale for everything that an engine fuses into one
                                         parameter (for experts: one per expert)

    After loading, SGLang keeps the weights of the last two formats transposed (only dense layers):
    the same memory with other strides.

    Raises ConfigError if a padded tensor would be quantised. `generator_parameters` has already
    checked that no cut goes through a block.
    """
    kind_names = {kind.name for kind in kinds}
    missing = [name for name in names if name not in kind_names]
    if missing:
        raise ConfigError(
            f"quantised parameters that the layout does not have: {', '.join(missing)}"
        )
    result: list[Kind] = []
    for kind in kinds:
        if kind.name not in names:
            result.append(kind)
            continue
        scales = tuple(_scales(tensor, rule, logical) for tensor in kind.shards)
        quantised = replace(
            kind,
            shards=tuple(_quantised(tensor, rule) for tensor in kind.shards),
            rule=rule,
            scales=len(result) + 1,
        )
        result += [
            quantised,
            replace(kind, name=scales[0].name, shards=scales, scales_of=len(result)),
        ]
    return result


def engine_view(tensor: LocalTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The (shape, strides in elements) of a tensor of the layout in the live engine."""
    shape = tensor.engine_shape
    if shape is None:
        return tensor.shape, contiguous_strides(tensor.shape)
    if len(shape) == 2:  # transposed
        return shape, contiguous_strides(tensor.shape)[::-1]
    return shape, contiguous_strides(shape)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def scale_name(name: str, rule: Rule) -> str:
    return name + ("_scale_inv" if is_block(rule) else "_scale")


def is_block(rule: Rule) -> bool:
    return rule.cols is not None


def of_whole_tensor(rule: Rule) -> bool:
    return rule.rows is None


def _quantised(tensor: LocalTensor, rule: Rule) -> LocalTensor:
    transposed = not is_block(rule) and len(tensor.shape) == 2
    return structs.replace(
        tensor, dtype=QUANTISED_DTYPE, engine_shape=tensor.shape[::-1] if transposed else None
    )


def _scales(tensor: LocalTensor, rule: Rule, logical: Mapping[str, LogicalTensor]) -> LocalTensor:
    name = scale_name(tensor.name, rule)
    if sum(piece.local.numel for piece in tensor.pieces) != math.prod(tensor.shape):
        raise ConfigError(
            f"generator.quantization: {tensor.name} of shape {tensor.shape} is padded; padded "
            "tensors are not quantised"
        )
    shape = rule.scale_shape(tensor.shape)
    if of_whole_tensor(rule):
        engine_shape = tensor.shape[:1] if tensor.experts else ()
        first = tensor.pieces[0]
        logical_box = Box(first.logical.start[:-2] + (0, 0), shape)
        piece = Piece(whole_box(shape), scale_name(first.logical_name, rule), logical_box)
        return LocalTensor(name, shape, SCALE_DTYPE, (piece,), engine_shape, experts=tensor.experts)
    pieces = []
    tile_row = 0
    by_rows = len({piece.local.start[-1] for piece in tensor.pieces}) == 1
    for piece in tensor.pieces:
        assert not is_block(rule) or rule.whole_tiles(
            piece.logical, logical[piece.logical_name].shape
        ), tensor.name
        tiles = rule.tiles(piece.logical)
        assert by_rows  # no engine fuses parts along columns
        local = Box((0,) * (len(tiles.start) - 2) + (tile_row, 0), tiles.shape)
        pieces.append(Piece(local, scale_name(piece.logical_name, rule), tiles))
        tile_row += tiles.shape[-2]
    assert tile_row == shape[-2], tensor.name
    return LocalTensor(name, shape, SCALE_DTYPE, tuple(pieces), experts=tensor.experts)


def _uneven(parameters: Sequence[Parameter], cuts: Mapping[str, Cut]) -> list[str]:
    uneven: dict[Cut, dict[str, int]] = {}
    for parameter in parameters:
        if parameter.layers is None or parameter.layers:
            uneven.setdefault(cuts[parameter.mesh], {}).update(parameter.units)
    problems: list[str] = []
    for cut, units in uneven.items():
        problems += _indivisible(cut, units)
    return problems


def _indivisible(cut: Cut, units: Mapping[str, int]) -> list[str]:
    key, shards = cut
    uneven = [f"{count} {name}" for name, count in units.items() if count % shards]
    if uneven:
        return [f"{key}: must divide the model's {' and '.join(uneven)}"]
    return []


def _cut_blocks(
    spec: ModelSpec,
    topology: GeneratorTopology,
    parameters: Sequence[Parameter],
    rows: int,
    cols: int,
) -> list[str]:
    """Problems with fused or cut tensors that do not consist of whole blocks.

    As in SGLang's Fp8LinearMethod.validate_block_quant_shapes and Fp8MoEMethod.
    """
    t = topology
    problems = []
    names = quantised_parameters(spec)
    logical = _by_name(logical_tensors(spec))
    fused = []
    cut = []
    for parameter in parameters:
        if parameter.name in names:
            fused.extend(_unevenly_fused(parameter, logical, rows))
            cut.extend(_unevenly_cut(parameter, logical, (rows, cols), t))
    if fused:
        must = (
            f"at any generator.tp SGLang fuses rows that must be multiples of {rows}, and are "
            f"{', '.join(fused)}"
        )
        problems.append(f"generator.quantization=fp8_block: must be null for this model: {must}")
    if cut:
        sizes = f"generator.tp={t.tp}"
        if spec.experts:
            sizes += f", generator.ep={t.ep}"
        if t.dp_attention > 1:
            sizes += f", generator.dp_attention={t.dp_attention}"
        blocks = f"multiples of {rows}" if rows == cols else f"whole blocks of {rows} by {cols}"
        problems.append(
            f"generator.quantization=fp8_block: with {sizes} a rank must hold {blocks}; it holds "
            f"{', '.join(cut)}"
        )
    return problems


def _unevenly_fused(
    parameter: Parameter, logical: Mapping[str, LogicalTensor], block: int
) -> Iterator[str]:
    """Finds parts whose last block would overlap the next part, in a tensor that every rank has
    whole.
    """
    if parameter.dim is not None:
        return
    for part in parameter.parts[:-1]:
        rows = logical[part.logical_name].shape[0]
        if rows % block:
            yield f"{rows} of {part.logical_name.replace(LAYER_FIELD, '*')}"


def _unevenly_cut(
    parameter: Parameter,
    logical: Mapping[str, LogicalTensor],
    blocks: tuple[int, int],
    topology: GeneratorTopology,
) -> Iterator[str]:
    if parameter.dim is None:  # whole on every rank: SGLang rounds up
        return
    shards = {
        DENSE: topology.tp,
        ATTENTION: topology.attention_tp,
        EXPERT: topology.tp // topology.ep,
    }[parameter.mesh]
    fused = len(parameter.parts) > 1 or parameter.of_expert
    block = blocks[parameter.dim]
    axis = ("rows", "columns")[parameter.dim]
    for part in parameter.parts:
        whole_extent = _extent(part, logical[part.logical_name].shape[parameter.dim])
        extent = whole_extent * part.replicas // shards
        if (fused or shards > 1) and extent % block:
            name = part.logical_name.replace(LAYER_FIELD, "*").replace(EXPERT_FIELD, "*")
            yield f"{extent} {axis} of {name}"
