"""Mixtral: Llama's attention; every layer is a mixture of experts."""

from __future__ import annotations

from megarl.config.errors import ConfigError
from megarl.models.experts import Experts
from megarl.models.reading import read_common
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("MixtralForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError also for head widths and rotary embeddings that SGLang would silently
    compute differently.
    """
    reader.assume(
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    reader.expect_no_window()
    # SGLang's class always has an output layer of its own, which a tied checkpoint lacks
    reader.expect("tie_word_embeddings", False, False)
    spec = read_common(
        reader,
        "mixtral",
        intermediate_size=0,
        experts=Experts(
            count=reader.renamed("num_local_experts", "num_experts"),
            per_token=reader.integer("num_experts_per_tok"),
            intermediate_size=reader.integer("intermediate_size"),
            module="block_sparse_moe",
        ),
    )
    if spec.head_dim * spec.num_attention_heads != spec.hidden_size:
        raise ConfigError(
            f"{reader.source}: head_dim = {spec.head_dim} is not hidden_size / num_attention_heads"
        )
    if spec.rope_scaling is not None or spec.rope_theta != int(spec.rope_theta):
        raise ConfigError(
            f"{reader.source}: only a rope_theta that is a whole number is supported, without "
            "rope_scaling"
        )
    return spec
