"""Speculative decoding in SGLang without CUDA: drafts are single chains of tokens, made by a draft
model or from n-grams.

SGLang's own CPU kernels are in a build of sgl_kernel that is not on PyPI. The kernels that it calls
are here, for chains only, without branches. `torch_native` attention has neither passes that verify
drafts nor the steps of a draft model.

Without CUDA, SGLang accepts a drafted token if it is the likeliest one
(speculative/eagle_utils.py:500), at any temperature. Here a token is sampled at each place, and the
draft is accepted as far as it agrees. With Gumbel noise on the logits, the likeliest token is a
sample. The noise is that of plain decoding, so the same tokens are drawn, up to rounding.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megarl.generator.seeds import gumbel_noise


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.speculative.eagle_utils.eagle_sample", drawn, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
        draft_backend,
        HookType.AROUND,
    )
    for model in (
        "glm4_moe.Glm4MoeForCausalLM",
        "deepseek_v2.DeepseekV2ForCausalLM",
        "qwen3_next.Qwen3NextForCausalLM",
    ):
        HookRegistry.register(
            f"sglang.srt.models.{model}.set_embed_and_head", share, HookType.AROUND
        )


def drawn(
    original: Callable[..., Any],
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    *arguments: Any,
    **named: Any,
) -> Any:
    """Runs around the choice of accepted tokens.

    Log-probs are taken from the logits without noise.
    """
    logits = logits_output.next_token_logits
    info = batch.sampling_info
    if batch.forward_mode.is_idle() or info.is_all_greedy:
        return original(verify_input, batch, logits_output, *arguments, **named)
    temperatures, greedy, seeds = (
        values.view(-1, 1).repeat_interleave(verify_input.draft_token_num, 0)
        for values in (info.temperatures, info.top_ks == 1, info.sampling_seed)
    )
    noise = gumbel_noise(seeds.view(-1), verify_input.positions, logits.shape[-1])
    logits_output.next_token_logits = torch.where(
        greedy, logits.double(), (logits / temperatures).double() + noise
    )
    try:
        return original(verify_input, batch, logits_output, *arguments, **named)
    finally:
        logits_output.next_token_logits = logits


def share(
    original: Callable[..., None],
    model: Any,
    embedding: torch.nn.Parameter,
    head: torch.nn.Parameter,
) -> None:
    """Replaces the original, which waits for a GPU at its end."""
    model.model.embed_tokens.weight = embedding
    model.lm_head.weight = head


def draft_backend(original: Callable[..., Any], factory: Any, kind: str, *_: Any, **__: Any) -> Any:
    """Runs around the choice of a draft model's attention.

    The original has none for `torch_native`.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if kind != "decode_attention_backend":
        return TorchNativeAttnBackend(factory.draft_model_runner)
    backends: list[Any] = [
        TorchNativeAttnBackend(factory.draft_model_runner)
        for _ in range(factory.speculative_num_steps - 1)
    ]
    for step, backend in enumerate(backends, start=1):
        backend.drafted = step
    return Steps(backends)


class Steps:
    """The attention in the steps of a draft model. Each step sees one more drafted token."""

    def __init__(self, attn_backends: list[Any]):
        self.attn_backends = attn_backends

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attn_backends[0], name)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


@contextlib.contextmanager
def lengths(backend: Any, batch: Any) -> Iterator[None]:
    """Runs around attention.

    In a pass that verifies a draft, or a step of a draft model, sets the lengths that
    `torch_native` reads.

    `backend.tree` [b, n, n]: which tokens of a draft see each other. None: each token sees those
    before it.
    """
    plain_lengths = batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens
    backend.tree = None
    if batch.forward_mode.is_target_verify():
        draft = batch.spec_info
        tokens = batch.spec_info.draft_token_num
        batch.seq_lens = plain_lengths[0] + tokens
        batch.extend_prefix_lens = plain_lengths[0]
        batch.extend_seq_lens = torch.full_like(plain_lengths[0], tokens)
        if draft.tree_topk != 1:
            backend.tree = draft.custom_mask.view(-1, tokens, tokens).bool()
    elif batch.forward_mode.is_decode():
        batch.seq_lens = plain_lengths[0] + getattr(backend, "drafted", 0)
    try:
        yield
    finally:
        batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = plain_lengths


