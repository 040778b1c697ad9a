"""The classes with which a family declares where an engine keeps the model's tensors.

("Engine" here means trainer or SGLang.)

A *logical tensor* is a full, unsharded tensor of the HF checkpoint, or a run of its rows (a
family's `fused_tensors`). A *parameter* of an engine is one or several logical tensors, fused along
one dim and cut over the tensor-parallel shards. All fused layouts follow one pattern: `groups`
times, a slice of each part in turn. Shard s has the s-th contiguous chunk of that sequence.

    Megatron linear_qkv    groups = kv heads   [q..q, k, v] per query group
    SGLang qkv_proj        groups = tp         [Q_r; K_r; V_r] per rank
    gate_up, linear_fc1    groups = tp         [gate_r; up_r] per rank
    plain row/column cut   groups = tp         one part

A logical name with `{expert}` stands for one tensor per expert. Its parameter is declared as for a
single expert. Each expert-parallel shard has a contiguous run of experts. If the parameter's own
name has `{expert}`, the engine also has one tensor per expert; otherwise it stacks its experts
along a leading dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FIRST = "first"
LAYER = "layer"
LAST = "last"
DENSE = "dense"
EXPERT = "expert"
ATTENTION = "attention"  # the meshes that parameters are cut over
LAYER_FIELD = "{layer}"  # stands for the global layer number, in names with place LAYER
EXPERT_FIELD = "{expert}"  # stands for the global expert number

Layers = tuple[int, ...]  # the numbers of layers, ascending


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of the HF checkpoint, or rows of one.

    `{layer}` in the name stands for one per layer, `{expert}` for one per expert.
    """

    name: str
    shape: tuple[int, ...]  # shape of the tensor for one layer and one expert
    place: str  # FIRST | LAYER | LAST: the pipeline stages that need it
    layers: Layers | None = None  # which layers have it; None: all
    experts: int = 0  # number of experts with such a tensor; 0: not an expert's tensor
    dtype: str | None = None  # None: the checkpoint's dtype


@dataclass(frozen=True)
class ParameterRun:
    """`count` rows or columns from `start` on, in every `period` of a tensor.

    Checkpoints interleave the projections of heads like this.
    """

    start: int
    count: int
    period: int

    def extent(self, tensor_extent: int) -> int:
        """The number of these rows or columns in a tensor that has `whole`."""
        return tensor_extent // self.period * self.count

    def places(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """For `count` elements of the runs from `first` on: (first, count) in the tensor of each
        contiguous piece.
        """
        while count > 0:
            period, within = divmod(first, self.count)
            size = min(count, self.count - within)
            yield period * self.period + self.start + within, size
            first = first + size
            count = count - size


@dataclass(frozen=True)
class Part:
    """One logical tensor's part of a parameter: per group, a slice of `padded * replicas / groups`
    along the cut dim.

    Group g takes slice g // replicas, so `replicas` consecutive groups have the same elements (kv
    heads under a larger TP). `padded`: the tensor's extent along the cut dim, including zeros that
    the engine appends; None: no padding. `run`: the part consists of these runs of the tensor, one
    after the other along the cut dim; None: the whole tensor.
    """

    logical_name: str
    padded: int | None = None
    replicas: int = 1
    run: ParameterRun | None = None


@dataclass(frozen=True)
class Parameter:
    """A parameter of an engine, on all shards.

    `dim` None: every shard has the whole parts, one below the other.
    """

    name: str
    place: str  # FIRST | LAYER | LAST
    parts: tuple[Part, ...]
    dim: int | None = None
    groups: int = 1
    layers: Layers | None = None  # which layers have it; None: all
    dtype: str | None = None  # None: the layout's dtype
    transposed: bool = False  # in files of a checkpoint: rows and columns are exchanged
    # with data-parallel attention, sharded only over the ranks of one replica
    of_attention: bool = False
    # (name for messages, number that the number of shards must divide)
    units: tuple[tuple[str, int], ...] = ()

    @property
    def of_expert(self) -> bool:
        return EXPERT_FIELD in self.parts[0].logical_name

    @property
    def mesh(self) -> str:
        if self.of_expert:
            return EXPERT
        if self.of_attention:
            return ATTENTION
        return DENSE


def whole(
    name: str,
    place: str,
    *logical_names: str,
    layers: Layers | None = None,
    dtype: str | None = None,
) -> Parameter:
    """A parameter that every shard has in full."""
    return Parameter(
        name,
        place,
        tuple(Part(logical_name) for logical_name in logical_names),
        layers=layers,
        dtype=dtype,
    )


def layers_text(layers: Layers) -> str:
    """For example "layers 0 to 59", or "45 layers from 0 to 58" if others are between them."""
    first = layers[0]
    last = layers[-1]
    if len(layers) == last - first + 1:
        return f"layers {first} to {last}"
    return f"{len(layers)} layers from {first} to {last}"


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the trainer's embedding and output layer: `vocab_size` rounded up to a multiple of
    128 * `tp`.

    128 is the default of Megatron's `--make-vocab-size-divisible-by`; megatron-core itself leaves
    the padding to its caller.
    """
    return round_up(vocab_size, 128 * tp)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
