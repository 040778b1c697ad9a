"""DeepSeek-V3 and R1: latent attention, a few dense layers, then mixtures with shared experts and a
bias on the router's choice.

The layer for multi-token prediction has the index num_hidden_layers in the checkpoint. SGLang must
be started with disable_shared_experts_fusion, since it may otherwise keep the shared expert as one
more routed expert.
"""

from __future__ import annotations

from megarl.config.errors import ConfigError
from megarl.models import multi_token
from megarl.models.latent_attention import MultiHeadLatentAttention
from megarl.models.reading import read_common, read_sigmoid_experts
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("DeepseekV3ForCausalLM",)
PREDICTION = multi_token.NEXTN
_ALLOWED = {
    "attention_bias": False,
    "moe_layer_freq": 1,
    "rope_interleave": True,
    # for the two norms inside attention, Hugging Face always uses this value, SGLang that of
    # config.json
    "rms_norm_eps": 1e-6,
}
_YARN = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def read_spec(reader: ConfigReader) -> ModelSpec:
    reader.assume(
        num_key_value_heads=128,
        moe_intermediate_size=2048,
        num_experts_per_tok=8,
        n_shared_experts=1,
    )
    reader.assume(
        n_routed_experts=256,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
    )
    reader.assume(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    for key, allowed in _ALLOWED.items():
        reader.expect(key, allowed, allowed)
    _, scaling = reader.rope()
    # Hugging Face and SGLang have different defaults
    missing = [key for key in _YARN if scaling and not scaling.get(key)]
    if missing:
        raise ConfigError(f"{reader.source}: rope_scaling lacks {', '.join(missing)}")
    for key, allowed in (("attention_factor", None), ("truncate", True)):
        if scaling and scaling.get(key, allowed) != allowed:
            raise ConfigError(
                f"{reader.source}: {key} = {scaling[key]!r} in rope_scaling is not supported, "
                f"only {allowed!r} is"
            )
    nope = reader.integer("qk_nope_head_dim")
    rope = reader.integer("qk_rope_head_dim")
    return read_common(
        reader,
        "deepseek_v3",
        head_dim=nope + rope,
        experts=read_sigmoid_experts(reader),
        attention=MultiHeadLatentAttention(
            q_rank=reader.integer("q_lora_rank"),
            kv_rank=reader.integer("kv_lora_rank"),
            nope_dim=nope,
            rope_dim=rope,
            v_dim=reader.integer("v_head_dim"),
        ),
    )
