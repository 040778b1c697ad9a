"""Qwen3-MoE: Qwen3's attention; every layer is a mixture of experts without shared experts."""

from __future__ import annotations

from megarl.models.attention import Attention
from megarl.models.experts import Experts
from megarl.models.reading import read_common
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError also if some layers are dense."""
    reader.assume(
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        sliding_window=4096,
    )
    reader.expect("attention_bias", False, False)
    # SGLang's class always has an output layer of its own, which a tied checkpoint lacks
    reader.expect("tie_word_embeddings", False, False)
    if reader.flag("use_sliding_window", False):
        reader.expect_no_window()
    reader.expect("decoder_sparse_step", 1, 1)
    reader.expect("mlp_only_layers", [], [])
    return read_common(
        reader,
        "qwen3_moe",
        intermediate_size=0,
        attention=Attention(qk_norm=True),
        experts=Experts(
            count=reader.renamed("num_experts", "num_local_experts"),
            per_token=reader.integer("num_experts_per_tok"),
            intermediate_size=reader.integer("moe_intermediate_size"),
            norm_topk_prob=reader.flag("norm_topk_prob", False),
        ),
    )
