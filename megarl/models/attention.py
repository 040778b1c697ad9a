"""Grouped-query attention (Llama, Qwen, Mixtral), with the norm before it if there is one.

Optional biases, query/key norms and sinks.

In gated attention, `q_proj` has for each head the rows of its queries, then the rows of its gate.

Each block file of this package has the functions `logical`, `megatron`, `sglang`, and the tuple
`QUANTISED`: the SGLang parameters that are in fp8 when the engine is quantised.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.parameters import (
    LAYER,
    LogicalTensor,
    Parameter,
    ParameterRun,
    Part,
    round_up,
    whole,
)
from megarl.models.spec import ModelSpec

_L = "model.layers.{layer}."
_QKV = tuple(_L + f"self_attn.{x}_proj." for x in "qkv")
O = _L + "self_attn.o_proj.weight"
O_BIAS = _L + "self_attn.o_proj.bias"
SINKS = _L + "self_attn.sinks"
INPUT_NORM = _L + "input_layernorm.weight"
QK_NORMS = (_L + "self_attn.q_norm.weight", _L + "self_attn.k_norm.weight")
SGLANG_QKV = _L + "self_attn.qkv_proj."
QUANTISED = (SGLANG_QKV + "weight", O)

# Where Megatron keeps the norm: in a separate module in the local layer spec; Transformer Engine
# fuses it into the linear layer.
INPUT_NORM_NAMES = {
    "local": "input_layernorm.weight",
    "te": "self_attention.linear_qkv.layer_norm_weight",
}


def logical(spec: ModelSpec) -> list[LogicalTensor]:
    hidden = spec.hidden_size
    q_rows = spec.num_attention_heads * spec.head_dim
    kv_rows = spec.num_kv_heads * spec.head_dim
    tensors = [LogicalTensor(INPUT_NORM, (hidden,), LAYER)] if spec.norms_before else []
    for name, rows in zip(_QKV, (q_rows * _per_query(spec), kv_rows, kv_rows)):
        tensors.append(LogicalTensor(name + "weight", (rows, hidden), LAYER))
        if spec.qkv_bias:
            tensors.append(LogicalTensor(name + "bias", (rows,), LAYER))
    if spec.qk_norm:
        rows = (q_rows, kv_rows) if spec.qk_norm_of_all_heads else (spec.head_dim, spec.head_dim)
        tensors += [LogicalTensor(name, (count,), LAYER) for name, count in zip(QK_NORMS, rows)]
    tensors.append(LogicalTensor(O, (hidden, q_rows), LAYER))
    if spec.linear_bias:
        tensors.append(LogicalTensor(O_BIAS, (hidden,), LAYER))
    return tensors + (
        [LogicalTensor(SINKS, (spec.num_attention_heads,), LAYER)] if spec.sinks else []
    )


def fused() -> Parameter:
    """The weights of q, k and v as one tensor, for checkpoints that have them so.

    SGLang's parameter has the same name.
    """
    return whole(SGLANG_QKV + "weight", LAYER, *(name + "weight" for name in _QKV))


def megatron(spec: ModelSpec, topology: TrainerTopology, layer_spec: str) -> list[Parameter]:
    tp = topology.tp
    kv = spec.num_kv_heads
    units = (
        ("attention heads", spec.num_attention_heads),
        ("key-value heads", tp if tp % kv == 0 else kv),
    )
    layer = "decoder.layers.{layer}."
    prefix = layer + "self_attention."
    if spec.norms_before:
        parameters = [whole(layer + INPUT_NORM_NAMES[layer_spec], LAYER, INPUT_NORM)]
    else:
        parameters = []
    for suffix in ("weight", "bias") if spec.qkv_bias else ("weight",):
        q, k, v = (Part(name + suffix) for name in _QKV)
        queries = [replace(q, run=run) for run in _apart(spec)] if spec.gated_attention else [q]
        parts = (*queries, k, v)
        parameters.append(
            Parameter(f"{prefix}linear_qkv.{suffix}", LAYER, parts, dim=0, groups=kv, units=units)
        )
    if spec.qk_norm:
        parameters += [
            whole(f"{prefix}{x}_layernorm.weight", LAYER, name) for x, name in zip("qk", QK_NORMS)
        ]
    if spec.linear_bias:
        parameters.append(whole(prefix + "linear_proj.bias", LAYER, O_BIAS))
    if spec.sinks:
        parameters.append(
            Parameter(
                prefix + "core_attention.softmax_offset", LAYER, (Part(SINKS),), dim=0, groups=tp
            )
        )
    return parameters + [
        Parameter(prefix + "linear_proj.weight", LAYER, (Part(O),), dim=1, groups=tp)
    ]


def sglang(spec: ModelSpec, topology: GeneratorTopology, device: str) -> list[Parameter]:
    """SGLang's attention parameters.

    If tp does not divide the heads, CPU engines pad with zeros. GPU engines only replicate kv
    heads.
    """
    tp = topology.attention_tp
    heads = spec.num_attention_heads
    kv = spec.num_kv_heads
    replicas = 1
    if device == "cpu":
        if heads % tp or kv % tp:
            heads = round_up(kv, tp) * (heads // kv)
            kv = round_up(kv, tp)
    else:
        replicas = max(1, tp // kv)
    multiple = "key-value heads (or be a multiple of these)", tp if tp % kv == 0 else kv
    q_rows = heads * spec.head_dim
    kv_rows = kv * spec.head_dim
    units = (("attention heads", heads), multiple)
    parameters = []
    for suffix in ("weight", "bias") if spec.qkv_bias else ("weight",):
        q, k, v = (name + suffix for name in _QKV)
        parts = (
            Part(q, q_rows * _per_query(spec)),
            Part(k, kv_rows, replicas),
            Part(v, kv_rows, replicas),
        )
        parameters.append(
            Parameter(
                SGLANG_QKV + suffix, LAYER, parts, dim=0, groups=tp, of_attention=True, units=units
            )
        )
    parameters.append(Parameter(O, LAYER, (Part(O, q_rows),), dim=1, groups=tp, of_attention=True))
    if spec.linear_bias:
        parameters.append(whole(O_BIAS, LAYER, O_BIAS))
    if spec.sinks:
        parameters.append(
            Parameter(SINKS, LAYER, (Part(SINKS, heads),), dim=0, groups=tp, of_attention=True)
        )
    if spec.qk_norm:
        parameters += [whole(name, LAYER, name) for name in QK_NORMS]
    return parameters


def sglang_norm() -> Parameter:
    return whole(INPUT_NORM, LAYER, INPUT_NORM)


def _per_query(spec: ModelSpec) -> int:
    """The number of rows in `q_proj` for each dim of a query: 2 if attention is gated."""
    if spec.gated_attention:
        return 2
    return 1


def _apart(spec: ModelSpec) -> tuple[ParameterRun, ParameterRun]:
    """The queries of all heads, and their gates."""
    return ParameterRun(0, spec.head_dim, 2 * spec.head_dim), ParameterRun(
        spec.head_dim, spec.head_dim, 2 * spec.head_dim
    )
