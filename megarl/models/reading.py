"""Reads the keys of config.json that several families share."""

from __future__ import annotations

from typing import Any

from megarl.config.errors import ConfigError
from megarl.models.experts import Experts
from megarl.models.registry import FULL, SLIDING, ConfigReader
from megarl.models.spec import ModelSpec


def read_common(reader: ConfigReader, family: str, **family_fields: Any) -> ModelSpec:
    """Reads the keys that all families share. The fields `family_fields` are added and take
    precedence.

    Raises ConfigError for missing keys and inconsistent sizes.
    """
    if "activation" not in family_fields:
        reader.expect("hidden_act", "silu", "silu")
    heads = reader.integer("num_attention_heads")
    hidden = reader.integer("hidden_size")
    kv_heads = reader.integer("num_key_value_heads", heads)
    problems = []
    if heads % kv_heads:
        problems.append(
            f"{reader.source}: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}"
        )
    if reader.value("head_dim") is None and "head_dim" not in family_fields and hidden % heads:
        problems.append(
            f"{reader.source}: hidden_size = {hidden} is not a multiple of num_attention_heads = "
            f"{heads}"
        )
    if (
        "partial_rotary_factor" not in family_fields
        and (factor := reader.partial_rotary_factor()) != 1.0
    ):
        # For families without this key, SGLang would rotate a part of each head, Hugging Face all
        # of it.
        problems.append(
            f"{reader.source}: partial_rotary_factor = {factor} is not supported, only 1.0 is"
        )
    if problems:
        raise ConfigError(problems)
    attention = family_fields.get("attention")
    kinds_known = "linear_attention" in family_fields or (attention and attention.window)
    if not kinds_known and (kinds := reader.layer_kinds()):
        whole_context = {FULL}
        if SLIDING in kinds and not reader.window_has_effect():
            whole_context.add(SLIDING)
        if not set(kinds) <= whole_context:
            reader.expect("layer_types", kinds, [FULL] * len(kinds))
    theta, scaling = reader.rope()
    fields = {
        "num_layers": reader.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": reader.integer("head_dim", hidden // heads),
        "vocab_size": reader.integer("vocab_size"),
        "max_position_embeddings": reader.integer("max_position_embeddings"),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    if "intermediate_size" not in family_fields:
        fields["intermediate_size"] = reader.integer("intermediate_size")
    return ModelSpec(family=family, **(fields | family_fields))


def expect_no_biases(reader: ConfigReader) -> None:
    """For families that SGLang serves with its Llama, which would build the biases."""
    for key in ("attention_bias", "bias", "mlp_bias"):
        reader.expect(key, False, False)


def expect_no_window_of_qwen(reader: ConfigReader) -> None:
    """For dense families of Qwen.

    If `use_sliding_window` is true, their layers from `max_window_layers` on have windows.
    """
    reader.assume(use_sliding_window=False, sliding_window=4096, max_window_layers=28)
    kinds = reader.layer_kinds()
    first_window = reader.integer("max_window_layers", minimum=0)
    windowed = SLIDING in kinds if kinds else first_window < reader.integer("num_hidden_layers")
    if reader.flag("use_sliding_window", False) and windowed:
        reader.expect_no_window()


def read_sigmoid_experts(reader: ConfigReader, router_dtype: str | None = None) -> Experts:
    """Mixtures like DeepSeek-V3's and GLM-4.5's: sigmoid scores, a bias on the choice, groups,
    shared experts.
    """
    reader.expect("topk_method", "noaux_tc", "noaux_tc")
    reader.expect("scoring_func", "sigmoid", "sigmoid")
    rows = reader.integer("moe_intermediate_size")
    return Experts(
        count=reader.renamed("n_routed_experts", "num_local_experts"),
        per_token=reader.integer("num_experts_per_tok"),
        intermediate_size=rows,
        shared_size=reader.integer("n_shared_experts", minimum=0) * rows,
        first_layer=reader.integer("first_k_dense_replace", minimum=0),
        score_function="sigmoid",
        norm_topk_prob=reader.flag("norm_topk_prob", True),
        router_bias=True,
        groups=reader.integer("n_group"),
        topk_groups=reader.integer("topk_group"),
        scaling_factor=reader.number("routed_scaling_factor", 1.0),
        router_dtype=router_dtype,
    )
