"""The shape of a model, from its HF config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

LM = "lm"
SCALAR = "scalar"
SILU = "silu"
GELU_TANH = "gelu_tanh"
# gate * sigmoid(1.702 gate) * (up + 1), gate and up within `activation_limit` (gpt-oss)
CLAMPED_SWIGLU = "clamped_swiglu"


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a model.

    From `qkv_bias` on, the default of a field means that the family does not have the feature.
    """

    # the module with its tensors: "llama" in megarl.models, the full name for a user's own module
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of dense layers; 0 if every layer has experts
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None
    # what the last layer maps hidden states to: LM, the vocabulary; SCALAR, one number (reward
    # models, critics)
    head: str = LM

    qkv_bias: bool = False
    linear_bias: bool = False  # of the output projection, the router and the experts
    sinks: bool = False  # a logit per head in the softmax of attention, without a value
    qk_norm: bool = False  # RMSNorm of queries and keys
    qk_norm_of_all_heads: bool = False  # one norm over all heads together, not one per head
    norms_before: bool = True  # norms of the inputs of attention and MLP
    norms_after: bool = False  # norms of their outputs
    zero_centred_norms: bool = False  # all norms multiply by 1 + their weight
    activation: str = SILU  # of the gate: SILU | GELU_TANH | CLAMPED_SWIGLU
    activation_limit: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # factor of queries times keys; None: 1 / sqrt(head_dim)
    window: int = 0  # tokens that a token attends to in windowed layers, itself included
    windowed_layers: tuple[int, ...] = ()
    # of windowed layers, whose rotary embeddings are then never scaled; 0.0: as in other layers
    windowed_rope_theta: float = 0.0
    # share of each head's dims that are rotated, from the first on
    partial_rotary_factor: float = 1.0
    # outputs are multiplied by a sigmoid; q_proj has its rows after those of each head
    gated_attention: bool = False

    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0  # of all shared experts together
    first_dense_layers: int = 0  # layers before the first with experts
    score_function: str = "softmax"  # of the router: "softmax" | "sigmoid"
    norm_topk_prob: bool = True  # scale the weights of the chosen experts to sum 1
    router_bias: bool = False  # a bias added to the scores only to choose experts
    num_expert_groups: int = 0  # experts are chosen within `topk_groups` of these groups
    topk_groups: int = 0
    routed_scaling_factor: float = 1.0
    shared_expert_gate: bool = False  # the shared expert's output is multiplied by a sigmoid

    # gated delta nets (Yang et al. 2024, arXiv 2412.06464) instead of attention
    linear_layers: tuple[int, ...] = ()  # the layers with a gated delta net
    linear_key_heads: int = 0
    linear_value_heads: int = 0  # a multiple of linear_key_heads
    linear_key_dim: int = 0  # dim of a key of one head
    linear_value_dim: int = 0
    linear_conv_width: int = 0  # tokens that the convolution before it covers, including the newest
    linear_by_kind: bool = False  # checkpoints have projections kind by kind; otherwise by key head

    # checkpoints have a vision tower; only the language model is trained and served
    vision_tower: bool = False

    # multi-head latent attention (DeepSeek-V2, section 2.1); head_dim is then qk_nope_head_dim +
    # qk_rope_head_dim
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    mtp_layers: int = 0  # loaded layers for multi-token prediction (models/multi_token.py)
    mtp_drafts: bool = False  # whether engines also have these layers, and draft with them

    # Whether files stack the experts of a layer in one tensor. No shape depends on it.
    stacked_experts: bool = field(default=False, compare=False)
    # The token whose embedding gets no gradient from lookups (nn.Embedding's padding_idx). No shape
    # depends on it.
    padding_token: int | None = field(default=None, compare=False)

    def with_scalar_head(self) -> ModelSpec:
        """The same decoder with a scalar head, which shares no weights with the embedding."""
        return replace(self, head=SCALAR, tie_word_embeddings=False, mtp_layers=0, mtp_drafts=False)

    def cut(self, layers: int) -> ModelSpec:
        """The same decoder with only its first `layers` layers."""
        linear = tuple([layer for layer in self.linear_layers if layer < layers])
        windowed = tuple([layer for layer in self.windowed_layers if layer < layers])
        return replace(self, num_layers=layers, linear_layers=linear, windowed_layers=windowed)

    @property
    def period(self) -> int:
        """The number of layers after which the kinds of layers repeat, apart from leading dense
        layers.
        """
        return next(
            (layer + 1 for layer in range(self.num_layers) if layer not in self.linear_layers), 1
        )

    @property
    def attention_layers(self) -> int:
        """The number of layers that keep keys and values."""
        return self.num_layers - len(self.linear_layers)

    @property
    def rope_type(self) -> str:
        """Hugging Face's name for the scaling of rotary embeddings."""
        scaling = self.rope_scaling or {}
        return scaling.get("rope_type") or scaling.get("type") or "default"
