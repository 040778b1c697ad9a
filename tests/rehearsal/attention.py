"""Compares SGLang's Triton attention, computed by Triton's interpreter, with softmax in float64.

    python tests/rehearsal/attention.py

A line for each kernel, dtype, size of heads and page; exit status 1 if an error is too large.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from cuda_on_cpu import compute_bfloat16

QUERY_HEADS = 4
CACHED = (5, 0, 70)  # tokens of each request in the cache
NEW = (3, 7, 2)  # tokens of each request that are prefilled
SPLITS = 4
# Outputs are around 1: a float32 sum's error, and two roundings to bfloat16.
LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02}
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


def main() -> int:
    compute_bfloat16()
    too_large = False
    for name, attention in (("extend", extend), ("decode", decode)):
        for dtype, head_dim, kv_heads, page_size in itertools.product(
            LARGEST_ERROR, (16, 64), (QUERY_HEADS, 2), (1, 16)
        ):
            largest_error = error(attention, dtype, head_dim, kv_heads, page_size)
            too_large |= not largest_error <= LARGEST_ERROR[dtype]
            print(
                f"{name}, {dtype}, {head_dim} a head, {QUERY_HEADS // kv_heads} queries a key, "
                f"pages of {page_size}: {largest_error:.2g}"
            )
    return int(too_large)


def error(
    attention: Attention, dtype: torch.dtype, head_dim: int, kv_heads: int, page_size: int
) -> float:
    """The largest error of random heads of three requests."""
    torch.manual_seed(0)
    tokens = sum(CACHED) + sum(NEW)
    queries = torch.randn(tokens, QUERY_HEADS, head_dim).to(dtype)
    keys, values = torch.randn(2, tokens, kv_heads, head_dim).to(dtype)
    computed = attention(queries, keys, values, page_size)
    return float((computed.double() - expected(attention, queries, keys, values)).abs().max())


def requests() -> list[tuple[int, int, int]]:
    """(first token, tokens in the cache, all tokens) of each request."""
    lengths = [cached + new for cached, new in zip(CACHED, NEW, strict=True)]
    firsts = itertools.accumulate(lengths[:-1], initial=0)
    return list(zip(firsts, CACHED, lengths, strict=True))


def expected(
    attention: Attention, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """In float64: of new tokens for `extend`, of each request's last token for `decode`."""
    group = queries.shape[1] // keys.shape[1]
    outputs = []
    for first, cached, length in requests():
        rows = slice(first, first + length)
        query, key, value = (
            tensor[rows].double().movedim(0, 1)
            for tensor in (
                queries,
                keys.repeat_interleave(group, dim=1),
                values.repeat_interleave(group, dim=1),
            )
        )
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        ).movedim(0, 1)
        outputs.append(output[cached:] if attention is extend else output[-1:])
    return torch.cat(outputs)


def in_cache(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    cache = torch.zeros(2 * len(places), *tensor.shape[1:], dtype=tensor.dtype)
    cache[places] = tensor
    return cache


def places_of(tokens: int) -> torch.Tensor:
    """Where the cache keeps each token: in an order of its own."""
    return torch.randperm(2 * tokens)[:tokens]


def indptr(lengths: tuple[int, ...] | list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def extend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, page_size: int
) -> torch.Tensor:
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    old = torch.cat([torch.arange(first, first + cached) for first, cached, _ in requests()])
    new = torch.cat(
        [torch.arange(first + cached, first + length) for first, cached, length in requests()]
    )
    places = places_of(len(queries))
    output = torch.empty_like(queries[new])
    extend_attention_fwd(
        queries[new],
        keys[new].contiguous(),
        values[new].contiguous(),
        output,
        in_cache(keys, places),
        in_cache(values, places),
        qo_indptr=indptr(NEW),
        kv_indptr=indptr(CACHED),
        kv_indices=places[old],
        custom_mask=None,
        is_causal=True,
        mask_indptr=None,
        max_len_extend=max(NEW),
        k_scale=1.0,
        v_scale=1.0,
        page_size=page_size,
    )
    return output


def decode(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, page_size: int
) -> torch.Tensor:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    lengths = [length for _, _, length in requests()]
    last = [first + length - 1 for first, _, length in requests()]
    places = places_of(len(queries))
    query = queries[last]
    output = torch.empty_like(query)
    batch, heads, head_dim = query.shape
    decode_attention_fwd(
        query,
        in_cache(keys, places),
        in_cache(values, places),
        output,
        kv_indptr=indptr(lengths),
        kv_indices=places,
        attn_logits=torch.empty(batch, heads, SPLITS, head_dim),
        attn_lse=torch.empty(batch, heads, SPLITS),
        num_kv_splits=torch.full((batch,), SPLITS, dtype=torch.int32),
        max_kv_splits=SPLITS,
        sm_scale=head_dim**-0.5,
        k_scale=1.0,
        v_scale=1.0,
        page_size=page_size,
    )
    return output


if __name__ == "__main__":
    sys.exit(main())
