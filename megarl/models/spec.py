"""The shape of a model, from its HF config.json: sizes and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from megarl.models.attention import Attention
from megarl.models.block import LM as LM
from megarl.models.block import SCALAR, LinearAttention, Sizes, TokenMixer
from megarl.models.experts import Experts
from megarl.models.norms import Norms
from megarl.models.parameters import Layers

SILU = "silu"
GELU_TANH = "gelu_tanh"
# gate * sigmoid(1.702 gate) * (up + 1), gate and up within `activation_limit` (gpt-oss)
CLAMPED_SWIGLU = "clamped_swiglu"


@dataclass(frozen=True)
class ModelSpec(Sizes):
    """The shape of a model, composed of blocks. A block's class says what its settings mean."""

    attention: Attention = Attention()
    linear_attention: LinearAttention | None = None  # in its layers, instead of attention
    experts: Experts | None = None  # in their layers, instead of the dense MLP
    norms: Norms = Norms()

    activation: str = SILU  # of the gate: SILU | GELU_TANH | CLAMPED_SWIGLU
    activation_limit: float = 0.0
    embedding_scale: float = 1.0
    # checkpoints have a vision tower; only the language model is trained and served
    vision_tower: bool = False

    mtp_layers: int = 0  # loaded layers for multi-token prediction (models/multi_token.py)
    mtp_drafts: bool = False  # whether engines also have these layers, and draft with them

    # The token whose embedding gets no gradient from lookups (nn.Embedding's padding_idx). No shape
    # depends on it.
    padding_token: int | None = field(default=None, compare=False)

    def problems(self) -> Iterator[str]:
        """Sizes and blocks that do not fit each other."""
        attention = self.attention
        if self.num_attention_heads % self.num_kv_heads:
            yield (
                f"{self.num_attention_heads} attention heads are not a multiple of "
                f"{self.num_kv_heads} key-value heads"
            )
        rotated = attention.rotated_dims(self)
        if rotated % 2 or not rotated:
            yield f"{rotated} dims of each head are rotated; it must be an even number above 0"
        if not (self.norms.before or self.norms.after):
            yield "norms must be before or after attention and MLP"
        if attention.qk_norm_of_all_heads and not attention.qk_norm:
            yield "qk_norm_of_all_heads needs qk_norm"
        if bool(attention.windowed_layers) > bool(attention.window):
            yield "windowed_layers need a window"
        has_biases = self.experts is not None and self.experts.BIASES
        if attention.output_bias != has_biases or (has_biases and self.dense_layers):
            yield (
                "Megatron has a bias in all linear layers or, but for q, k and v, in none: "
                "output_bias needs experts with biases in every layer, and these need it"
            )
        if self.experts and self.dense_layers >= self.num_layers:
            yield (
                f"the first {self.dense_layers} layers are dense, so none of {self.num_layers} "
                "has experts"
            )
        numbered = {*attention.windowed_layers, *self.linear_layers}
        if not numbered <= {*range(self.num_layers)}:
            yield f"a block is for layers that are not among the {self.num_layers}"

    def with_scalar_head(self) -> ModelSpec:
        """The same decoder with a scalar head, which shares no weights with the embedding."""
        return replace(self, head=SCALAR, tie_word_embeddings=False, mtp_layers=0, mtp_drafts=False)

    def cut(self, layers: int) -> ModelSpec:
        """The same decoder with only its first `layers` layers."""
        linear = self.linear_attention
        return replace(
            self,
            num_layers=layers,
            attention=self.attention.cut(layers),
            linear_attention=linear.cut(layers) if linear else None,
        )

    def last_layer(self) -> ModelSpec:
        """The same decoder with a single layer, which has attention, and experts if any has."""
        experts = replace(self.experts, first_layer=0) if self.experts else None
        return replace(self.cut(0), num_layers=1, experts=experts, mtp_layers=0, mtp_drafts=False)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers without attention."""
        return self.linear_attention.layers if self.linear_attention else ()

    @property
    def attention_layers(self) -> int:
        """The number of layers that keep keys and values."""
        return self.num_layers - len(self.linear_layers)

    @property
    def dense_layers(self) -> int:
        """The number of first layers that have a dense MLP."""
        if self.experts:
            return min(self.experts.first_layer, self.num_layers)
        return self.num_layers

    @property
    def period(self) -> int:
        """The number of layers after which the kinds of layers repeat, apart from leading dense
        layers.
        """
        return next(
            (layer + 1 for layer in range(self.num_layers) if layer not in self.linear_layers), 1
        )

    @property
    def mixers(self) -> list[tuple[TokenMixer, Layers]]:
        """The attention and linear attention that the model has, each with its layers."""
        linear = self.linear_layers
        attention = tuple(sorted(set(range(self.num_layers)) - set(linear)))
        blocks = ((self.attention, attention), (self.linear_attention, linear))
        return [(block, layers) for block, layers in blocks if block and layers]


def differing(spec: Any, other: Any, *, compared: bool, prefix: str = "") -> Iterator[str]:
    """The fields that differ between two specs: name, value of `spec`, value of `other`.

    `compared`: leave out fields that == leaves out.
    """
    for setting in fields(spec):
        name = setting.name
        value = getattr(spec, name)
        other_value = getattr(other, name)
        if compared and not setting.compare:
            continue
        if is_dataclass(value) and type(value) is type(other_value):
            yield from differing(value, other_value, compared=compared, prefix=f"{name}.")
        elif value != other_value:
            yield f"{prefix}{name} {value!r}, not {other_value!r}"
