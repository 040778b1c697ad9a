"""The floating-point operations of one token, from the model's shape alone."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from megarl.models.registry import family
from megarl.models.spec import LM, ModelSpec


def flops_per_token(spec: ModelSpec, length: float) -> float:
    """FLOPs per token of a forward pass over the whole model, for sequences of `length` tokens."""
    dense, expert = active_elements(spec)
    outputs = spec.vocab_size if spec.head == LM else 1
    return 2 * (dense + expert + outputs * spec.hidden_size) + spec.num_layers * attention_flops(spec, length)


def attention_flops(spec: ModelSpec, length: float) -> float:
    """Forward FLOPs per token and layer of scores and weighted values, of which the causal mask leaves half."""
    values = spec.v_head_dim or spec.head_dim
    return 2 * spec.num_attention_heads * (spec.head_dim + values) * length / 2


def active_elements(spec: ModelSpec) -> tuple[float, float]:
    """(dense, experts) elements of the matrices that one token is multiplied by in all layers."""
    return _active_elements(replace(spec, rope_scaling=None))  # which cannot be hashed, and has no part in it


@functools.lru_cache(maxsize=64)
def _active_elements(spec: ModelSpec) -> tuple[float, float]:
    dense = expert = 0.0
    for tensor in family(spec).logical_tensors(spec):
        if tensor.place != "layer" or len(tensor.shape) < 2:
            continue
        first, end = tensor.layers or (0, spec.num_layers)
        if tensor.experts:
            expert += (end - first) * math.prod(tensor.shape) * spec.experts_per_token
        else:
            dense += (end - first) * math.prod(tensor.shape)
    return dense, expert
