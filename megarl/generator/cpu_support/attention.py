"""Batches SGLang's `torch_native` attention, which loops over the sequences with hundreds of tiny
calls per layer. Also adds attention sinks.

Here sequences of about one length are padded and attended to in one call. Padding is masked, so
each sequence gets the same result as from the loop, up to rounding. How a sequence is padded
depends on its own length alone: padding changes the last bits, and these must not depend on the
other requests of a batch (`deterministic`). The functions are hooked AROUND the two loops, which
still do everything except causal self-attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from megarl.generator.cpu_support import speculative

# most elements of padded keys and of the mask; bounds the memory for padding
_CHUNK_ELEMENTS = 1 << 24
_KEYS = 16  # keys are padded to a multiple of this


def forward(
    original: Callable[..., torch.Tensor],
    backend: Any,
    *arguments: Any,
    sinks: torch.Tensor | None = None,
    **named: Any,
) -> Any:
    """Runs around the backend's two entry points, and adds `sinks`: [Hq] logits that take a share
    of each head's attention.
    """
    backend.sinks = sinks
    # after q, k, v and the layer
    batch = named["forward_batch"] if "forward_batch" in named else arguments[4]
    with speculative.lengths(backend, batch):
        return original(backend, *arguments, **named)


def decode(
    original: Callable[..., torch.Tensor],
    backend: Any,
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
        return original(
            backend,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            encoder_lens,
            **options,
        )
    kv_heads = k_cache.shape[1]
    group = query.shape[1] // k_cache.shape[1]
    for part, longest in _chunks(
        torch.ones_like(seq_lens), seq_lens, k_cache[0].numel(), req_to_token.shape[1]
    ):
        total = seq_lens[part]
        slots = req_to_token[req_pool_indices[part], :longest]  # [b, L]
        # [b, 1, L]
        mask = _attended((total - 1)[:, None], slots.shape[1], options["sliding_window_size"])
        # [b, Hkv, G, D]: the heads of a group become queries of one kv head
        q = query[part].unflatten(1, (kv_heads, group))
        k, v = (_gathered(cache, slots).to(q.dtype) for cache in (k_cache, v_cache))
        output[part] = _attention(
            q, k, v, mask[:, None], options["scaling"], backend.sinks
        ).flatten(1, 2)
    return output


def extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
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
        return original(
            backend,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_prefix_lens,
            extend_seq_lens,
            encoder_lens,
            **options,
        )
    return _attend(
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_seq_lens,
        scaling=options["scaling"],
        window=options["sliding_window_size"],
        sinks=backend.sinks,
        tree=backend.tree,
    )


def _beyond_self_attention(encoder_lens: torch.Tensor | None, options: dict[str, Any]) -> bool:
    return encoder_lens is not None or options["is_cross_attn"]


def _gathered(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[b, Hkv, L, D] the keys or values in these slots [b, L].

    Indexing by `cache[slots]` takes five times as long on CPUs.
    """
    return cache.index_select(0, slots.view(-1)).unflatten(0, slots.shape).transpose(1, 2)


