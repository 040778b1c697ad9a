"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464) instead of attention, with the norm before
them (Qwen3-Next, Qwen3.5).

Checkpoints of Qwen3-Next group projections by key head: a head's query, its key, and the values and
output gates of its value heads. A second tensor has the writing strengths (beta) and decays (alpha)
of these heads. Checkpoints of Qwen3.5 (`linear_by_kind`) have the queries, keys and values of all
heads in one tensor, and each other kind in its own. In both cases engines have two tensors, in the
checkpoint's order. Megatron has all kinds in one tensor, one kind after the other.
"""

from __future__ import annotations

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.attention import INPUT_NORM
from megarl.models.parameters import LAYER, LogicalTensor, Parameter, ParameterRun, Part, whole
from megarl.models.spec import ModelSpec

_L = "model.layers.{layer}.linear_attn."
QKVZ = _L + "in_proj_qkvz.weight"
BA = _L + "in_proj_ba.weight"
OUT = _L + "out_proj.weight"
CONVOLUTION = _L + "conv1d.weight"
DECAY = _L + "A_log"
DECAY_BIAS = _L + "dt_bias"
NORM = _L + "norm.weight"
QKV, Z, B, A = (f"{_L}in_proj_{kind}.weight" for kind in ("qkv", "z", "b", "a"))
QUANTISED = (QKVZ, OUT)
INPUT_NORM_NAMES = {
    "local": "input_layernorm.weight",
    "te": "self_attention.in_proj.layer_norm_weight",
}


def logical(spec: ModelSpec) -> list[LogicalTensor]:
    hidden = spec.hidden_size
    heads = spec.linear_value_heads
    keys, values = _widths(spec)
    shapes = {
        INPUT_NORM: (hidden,),
        **_projected(spec),
        CONVOLUTION: (2 * keys + values, 1, spec.linear_conv_width),
        DECAY: (heads,),
        DECAY_BIAS: (heads,),
        NORM: (spec.linear_value_dim,),
        OUT: (hidden, values),
    }
    return [LogicalTensor(name, shape, LAYER) for name, shape in shapes.items()]


def _projected(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Name -> shape of the tensors that hidden states are multiplied by."""
    keys, values = _widths(spec)
    heads = spec.linear_value_heads
    rows = {QKVZ: 2 * keys + 2 * values, BA: 2 * heads}
    if spec.linear_by_kind:
        rows = {QKV: 2 * keys + values, Z: values, B: heads, A: heads}
    return {name: (count, spec.hidden_size) for name, count in rows.items()}


def megatron(spec: ModelSpec, topology: TrainerTopology, layer_spec: str) -> list[Parameter]:
    tp = topology.tp
    prefix = "decoder.layers.{layer}.self_attention."
    return [
        whole("decoder.layers.{layer}." + INPUT_NORM_NAMES[layer_spec], LAYER, INPUT_NORM),
        Parameter(
            prefix + "in_proj.weight",
            LAYER,
            _projections(spec),
            dim=0,
            groups=tp,
            units=_units(spec),
        ),
        Parameter(prefix + "conv1d.weight", LAYER, _convolved(spec), dim=0, groups=tp),
        Parameter(prefix + "A_log", LAYER, (Part(DECAY),), dim=0, groups=tp),
        Parameter(prefix + "dt_bias", LAYER, (Part(DECAY_BIAS),), dim=0, groups=tp),
        whole(prefix + "out_norm.weight", LAYER, NORM),
        Parameter(prefix + "out_proj.weight", LAYER, (Part(OUT),), dim=1, groups=tp),
    ]


def sglang(spec: ModelSpec, topology: GeneratorTopology, device: str) -> list[Parameter]:
    """SGLang's parameters. It keeps the decays in float32."""
    cut = {"groups": topology.attention_tp, "of_attention": True}
    qkvz = (Part(QKVZ),)
    ba = (Part(BA),)
    if spec.linear_by_kind:
        *qkvz, b, a = _projections(spec)
        qkvz = tuple(qkvz)
        ba = (b, a)
    return [
        Parameter(QKVZ, LAYER, qkvz, dim=0, units=_units(spec), **cut),
        Parameter(BA, LAYER, ba, dim=0, **cut),
        Parameter(CONVOLUTION, LAYER, _convolved(spec), dim=0, **cut),
        Parameter(DECAY, LAYER, (Part(DECAY),), dim=0, dtype="float32", **cut),
        Parameter(DECAY_BIAS, LAYER, (Part(DECAY_BIAS),), dim=0, **cut),
        whole(NORM, LAYER, NORM),
        Parameter(OUT, LAYER, (Part(OUT),), dim=1, **cut),
    ]


def _projections(spec: ModelSpec) -> tuple[Part, ...]:
    """Queries, keys, values, output gates, betas and alphas of all heads."""
    if spec.linear_by_kind:
        return *_of_qkv(spec, QKV), *(Part(name) for name in (Z, B, A))
    heads_per_key = spec.linear_value_heads // spec.linear_key_heads
    key = spec.linear_key_dim
    value = heads_per_key * spec.linear_value_dim
    starts = (0, key, 2 * key, 2 * key + value)
    period = 2 * key + 2 * value
    parts = []
    for start, count in zip(starts, (key, key, value, value)):
        parts.append(Part(QKVZ, run=ParameterRun(start, count, period)))
    return *parts, *(
        Part(BA, run=ParameterRun(start, heads_per_key, 2 * heads_per_key))
        for start in (0, heads_per_key)
    )


def _convolved(spec: ModelSpec) -> tuple[Part, ...]:
    """The channels of queries, keys and values."""
    return _of_qkv(spec, CONVOLUTION)


def _of_qkv(spec: ModelSpec, name: str) -> tuple[Part, ...]:
    """The parts of a tensor with the queries, keys and values of all heads, one kind below the
    other.
    """
    keys, values = _widths(spec)
    return tuple(
        Part(name, run=ParameterRun(start, count, 2 * keys + values))
        for start, count in ((0, keys), (keys, keys), (2 * keys, values))
    )


def _widths(spec: ModelSpec) -> tuple[int, int]:
    """The number of rows of all keys, and of all values."""
    return (
        spec.linear_key_heads * spec.linear_key_dim,
        spec.linear_value_heads * spec.linear_value_dim,
    )


def _units(spec: ModelSpec) -> tuple[tuple[str, int], ...]:
    return (("key heads of gated delta nets", spec.linear_key_heads),)
