"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464) instead of attention (Qwen3-Next,
Qwen3.5).

Checkpoints of Qwen3-Next group projections by key head: a head's query, its key, and the values and
output gates of its value heads. A second tensor has the writing strengths (beta) and decays (alpha)
of these heads. Checkpoints of Qwen3.5 (`by_kind`) have the queries, keys and values of all heads in
one tensor, and each other kind in its own. In both cases engines have two tensors, in the
checkpoint's order. Megatron has all kinds in one tensor, one kind after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.block import LinearAttention, Sizes
from megarl.models.parameters import LAYER, LogicalTensor, Parameter, ParameterRun, Part, whole

_L = "model.layers.{layer}.linear_attn."
QKVZ = _L + "in_proj_qkvz.weight"
BA = _L + "in_proj_ba.weight"
OUT = _L + "out_proj.weight"
CONVOLUTION = _L + "conv1d.weight"
DECAY = _L + "A_log"
DECAY_BIAS = _L + "dt_bias"
NORM = _L + "norm.weight"
QKV, Z, B, A = (f"{_L}in_proj_{kind}.weight" for kind in ("qkv", "z", "b", "a"))


@dataclass(frozen=True)
class GatedDeltaNet(LinearAttention):
    NAME: ClassVar = "gated delta nets"
    QUANTISED: ClassVar = (QKVZ, OUT)
    INPUT_NORM: ClassVar = {
        "local": "input_layernorm.weight",
        "te": "self_attention.in_proj.layer_norm_weight",
    }
    ONLY_FP8_BLOCKS: ClassVar = True  # no other format can leave the small projection in bf16

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # dim of a key of one head
    value_dim: int
    conv_width: int  # tokens that the convolution before it covers, including the newest
    by_kind: bool = False  # checkpoints have projections kind by kind; otherwise by key head

    @property
    def keys(self) -> int:
        """The number of rows of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    def logical(self, sizes: Sizes) -> list[LogicalTensor]:
        hidden = sizes.hidden_size
        shapes = {
            **{name: (rows, hidden) for name, rows in self._projected_rows().items()},
            CONVOLUTION: (2 * self.keys + self.values, 1, self.conv_width),
            DECAY: (self.value_heads,),
            DECAY_BIAS: (self.value_heads,),
            NORM: (self.value_dim,),
            OUT: (hidden, self.values),
        }
        return [LogicalTensor(name, shape, LAYER) for name, shape in shapes.items()]

    def _projected_rows(self) -> dict[str, int]:
        """Rows of the tensors that hidden states are multiplied by."""
        if self.by_kind:
            heads = self.value_heads
            return {QKV: 2 * self.keys + self.values, Z: self.values, B: heads, A: heads}
        return {QKVZ: 2 * self.keys + 2 * self.values, BA: 2 * self.value_heads}

    def megatron(self, sizes: Sizes, topology: TrainerTopology, layer_spec: str) -> list[Parameter]:
        tp = topology.tp
        prefix = "decoder.layers.{layer}.self_attention."
        return [
            Parameter(
                prefix + "in_proj.weight",
                LAYER,
                self._projections(),
                dim=0,
                groups=tp,
                units=self._units(),
            ),
            Parameter(prefix + "conv1d.weight", LAYER, self._qkv(CONVOLUTION), dim=0, groups=tp),
            Parameter(prefix + "A_log", LAYER, (Part(DECAY),), dim=0, groups=tp),
            Parameter(prefix + "dt_bias", LAYER, (Part(DECAY_BIAS),), dim=0, groups=tp),
            whole(prefix + "out_norm.weight", LAYER, NORM),
            Parameter(prefix + "out_proj.weight", LAYER, (Part(OUT),), dim=1, groups=tp),
        ]

    def sglang(self, sizes: Sizes, topology: GeneratorTopology, device: str) -> list[Parameter]:
        """SGLang's parameters. It keeps the decays in float32."""
        cut = {"groups": topology.attention_tp, "of_attention": True}
        qkvz = (Part(QKVZ),)
        ba = (Part(BA),)
        if self.by_kind:
            projections = self._projections()
            qkvz = projections[:-2]
            ba = projections[-2:]
        return [
            Parameter(QKVZ, LAYER, qkvz, dim=0, units=self._units(), **cut),
            Parameter(BA, LAYER, ba, dim=0, **cut),
            Parameter(CONVOLUTION, LAYER, self._qkv(CONVOLUTION), dim=0, **cut),
            Parameter(DECAY, LAYER, (Part(DECAY),), dim=0, dtype="float32", **cut),
            Parameter(DECAY_BIAS, LAYER, (Part(DECAY_BIAS),), dim=0, **cut),
            whole(NORM, LAYER, NORM),
            Parameter(OUT, LAYER, (Part(OUT),), dim=1, **cut),
        ]

    def _projections(self) -> tuple[Part, ...]:
        """Queries, keys, values, output gates, betas and alphas of all heads."""
        if self.by_kind:
            return *self._qkv(QKV), Part(Z), Part(B), Part(A)
        heads_per_key = self.value_heads // self.key_heads
        key = self.key_dim
        value = heads_per_key * self.value_dim
        starts = (0, key, 2 * key, 2 * key + value)
        period = 2 * key + 2 * value
        parts = []
        for start, count in zip(starts, (key, key, value, value)):
            parts.append(Part(QKVZ, run=ParameterRun(start, count, period)))
        return *parts, *(
            Part(BA, run=ParameterRun(start, heads_per_key, 2 * heads_per_key))
            for start in (0, heads_per_key)
        )

    def _qkv(self, name: str) -> tuple[Part, ...]:
        """The parts of a tensor with the queries, keys and values of all heads, one kind below the
        other.
        """
        keys = self.keys
        return tuple(
            Part(name, run=ParameterRun(start, count, 2 * keys + self.values))
            for start, count in ((0, keys), (keys, keys), (2 * keys, self.values))
        )

    def _units(self) -> tuple[tuple[str, int], ...]:
        return (("key heads of gated delta nets", self.key_heads),)

    def problems(
        self, sizes: Sizes, trainer: TrainerTopology, generator: GeneratorTopology
    ) -> Iterable[str]:
        if self.key_heads % (trainer.tp * trainer.cp):
            yield (
                f"trainer.tp={trainer.tp} * trainer.cp={trainer.cp}: must divide the model's "
                f"{self.key_heads} key heads of gated delta nets, which context parallelism "
                "shares out too"
            )

    def megatron_settings(self, sizes: Sizes) -> dict[str, Any]:
        return dict(
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq=[int(layer in self.layers) for layer in range(sizes.num_layers)],
            linear_conv_kernel_dim=self.conv_width,
            linear_key_head_dim=self.key_dim,
            linear_value_head_dim=self.value_dim,
            linear_num_key_heads=self.key_heads,
            linear_num_value_heads=self.value_heads,
        )

    def flops(self, sizes: Sizes, layers: int, length: float) -> float:
        """States are read twice, and written once."""
        return layers * (2 * 3 * self.value_heads * self.key_dim * self.value_dim)

    def activation_elements(self, sizes: Sizes, tp: int) -> float:
        """The projections, the convolution's output, queries and keys for every value head, and the
        layer's output before and after its norm.
        """
        projections = 2 * self.keys + 2 * self.values
        convolved = 2 * self.keys + self.values
        of_value_heads = 2 * self.value_heads * self.key_dim
        return (projections + convolved + of_value_heads + 2 * self.values) / tp

    def state_bytes(self, item: int) -> float:
        """The state in float32, and the newest inputs of the convolution."""
        inputs = item * (2 * self.keys + self.values) * (self.conv_width - 1)
        return 4 * self.key_dim * self.values + inputs
