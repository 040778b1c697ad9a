"""The norms before and after attention and MLP.

The trainer applies norms after them (OLMo 2, Gemma 3) where outputs are added to the residual
stream. SGLang's parameters have the names of checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.models.block import Sizes, TokenMixer
from megarl.models.parameters import LAYER, Layers, LogicalTensor, Parameter, whole

_L = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
INPUT = _L + "input_layernorm.weight"
# before the MLP; if there are norms after, then after attention
POST_ATTENTION = _L + "post_attention_layernorm.weight"
BEFORE_MLP = _L + "pre_feedforward_layernorm.weight"
OF_MLP = _L + "post_feedforward_layernorm.weight"
MLP_NORM_NAMES = {"local": "pre_mlp_layernorm.weight", "te": "mlp.linear_fc1.layer_norm_weight"}


@dataclass(frozen=True)
class Norms:
    """Which RMSNorms a layer has."""

    before: bool = True  # norms of the inputs of attention and MLP
    after: bool = False  # norms of their outputs
    zero_centred: bool = False  # all norms multiply by 1 + their weight

    def input_logical(self, sizes: Sizes) -> list[LogicalTensor]:
        """The norm before attention."""
        if self.before:
            return [LogicalTensor(INPUT, (sizes.hidden_size,), LAYER)]
        return []

    def input_megatron(self, mixer: TokenMixer, layer_spec: str) -> list[Parameter]:
        if self.before:
            return [whole(_MEGATRON + mixer.INPUT_NORM[layer_spec], LAYER, INPUT)]
        return []

    def mlp_logical(self, sizes: Sizes, layers: Layers | None) -> list[LogicalTensor]:
        """All others."""
        hidden = (sizes.hidden_size,)
        return [LogicalTensor(name, hidden, LAYER, layers) for name in self._mlp_names]

    def mlp_megatron(self, layer_spec: str, layers: Layers | None) -> list[Parameter]:
        """Before experts, both layer specs have the norm as a separate module: pass layer_spec
        "local".
        """
        before_mlp = MLP_NORM_NAMES[layer_spec]
        places = {
            POST_ATTENTION: "self_attn_bda.norm.weight" if self.after else before_mlp,
            BEFORE_MLP: before_mlp,
            OF_MLP: "mlp_bda.norm.weight",
        }
        return [
            whole(_MEGATRON + places[name], LAYER, name, layers=layers) for name in self._mlp_names
        ]

    @property
    def _mlp_names(self) -> tuple[str, ...]:
        if not self.after:
            return (POST_ATTENTION,)
        if self.before:
            return (POST_ATTENTION, BEFORE_MLP, OF_MLP)
        return (POST_ATTENTION, OF_MLP)
