"""Qwen3-Next: gated delta nets, with gated attention in every fourth layer; zero-centred norms;
mixtures with a gated shared expert.

The layer for multi-token prediction is `mtp.*` in the checkpoint. SGLang must be started with
disable_shared_experts_fusion, since it may otherwise keep the shared expert as one more routed
expert.
"""

from __future__ import annotations

from typing import Any

from megarl.config.errors import ConfigError
from megarl.models import multi_token
from megarl.models.attention import Attention
from megarl.models.experts import Experts
from megarl.models.gated_delta_net import GatedDeltaNet
from megarl.models.norms import Norms
from megarl.models.reading import read_common
from megarl.models.registry import FULL, LINEAR, ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("Qwen3NextForCausalLM",)
PREDICTION = multi_token.QWEN


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError also if layers are dense, or of another kind than SGLang infers from
    full_attention_interval.
    """
    reader.assume(num_key_value_heads=2, num_experts=512, num_experts_per_tok=10)
    reader.expect("output_gate_type", None, None)
    # SGLang always has an output layer of its own
    reader.expect("tie_word_embeddings", False, False)
    return read_hybrid(reader, "qwen3_next", **read_mixture(reader))


def read_hybrid(
    reader: ConfigReader, family: str, *, by_kind: bool = False, **family_fields: Any
) -> ModelSpec:
    """Reads the keys that all families with gated delta nets and gated attention share.

    The fields `family_fields` are added.
    """
    reader.assume(
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, linear_conv_kernel_dim=4
    )
    reader.assume(linear_key_head_dim=128, linear_value_head_dim=128)
    reader.expect("attention_bias", False, False)
    reader.expect("attn_output_gate", True, True)
    _check_served_rope(reader)
    key_heads = reader.integer("linear_num_key_heads")
    value_heads = reader.integer("linear_num_value_heads")
    if value_heads % key_heads:
        text = (
            f"linear_num_value_heads = {value_heads} is not a multiple of linear_num_key_heads = "
            f"{key_heads}"
        )
        raise ConfigError(f"{reader.source}: {text}")
    return read_common(
        reader,
        family,
        attention=Attention(qk_norm=True, gated=True),
        linear_attention=GatedDeltaNet(
            layers=_linear_layers(reader),
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=reader.integer("linear_key_head_dim"),
            value_dim=reader.integer("linear_value_head_dim"),
            conv_width=reader.integer("linear_conv_kernel_dim"),
            by_kind=by_kind,
        ),
        norms=Norms(zero_centred=True),
        partial_rotary_factor=reader.partial_rotary_factor(FACTOR),
        **family_fields,
    )


def read_mixture(reader: ConfigReader, *, stacked: bool = False) -> dict[str, Any]:
    """Fields of the spec for a mixture of experts in every layer."""
    reader.assume(moe_intermediate_size=512, shared_expert_intermediate_size=512)
    reader.expect("decoder_sparse_step", 1, 1)
    if reader.values.get("mlp_only_layers"):
        reader.expect("mlp_only_layers", [], [])
    return {
        "intermediate_size": 0,
        "experts": Experts(
            count=reader.integer("num_experts"),
            per_token=reader.integer("num_experts_per_tok"),
            intermediate_size=reader.integer("moe_intermediate_size"),
            shared_size=reader.integer("shared_expert_intermediate_size"),
            shared_gate=True,
            norm_topk_prob=reader.flag("norm_topk_prob", True),
            stacked=stacked,
        ),
    }


FACTOR = 0.25  # Transformers' and SGLang's default of partial_rotary_factor


def _check_served_rope(reader: ConfigReader) -> None:
    """SGLang's own classes of these families read the rotated share, and Qwen3-Next's also theta,
    only outside `rope_parameters`.
    """
    for key, value, default in (
        ("partial_rotary_factor", reader.partial_rotary_factor(FACTOR), FACTOR),
        ("rope_theta", reader.rope()[0], 10000.0),
    ):
        of_engine = reader.number(key, default)
        if of_engine != value and (
            key != "rope_theta" or reader.values["architectures"][0].startswith("Qwen3Next")
        ):
            explanation = f"SGLang does not look into rope_parameters, and would take {of_engine:g}"
            raise ConfigError(
                f"{reader.source}: {key} = {value:g} must also stand beside rope_parameters: "
                f"{explanation}"
            )


def _linear_layers(reader: ConfigReader) -> tuple[int, ...]:
    if reader.value("full_attention_interval") is None:
        raise ConfigError(
            f"{reader.source}: full_attention_interval is missing, which SGLang needs"
        )
    interval = reader.integer("full_attention_interval")
    layers = range(reader.integer("num_hidden_layers"))
    kinds = []
    for layer in layers:
        kinds.append(FULL if (layer + 1) % interval == 0 else LINEAR)
    if (reader.layer_kinds() or kinds) != kinds:
        reader.expect("layer_types", kinds, kinds)
    return tuple(layer for layer in layers if kinds[layer] == LINEAR)
