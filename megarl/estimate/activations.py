"""Activations that a trainer rank keeps per token of a microbatch, by parts of a layer.

After Korthikanti et al., Reducing Activation Recomputation (arXiv 2205.05198), section 4, without dropout, with fused attention (no
score matrix) and fused SwiGLU, as the trainer runs on GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema import TrainerConfig
from megarl.models import ModelSpec


@dataclass(frozen=True)
class LayerActivations:
    """Elements per token of one layer on one rank."""

    boundary: float  # the layer's input, which is all that full recomputation keeps
    kept: float  # what the backward pass needs, including the boundary
    workspace: float  # the most gradients of one layer that are alive at once


def of_layer(spec: ModelSpec, trainer: TrainerConfig, experts: bool) -> LayerActivations:
    """`experts`: whether the layer has routed experts. Assumes that tokens spread evenly over experts."""
    tp, h = trainer.tp, spec.hidden_size
    split = tp if trainer.sequence_parallel else 1
    ffn = spec.expert_intermediate_size if experts else spec.intermediate_size
    mlp = _routed(spec, trainer, split) + 3 * spec.shared_intermediate_size / tp if experts else 3 * ffn / tp
    kept = 4 * h / split + _attention(spec, tp) + mlp  # 4: inputs and outputs of both norms
    widest = 2 * ffn * spec.experts_per_token / trainer.etp / split if experts else 2 * ffn / tp
    gathered = h if trainer.sequence_parallel else 0
    return LayerActivations(boundary=h / split, kept=kept, workspace=2 * widest + 2 * h / split + gathered)


def _attention(spec: ModelSpec, tp: int) -> float:
    """Rotated queries, keys, values and the output; if heads are normed or compressed, also the inputs of that."""
    heads = spec.num_attention_heads
    if spec.kv_lora_rank:
        compressed = 2 * (spec.q_lora_rank + spec.kv_lora_rank + spec.qk_rope_head_dim)
        return compressed + heads * (3 * spec.head_dim + 2 * spec.v_head_dim) / tp
    q, kv = heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return (2 * q + 2 * kv + (q + kv if spec.qk_norm else 0)) / tp


def _routed(spec: ModelSpec, trainer: TrainerConfig, split: int) -> float:
    """The router in fp32 (two 16-bit elements each), tokens permuted before and after they travel, and the experts' activations."""
    per_expert = 2 * spec.hidden_size + 3 * spec.expert_intermediate_size / trainer.etp
    return (2 * spec.hidden_size + 4 * spec.num_experts + spec.experts_per_token * per_expert) / split
