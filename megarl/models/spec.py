"""The shape of a model, as stated by its HF config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

LM, SCALAR = "lm", "scalar"
SILU, GELU_TANH = "silu", "gelu_tanh"
CLAMPED_SWIGLU = "clamped_swiglu"  # gate * sigmoid(1.702 gate) * (up + 1), gate and up within `activation_limit` (gpt-oss)


@dataclass(frozen=True)
class ModelSpec:
    """Fields from `qkv_bias` on have the value that says that a family does not have the feature."""

    family: str  # the module that knows its tensors: "llama" for one of megarl.models, the full name for a user's own
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of dense layers; 0 if every layer is a mixture of experts
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None
    head: str = LM  # what the last layer maps hidden states to: LM, the vocabulary; SCALAR, one number (reward models, critics)

    qkv_bias: bool = False
    linear_bias: bool = False  # of the output projection, the router and the experts
    sinks: bool = False  # a logit per head in the softmax of its attention, which no value belongs to
    qk_norm: bool = False  # RMSNorm of queries and keys
    qk_norm_of_all_heads: bool = False  # over all heads together, not over each
    norms_before: bool = True  # of what goes into attention and MLP
    norms_after: bool = False  # of what comes out of them
    zero_centred_norms: bool = False  # all norms multiply by 1 + their weight
    activation: str = SILU  # of the gate: SILU | GELU_TANH | CLAMPED_SWIGLU
    activation_limit: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of queries times keys; None: 1 / sqrt(head_dim)
    window: int = 0  # tokens that a token attends to in windowed layers, itself included
    windowed_layers: tuple[int, ...] = ()
    windowed_rope_theta: float = 0.0  # of windowed layers, whose rotary embeddings are then never scaled; 0.0: that of all layers
    partial_rotary_factor: float = 1.0  # the share of each head that is rotated, its first dims
    gated_attention: bool = False  # what attention makes is multiplied by a sigmoid; q_proj has its rows behind each head's

    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0  # of all shared experts together
    first_dense_layers: int = 0  # layers before the first with experts
    score_function: str = "softmax"  # of the router: "softmax" | "sigmoid"
    norm_topk_prob: bool = True  # scale the weights of the chosen experts to sum 1
    router_bias: bool = False  # a bias added to the scores only to choose experts
    num_expert_groups: int = 0  # number of groups; experts are chosen within `topk_groups` of them
    topk_groups: int = 0
    routed_scaling_factor: float = 1.0
    shared_expert_gate: bool = False  # what the shared expert makes is multiplied by a sigmoid

    # gated delta nets (Yang et al. 2024, arXiv 2412.06464) in the place of attention
    linear_layers: tuple[int, ...] = ()  # the layers that have one
    linear_key_heads: int = 0
    linear_value_heads: int = 0  # a multiple of these
    linear_key_dim: int = 0  # of a head
    linear_value_dim: int = 0
    linear_conv_width: int = 0  # tokens that the convolution before it sees, the newest included
    linear_by_kind: bool = False  # checkpoints have the projections kind by kind; otherwise key head by key head

    vision_tower: bool = False  # checkpoints have one beside the language model, which alone is trained and served

    # multi-head latent attention (DeepSeek-V2, section 2.1); head_dim is then qk_nope_head_dim + qk_rope_head_dim
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    mtp_layers: int = 0  # layers for multi-token prediction that are loaded beside the others (models/multi_token.py)
    mtp_drafts: bool = False  # engines have them too, and draft with them

    # Whether files have the experts of a layer in one tensor; no shape depends on it.
    stacked_experts: bool = field(default=False, compare=False)
    # The token whose embedding is not trained where it is looked up (nn.Embedding's padding_idx); no shape depends on it.
    padding_token: int | None = field(default=None, compare=False)

    def with_scalar_head(self) -> ModelSpec:
        """The same decoder with the other head, which shares no weights with the embedding."""
        return replace(self, head=SCALAR, tie_word_embeddings=False, mtp_layers=0, mtp_drafts=False)

    def cut(self, layers: int) -> ModelSpec:
        """The same decoder with its first layers alone."""
        linear, windowed = (tuple(layer for layer in each if layer < layers) for each in (self.linear_layers, self.windowed_layers))
        return replace(self, num_layers=layers, linear_layers=linear, windowed_layers=windowed)

    @property
    def period(self) -> int:
        """After how many layers their kinds repeat, apart from leading dense ones."""
        return next((layer + 1 for layer in range(self.num_layers) if layer not in self.linear_layers), 1)

    @property
    def attention_layers(self) -> int:
        """How many layers keep keys and values."""
        return self.num_layers - len(self.linear_layers)

    @property
    def rope_type(self) -> str:
        """Hugging Face's name for the scaling of rotary embeddings."""
        scaling = self.rope_scaling or {}
        return scaling.get("rope_type") or scaling.get("type") or "default"
