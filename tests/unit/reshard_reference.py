"""What each engine must hold, by plain slicing of the full HF tensors: an independent reference for the reshard tests.

Nothing here uses boxes, pieces or layouts.
"""

from __future__ import annotations

import torch

from megarl.models import ModelSpec
from megarl.models.parameters import padded_vocab_size


def full_tensors(spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """HF names → full tensors, every element different from its neighbours."""
    generator = torch.Generator().manual_seed(0)
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_attention_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {"model.embed_tokens.weight": (spec.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for i in range(spec.num_layers):
        p = f"model.layers.{i}."
        for name, shape in (("q", (q, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, q))):
            shapes[f"{p}self_attn.{name}_proj.weight"] = shape
        for name, shape in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
            shapes[f"{p}mlp.{name}_proj.weight"] = shape
        shapes[f"{p}input_layernorm.weight"] = shapes[f"{p}post_attention_layernorm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def pad(tensor: torch.Tensor, size: int, dim: int, value: float = 0.0) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, torch.full(shape, value, dtype=tensor.dtype)], dim)


def megatron(
    spec: ModelSpec, hf: dict[str, torch.Tensor], tp: int, pp: int, tp_rank: int, pp_rank: int, fill: float
) -> dict[str, torch.Tensor]:
    """One rank of a trainer with evenly split stages; vocabulary padding holds `fill`."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(tp, 0)[tp_rank].clone()

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(tp, 1)[tp_rank].clone()

    vocab = padded_vocab_size(spec.vocab_size, tp)
    head = hf["model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"]
    local = {}
    if pp_rank == 0:
        local["embedding.word_embeddings.weight"] = rows(pad(hf["model.embed_tokens.weight"], vocab, 0, fill))
    if pp_rank == pp - 1:
        local["decoder.final_layernorm.weight"] = hf["model.norm.weight"].clone()
        if not spec.tie_word_embeddings or pp > 1:
            local["output_layer.weight"] = rows(pad(head, vocab, 0, fill))
    for i in range(pp_rank * spec.num_layers // pp, (pp_rank + 1) * spec.num_layers // pp):
        p, m = f"model.layers.{i}.", f"decoder.layers.{i}."
        q, k, v = (hf[f"{p}self_attn.{x}_proj.weight"].unflatten(0, (spec.num_kv_heads, -1)) for x in "qkv")
        local[m + "self_attention.linear_qkv.weight"] = rows(torch.cat([q, k, v], 1).flatten(0, 1))
        local[m + "self_attention.linear_proj.weight"] = columns(hf[p + "self_attn.o_proj.weight"])
        local[m + "mlp.linear_fc1.weight"] = torch.cat([rows(hf[p + "mlp.gate_proj.weight"]), rows(hf[p + "mlp.up_proj.weight"])])
        local[m + "mlp.linear_fc2.weight"] = columns(hf[p + "mlp.down_proj.weight"])
        local[m + "input_layernorm.weight"] = hf[p + "input_layernorm.weight"].clone()
        local[m + "pre_mlp_layernorm.weight"] = hf[p + "post_attention_layernorm.weight"].clone()
    return local


def sglang(spec: ModelSpec, hf: dict[str, torch.Tensor], tp: int, rank: int, device: str) -> dict[str, torch.Tensor]:
    """TP rank `rank` of an engine."""
    heads, kv, ffn, vocab = spec.num_attention_heads, spec.num_kv_heads, spec.intermediate_size, -(-spec.vocab_size // 64) * 64
    kv_rank, kv_parts = rank, tp
    if device == "cpu":
        if heads % tp or kv % tp:
            heads, kv = -(-kv // tp) * tp * (heads // kv), -(-kv // tp) * tp
        ffn = -(-ffn // (32 * tp)) * 32 * tp
        if vocab % tp:
            vocab = -(-spec.vocab_size // (64 * tp)) * 64 * tp
    elif tp > kv:
        kv_rank, kv_parts = rank // (tp // kv), kv

    def rows(tensor: torch.Tensor, size: int, parts: int = tp, index: int = rank) -> torch.Tensor:
        return pad(tensor, size, 0).chunk(parts, 0)[index]

    local = {"model.embed_tokens.weight": rows(hf["model.embed_tokens.weight"], vocab), "model.norm.weight": hf["model.norm.weight"]}
    if not spec.tie_word_embeddings:
        local["lm_head.weight"] = rows(hf["lm_head.weight"], vocab)
    for i in range(spec.num_layers):
        p = f"model.layers.{i}."
        q = rows(hf[p + "self_attn.q_proj.weight"], heads * spec.head_dim)
        k, v = (rows(hf[f"{p}self_attn.{x}_proj.weight"], kv * spec.head_dim, kv_parts, kv_rank) for x in "kv")
        local[p + "self_attn.qkv_proj.weight"] = torch.cat([q, k, v])
        local[p + "mlp.gate_up_proj.weight"] = torch.cat([rows(hf[f"{p}mlp.{x}_proj.weight"], ffn) for x in ("gate", "up")])
        local[p + "self_attn.o_proj.weight"] = pad(hf[p + "self_attn.o_proj.weight"], heads * spec.head_dim, 1).chunk(tp, 1)[rank]
        local[p + "mlp.down_proj.weight"] = pad(hf[p + "mlp.down_proj.weight"], ffn, 1).chunk(tp, 1)[rank]
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            local[p + name] = hf[p + name]
    return local