def _attended(position: torch.Tensor, keys: int, window: int | None) -> torch.Tensor:
    """[..., keys]: which keys a query at `position` [...] attends to.

    With a window: its own key and the `window` keys before it.
    """
    distance = position[..., None] - torch.arange(keys)
    if window is None:
        return distance >= 0
    return (distance >= 0) & (distance <= window)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [b, Hkv, G * E, D], k and v [b, Hkv, L, D], mask [b, 1, 1 or G * E, L].

    A sink is the score of an additional key with value zero; one additional dim makes room for it.
    """
    if sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    assert scaling is not None
    kv_heads, queries = q.shape[1:3]
    of_head = (sinks.to(q.dtype) / scaling).view(kv_heads, -1, 1)  # [Hkv, G, 1]
    scores = (
        of_head.expand(-1, -1, queries // of_head.shape[1])
        .flatten(1)[..., None]
        .expand(len(q), -1, -1, -1)
    )
    q = torch.cat([q, scores], -1)
    k = pad(k, (0, 1, 0, 1))
    v = pad(v, (0, 1, 0, 1))
    k[:, :, -1, -1] = 1.0
    return scaled_dot_product_attention(
        q, k, v, attn_mask=pad(mask, (0, 1), value=True), scale=scaling
    )[..., :-1]


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
    window: int | None,
    sinks: torch.Tensor | None,
    tree: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of the last `new_lens` tokens of each sequence over all its `seq_lens`
    tokens. `tree`: see speculative.lengths.
    """
    first_token = new_lens.cumsum(0) - new_lens  # [B] where a sequence's queries start
    kv_heads = k_cache.shape[1]
    for part, longest in _chunks(new_lens, seq_lens, k_cache[0].numel(), req_to_token.shape[1]):
        new = new_lens[part]
        total = seq_lens[part]
        steps = torch.arange(int(new.max()))  # [E]
        token = first_token[part, None] + steps  # [b, E] row of `query`
        slots = req_to_token[rows[part], :longest]  # [b, L]
        position = (total - new)[:, None] + steps  # [b, E] of each query in its sequence
        # Key padding comes after every query, which does not see it.
        mask = _attended(position, slots.shape[1], window)  # [b, E, L]
        if tree is not None:
            mask = mask & _on_branch(tree[part], total - new, slots.shape[1])
        # [b, Hkv, G * E, D]
        q = query[token].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        k, v = (_gathered(cache, slots).to(q.dtype) for cache in (k_cache, v_cache))
        group = query.shape[1] // kv_heads
        result = _attention(q, k, v, mask.repeat(1, group, 1)[:, None], scaling, sinks)
        # [b, E, Hq, D]
        result = result.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
        output[token] = result
    return output


def _on_branch(tree: torch.Tensor, prefix: torch.Tensor, keys: int) -> torch.Tensor:
    """[b, n, keys]: which keys a token of a draft sees: the whole `prefix` [b], and those of the n
    drafted tokens on its branch.
    """
    place = torch.arange(keys) - prefix[:, None]  # [b, keys] in the draft
    inside = place.clamp(0, tree.shape[-1] - 1)[:, None].expand(-1, tree.shape[1], -1)
    return tree.gather(-1, inside) | (place < 0)[:, None]


def _chunks(
    new: torch.Tensor, total: torch.Tensor, elements_per_token: int, width: int
) -> Iterator[tuple[torch.Tensor | slice, int]]:
    """The sequences of each call, and its number of keys: sequences with as many `new` tokens [B]
    whose `total` [B] is padded alike. `width`: the columns that there are for keys.
    """
    sequences_by_size: dict[tuple[int, int], list[int]] = {}
    for sequence, (queries, keys) in enumerate(zip(new.tolist(), total.tolist())):
        padded = min(-(-keys // _KEYS) * _KEYS, width)
        sequences_by_size.setdefault((queries, padded), []).append(sequence)
    for (queries, keys), sequences in sequences_by_size.items():
        size = max(1, _CHUNK_ELEMENTS // (keys * max(elements_per_token, queries)))
        if len(sequences_by_size) == 1 and len(sequences) <= size:
            yield slice(None), keys  # without copies
            return
        for part in torch.tensor(sequences).split(size):
            yield part, keys


def allow_gpt_oss(original: Callable[..., None], server_args: object) -> None:
    """Runs around SGLang's checks of a model's settings.

    On CPUs they allow gpt-oss only with the AMX backend.
    """
    from sglang.srt.arg_groups import model_hook

    backends_of = model_hook.attention_backends_of

    def named(settings: object) -> tuple[str, str]:
        backends = backends_of(settings)
        return (
            ("intel_amx", "intel_amx") if backends == ("torch_native", "torch_native") else backends
        )

    with patch.object(model_hook, "attention_backends_of", named):
        original(server_args)
