"""Grouped-query attention (Llama, Qwen, Mixtral), with optional biases, query and key norms, sinks,
windows and gates.

In gated attention, `q_proj` has for each head the rows of its queries, then the rows of its gate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.block import Sizes, TokenMixer
from megarl.models.parameters import (
    LAYER,
    LogicalTensor,
    Parameter,
    ParameterRun,
    Part,
    round_up,
    whole,
)

_L = "model.layers.{layer}."
_QKV = tuple(_L + f"self_attn.{x}_proj." for x in "qkv")
O = _L + "self_attn.o_proj.weight"
O_BIAS = _L + "self_attn.o_proj.bias"
SINKS = _L + "self_attn.sinks"
QK_NORMS = (_L + "self_attn.q_norm.weight", _L + "self_attn.k_norm.weight")
SGLANG_QKV = _L + "self_attn.qkv_proj."


@dataclass(frozen=True)
class Attention(TokenMixer):
    """The default of a setting means that the model does not have the feature."""

    NAME: ClassVar = "attention"
    QUANTISED: ClassVar = (SGLANG_QKV + "weight", O)
    INPUT_NORM: ClassVar = {
        "local": "input_layernorm.weight",
        "te": "self_attention.linear_qkv.layer_norm_weight",
    }
    # whether Megatron's module makes its rotary embedding itself, from the configuration
    OWN_ROPE: ClassVar = False
    ROPE_TYPES: ClassVar = ("default", "linear", "llama3")

    qkv_bias: bool = False
    output_bias: bool = False  # gpt-oss, whose router and experts then also have biases
    sinks: bool = False  # a logit per head in the softmax, without a value
    qk_norm: bool = False  # RMSNorm of queries and keys
    qk_norm_of_all_heads: bool = False  # one norm over all heads together, not one per head
    gated: bool = False  # outputs are multiplied by a sigmoid
    scale: float | None = None  # factor of queries times keys; None: 1 / sqrt(head_dim)
    window: int = 0  # tokens that a token attends to in windowed layers, itself included
    windowed_layers: tuple[int, ...] = ()
    # of windowed layers, whose rotary embeddings are then never scaled; 0.0: as in other layers
    windowed_rope_theta: float = 0.0
    # SGLang's ratio of the tokens in its second pool of keys and values, for layers with windows,
    # to those in the first (swa_full_tokens_ratio); 0.0: all layers keep all tokens
    window_pool: float = 0.0

    def cut(self, layers: int) -> Self:
        """The block of a decoder with only the first `layers` layers."""
        windowed = tuple(layer for layer in self.windowed_layers if layer < layers)
        return replace(self, windowed_layers=windowed)

    def logical(self, sizes: Sizes) -> list[LogicalTensor]:
        hidden = sizes.hidden_size
        q_rows = sizes.num_attention_heads * sizes.head_dim
        kv_rows = sizes.num_kv_heads * sizes.head_dim
        tensors = []
        for name, rows in zip(_QKV, (q_rows * self._rows_per_query, kv_rows, kv_rows)):
            tensors.append(LogicalTensor(name + "weight", (rows, hidden), LAYER))
            if self.qkv_bias:
                tensors.append(LogicalTensor(name + "bias", (rows,), LAYER))
        if self.qk_norm:
            widths = (sizes.head_dim, sizes.head_dim)
            if self.qk_norm_of_all_heads:
                widths = (q_rows, kv_rows)
            tensors += [LogicalTensor(name, (rows,), LAYER) for name, rows in zip(QK_NORMS, widths)]
        tensors.append(LogicalTensor(O, (hidden, q_rows), LAYER))
        if self.output_bias:
            tensors.append(LogicalTensor(O_BIAS, (hidden,), LAYER))
        if self.sinks:
            tensors.append(LogicalTensor(SINKS, (sizes.num_attention_heads,), LAYER))
        return tensors

    def megatron(self, sizes: Sizes, topology: TrainerTopology, layer_spec: str) -> list[Parameter]:
        tp = topology.tp
        kv = sizes.num_kv_heads
        units = (
            ("attention heads", sizes.num_attention_heads),
            ("key-value heads", tp if tp % kv == 0 else kv),
        )
        if tp > kv:  # ranks then cut between rows of any kind
            units += (("rows of queries, keys and values", self._projected_rows(sizes)),)
        prefix = "decoder.layers.{layer}.self_attention."
        parameters = []
        for suffix in self._suffixes:
            q, k, v = (Part(name + suffix) for name in _QKV)
            queries = [q]
            if self.gated:  # the queries of all heads, then their gates
                dim = sizes.head_dim
                runs = (ParameterRun(start, dim, 2 * dim) for start in (0, dim))
                queries = [replace(q, run=run) for run in runs]
            parts = (*queries, k, v)
            parameters.append(
                Parameter(
                    f"{prefix}linear_qkv.{suffix}", LAYER, parts, dim=0, groups=kv, units=units
                )
            )
        if self.qk_norm:
            for x, name in zip("qk", QK_NORMS):
                parameters.append(whole(f"{prefix}{x}_layernorm.weight", LAYER, name))
        if self.output_bias:
            parameters.append(whole(prefix + "linear_proj.bias", LAYER, O_BIAS))
        if self.sinks:
            offset = prefix + "core_attention.softmax_offset"
            parameters.append(Parameter(offset, LAYER, (Part(SINKS),), dim=0, groups=tp))
        parameters.append(
            Parameter(prefix + "linear_proj.weight", LAYER, (Part(O),), dim=1, groups=tp)
        )
        return parameters

    def sglang(self, sizes: Sizes, topology: GeneratorTopology, device: str) -> list[Parameter]:
        """SGLang's attention parameters.

        If tp does not divide the heads, CPU engines pad with zeros. GPU engines only replicate kv
        heads.
        """
        tp = topology.attention_tp
        heads = sizes.num_attention_heads
        kv = sizes.num_kv_heads
        replicas = 1
        if device == "cpu":
            if heads % tp or kv % tp:
                heads = round_up(kv, tp) * (heads // kv)
                kv = round_up(kv, tp)
        else:
            replicas = max(1, tp // kv)
        multiple = "key-value heads (or be a multiple of these)", tp if tp % kv == 0 else kv
        units = (("attention heads", heads), multiple)
        q_rows = heads * sizes.head_dim
        kv_rows = kv * sizes.head_dim
        cut = {"groups": tp, "of_attention": True}
        parameters = []
        for suffix in self._suffixes:
            q, k, v = (name + suffix for name in _QKV)
            parts = (
                Part(q, q_rows * self._rows_per_query),
                Part(k, kv_rows, replicas),
                Part(v, kv_rows, replicas),
            )
            parameters.append(
                Parameter(SGLANG_QKV + suffix, LAYER, parts, dim=0, units=units, **cut)
            )
        parameters.append(Parameter(O, LAYER, (Part(O, q_rows),), dim=1, **cut))
        if self.output_bias:
            parameters.append(whole(O_BIAS, LAYER, O_BIAS))
        if self.sinks:
            parameters.append(Parameter(SINKS, LAYER, (Part(SINKS, heads),), dim=0, **cut))
        if self.qk_norm:
            parameters += [whole(name, LAYER, name) for name in QK_NORMS]
        return parameters

    @property
    def _suffixes(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.qkv_bias else ("weight",)

    @property
    def _rows_per_query(self) -> int:
        """The number of rows in `q_proj` for each dim of a query."""
        return 2 if self.gated else 1

    def problems(
        self, sizes: Sizes, trainer: TrainerTopology, generator: GeneratorTopology
    ) -> Iterable[str]:
        if generator.tp > sizes.num_kv_heads and self.qk_norm_of_all_heads:
            yield (
                f"generator.tp={generator.tp}: must be at most the model's {sizes.num_kv_heads} "
                "key-value heads: SGLang shards the norm of all keys, but repeats the heads"
            )

    def megatron_settings(self, sizes: Sizes) -> dict[str, Any]:
        settings: dict[str, Any] = dict(
            softmax_type="learnable" if self.sinks else "vanilla",
            add_bias_linear=self.output_bias,
            add_qkv_bias=self.qkv_bias,
            qk_layernorm=self.qk_norm,
            softmax_scale=self.scale,
            attention_output_gate=self.gated,
        )
        if self.windowed_layers:
            settings["window_size"] = (self.window - 1, 0)  # number of tokens before and after
            settings["window_attn_skip_freq"] = [
                int(layer in self.windowed_layers) for layer in range(sizes.num_layers)
            ]
        return settings

    def value_dim(self, sizes: Sizes) -> int:
        return sizes.head_dim

    def rotated_dims(self, sizes: Sizes) -> int:
        return int(sizes.head_dim * sizes.partial_rotary_factor)

    def flops(self, sizes: Sizes, layers: int, length: float) -> float:
        """For scores and weighted values."""
        dims = sizes.head_dim + self.value_dim(sizes)
        return layers * (2 * sizes.num_attention_heads * dims * self.attended(layers, length))

    def attended(self, layers: int, length: float) -> float:
        """The number of tokens that a token of a sequence attends to, a mean over `layers` layers
        with attention: half of the tokens, because of the causal mask, or the tokens in its window.
        """
        window = min(self.window, length)
        inside = window - window**2 / (2 * length) if length else 0.0
        share = len(self.windowed_layers) / layers
        return share * inside + (1 - share) * length / 2

    def activation_elements(self, sizes: Sizes, tp: int) -> float:
        """Rotated queries, keys, values and the output; if heads are normalised, also the inputs of
        the norms. What ranks gather is kept whole, as values are a view of it.
        """
        q = sizes.num_attention_heads * sizes.head_dim
        kv = max(sizes.num_kv_heads, tp) * sizes.head_dim  # each rank has at least one head
        gate = 2 * q if self.gated else 0  # and the values that it multiplies
        norm_inputs = q + kv if self.qk_norm else 0
        return (2 * q + 2 * kv + norm_inputs + gate) / tp + self.gathered_elements(sizes, tp)

    def gathered_elements(self, sizes: Sizes, tp: int) -> int:
        """The projections of all heads, if there are more ranks than key-value heads: a rank then
        holds a part of a group's rows (Megatron's get_query_key_value_tensors, attention.py).
        """
        if tp <= sizes.num_kv_heads:
            return 0
        return self._projected_rows(sizes)

    def _projected_rows(self, sizes: Sizes) -> int:
        queries = self._rows_per_query * sizes.num_attention_heads
        return (queries + 2 * sizes.num_kv_heads) * sizes.head_dim

    def unfused_elements(self, sizes: Sizes, tp: int) -> float:
        """What a trainer that does not fuse rotary embeddings keeps beside these: queries and keys
        before the rotation; keys and values for each head; cosines and sines.
        """
        heads = 2 * sizes.num_attention_heads + sizes.num_kv_heads
        return heads * sizes.head_dim / tp + 4 * sizes.head_dim

    def cached_elements(self, sizes: Sizes, tp: float) -> float:
        """Elements of an engine's cache per token and layer on one of the `tp` ranks of an
        attention replica. If there are more ranks than key-value heads, heads are copied.
        """
        return 2 * max(1.0, sizes.num_kv_heads / tp) * sizes.head_dim

    def tokens_read(self, layers: int, context: float) -> float:
        """Tokens of the cache, summed over `layers` layers, that are read for the next token of a
        request with `context` tokens.
        """
        windowed = len(self.windowed_layers)
        return (layers - windowed) * context + windowed * min(context, self.window)


def fused() -> Parameter:
    """The weights of q, k and v as one tensor, for checkpoints that have them so.

    SGLang's parameter has the same name.
    """
    return whole(SGLANG_QKV + "weight", LAYER, *(name + "weight" for name in _QKV))