# Kernels of sgl_kernel, with its names and order of arguments. Each docstring describes the
# argument that the kernel writes to.
def assign_extend_cache_locs_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out: torch.Tensor,
    *_: Any,
) -> None:
    """`out`: the slots from `start` to `end` of each request, one after the other."""
    parts = [table[row, a:b] for row, a, b in zip(rows.tolist(), start.tolist(), end.tolist())]
    packed = torch.cat(parts)
    out[: len(packed)] = packed


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """`table`: gets the new `slots`, from `start` to `end` of each request."""
    for row, a, b, part in zip(
        rows.tolist(), start.tolist(), end.tolist(), slots.split((end - start).tolist())
    ):
        table[row, a:b] = part


def assign_draft_cache_locs_contiguous_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    width: int,
    topk: int,
    count: int,
) -> None:
    """`out`: the `count` slots after `lengths` of each request."""
    assert topk == 1
    assign_extend_cache_locs_cpu(rows, table, lengths, lengths + count, out)


def copy_all_layer_kv_cache_cpu(
    addresses: torch.Tensor,
    row_bytes: torch.Tensor,
    destinations: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    """Copies rows `sources` of the cache's tensors to rows `destinations`."""
    for address, size in zip(addresses.tolist(), row_bytes.tolist()):
        rows = [ctypes.string_at(address + row * size, size) for row in sources.tolist()]
        for row, values in zip(destinations.tolist(), rows):
            ctypes.memmove(address + row * size, values, size)


def fill_accept_out_cache_loc_cpu(
    accepted: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
) -> None:
    """`out`: the slots of accepted tokens, one after the other.

    -1 in `accepted` stands for none.
    """
    accepted_slots = slots[accepted.flatten()[accepted.flatten() >= 0].long()]
    out[: len(accepted_slots)] = accepted_slots


def fill_bonus_tokens_cpu(
    tokens: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, stride: int
) -> None:
    """`out`: the last accepted token of each request, which has `stride` tokens."""
    out.copy_(tokens.flatten()[torch.arange(len(counts)) * stride + counts - 1])


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """`predicts`: the token after each accepted one; `accept_index`: their places;
    `accept_token_num`: how many of them were drafted.
    """
    drawn_tokens = target_predict.flatten()
    most = accept_index.shape[1]
    for request, drafted in enumerate(candidates.tolist()):
        children, siblings, places = (
            links[request].tolist()
            for links in (retrive_next_token, retrive_next_sibling, retrive_index)
        )
        node = 0
        accepted = [places[0]]
        while len(accepted) < most:
            token = int(drawn_tokens[accepted[-1]])
            child = children[node]
            while child >= 0 and drafted[child] != token:
                child = siblings[child]
            if child < 0:
                break
            predicts[accepted[-1]] = token
            node = child
            accepted.append(places[child])
        predicts[accepted[-1]] = drawn_tokens[accepted[-1]]
        accept_index[request, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        accept_token_num[request] = len(accepted) - 1


def build_tree_kernel_efficient_cpu(
    parents: torch.Tensor,
    drafted: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    children: torch.Tensor,
    siblings: torch.Tensor,
    topk: int,
    steps: int,
    tokens: int,
    mask_mode: Any,
) -> None:
    """Writes all but the first three arguments.

    The draft is a chain: the model's token, then the drafted ones.
    """
    assert topk == 1
    row = torch.tril(torch.ones(tokens, tokens, dtype=torch.bool))
    mask.copy_(row.expand(len(lengths), -1, -1).flatten())
    _describe(mask, lengths, positions, places, children, siblings, len(lengths), tokens)


def reconstruct_indices_from_tree_mask(*arguments: Any) -> None:
    """See `_describe`."""
    _describe(*arguments)


def _describe(
    mask: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    children: torch.Tensor,
    siblings: torch.Tensor,
    requests: int,
    tokens: int,
) -> None:
    """The tree behind a `mask` [b * n * n], which says which tokens precede each token.

    Returns positions, and for each token its number within the batch, its first child and its next
    sibling, or -1.
    """
    before = mask.view(requests, tokens, tokens).bool().tril(-1)
    positions.copy_((before.sum(-1) + lengths[:, None]).flatten())
    places.copy_(torch.arange(requests * tokens).view(requests, tokens))
    numbers = torch.arange(tokens)
    parents = torch.where(before, numbers, -1).amax(-1)  # [b, n]
    children.copy_(_first_true(parents[:, None] == numbers[:, None]))
    later_siblings = (
        (parents[:, None] == parents[:, :, None])
        & (numbers > numbers[:, None])
        & (parents[:, :, None] >= 0)
    )
    siblings.copy_(_first_true(later_siblings))


def _first_true(mask: torch.Tensor) -> torch.Tensor:
    """The index of the first true element in the last dim, or -1."""
    return torch.where(mask.any(-1), mask.int().argmax(-1), -1)
