"""GLM-4.5, GLM-4.6 and GLM-4.7: biases on q, k and v, half of each head rotated, a few dense
layers, then mixtures like DeepSeek-V3's.

The layer for multi-token prediction has the index num_hidden_layers in the checkpoint.
"""

from __future__ import annotations

from megarl.config.errors import ConfigError
from megarl.models import multi_token
from megarl.models.attention import Attention
from megarl.models.reading import read_common, read_sigmoid_experts
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("Glm4MoeForCausalLM",)
PREDICTION = multi_token.NEXTN


def read_spec(reader: ConfigReader) -> ModelSpec:
    reader.assume(
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        moe_intermediate_size=1408,
        num_experts_per_tok=8,
        n_shared_experts=1,
    )
    reader.assume(
        n_routed_experts=128,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    # SGLang's class always has an output layer of its own, which a tied checkpoint lacks
    reader.expect("tie_word_embeddings", False, False)
    if reader.value("n_shared_experts") == 0:
        raise ConfigError(
            f"{reader.source}: n_shared_experts = 0 is not supported: SGLang would build a shared "
            "expert without rows"
        )
    return read_common(
        reader,
        "glm4_moe",
        attention=Attention(
            qkv_bias=reader.flag("attention_bias", False),
            qk_norm=reader.flag("use_qk_norm", False),
        ),
        partial_rotary_factor=reader.partial_rotary_factor(0.5),
        experts=read_sigmoid_experts(reader, router_dtype="float32"),
    )
