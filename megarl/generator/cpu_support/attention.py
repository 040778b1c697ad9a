"""Batches SGLang's `torch_native` attention, which loops over the sequences: hundreds of tiny calls a layer.

Here sequences are padded to the longest of their chunk and attended to in one call. Padding is masked out, so each sequence gets the same
result as from the loop, up to rounding. The functions are hooked AROUND the two loops, which still do everything except causal
self-attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_CHUNK_ELEMENTS = 1 << 24  # of padded keys and of the mask: bounds the memory that padding takes


def decode(
    original: Callable[..., torch.Tensor],
    backend: object,
    query: torch.Tensor,  # [B, Hq, D], one token per sequence
    output: torch.Tensor,  # [B, Hq, D], written
    k_cache: torch.Tensor,  # [slots, Hkv, D]
    v_cache: torch.Tensor,  # [slots, Hkv, D]
    req_to_token: torch.Tensor,  # [requests, longest context]: slot of each token
    req_pool_indices: torch.Tensor,  # [B]: rows of it
    seq_lens: torch.Tensor,  # [B], the new token included
    encoder_lens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    if _beyond_self_attention(encoder_lens, options):
        return original(backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, **options)
    kv_heads, group = k_cache.shape[1], query.shape[1] // k_cache.shape[1]
    for part in _chunks(len(seq_lens), 1, int(seq_lens.max()), k_cache[0].numel()):
        total = seq_lens[part]
        slots = req_to_token[req_pool_indices[part], : int(total.max())]  # [b, L]
        mask = torch.arange(slots.shape[1]) < total[:, None]  # [b, L]
        q = query[part].unflatten(1, (kv_heads, group))  # [b, Hkv, G, D]: the heads of a group become queries of one kv head
        k, v = (cache[slots].transpose(1, 2).to(q.dtype) for cache in (k_cache, v_cache))  # [b, Hkv, L, D]
        result = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], scale=options["scaling"])
        output[part] = result.flatten(1, 2)
    return output


def extend(
    original: Callable[..., torch.Tensor],
    backend: object,
    query: torch.Tensor,  # [sum of new tokens, Hq, D]
    output: torch.Tensor,  # like query, written
    k_cache: torch.Tensor,  # [slots, Hkv, D]
    v_cache: torch.Tensor,  # [slots, Hkv, D]
    req_to_token: torch.Tensor,  # [requests, longest context]
    req_pool_indices: torch.Tensor,  # [B]
    seq_lens: torch.Tensor,  # [B], cached prefix and new tokens
    extend_prefix_lens: torch.Tensor,  # [B]
    extend_seq_lens: torch.Tensor,  # [B] new tokens
    encoder_lens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    if _beyond_self_attention(encoder_lens, options) or not options["causal"]:
        lengths = (seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens)
        return original(backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, *lengths, **options)
    return _attend(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_seq_lens, options["scaling"])


def _beyond_self_attention(encoder_lens: torch.Tensor | None, options: dict[str, Any]) -> bool:
    return encoder_lens is not None or options["is_cross_attn"] or options["sliding_window_size"] is not None


def _attend(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    new_lens: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention of the last `new_lens` tokens of each sequence over all its `seq_lens` tokens."""
    first_token = new_lens.cumsum(0) - new_lens  # [B] where a sequence's queries start
    kv_heads = k_cache.shape[1]
    for part in _chunks(len(rows), int(new_lens.max()), int(seq_lens.max()), k_cache[0].numel()):
        new, total = new_lens[part], seq_lens[part]
        steps = torch.arange(int(new.max()))  # [E]
        is_query = steps < new[:, None]  # [b, E]
        token = torch.where(is_query, first_token[part, None] + steps, 0)  # [b, E] row of `query`
        slots = req_to_token[rows[part], : int(total.max())]  # [b, L]
        position = (total - new)[:, None] + steps  # [b, E] of each query in its sequence
        # Query padding repeats row 0, and its result is dropped; key padding lies after every real query.
        mask = torch.arange(slots.shape[1]) <= position[..., None]  # [b, E, L]
        q = query[token].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [b, Hkv, G * E, D]
        k, v = (cache[slots].transpose(1, 2).to(q.dtype) for cache in (k_cache, v_cache))  # [b, Hkv, L, D]
        group = query.shape[1] // kv_heads
        result = scaled_dot_product_attention(q, k, v, attn_mask=mask.repeat(1, group, 1)[:, None], scale=scaling)
        result = result.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [b, E, Hq, D]
        output[token[is_query]] = result[is_query]
    return output


def _chunks(sequences: int, longest_new: int, longest: int, elements_per_token: int) -> Iterator[slice]:
    per_sequence = longest * max(elements_per_token, longest_new)
    size = max(1, _CHUNK_ELEMENTS // per_sequence)
    for start in range(0, sequences, size):
        yield slice(start, start + size)
