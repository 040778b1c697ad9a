"""Gemma 3 without images (270M, 1B): zero-centred norms before and after attention and MLP, windows in most layers, tied embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.base.geometry import GeneratorTopology
from megarl.config.errors import ConfigError
from megarl.models import attention, mlp, norms_after, vocabulary
from megarl.models.dense import logical_tensors, megatron_parameters, quantised_parameters, read_common
from megarl.models.parameters import Parameter
from megarl.models.registry import SLIDING, ConfigReader
from megarl.models.spec import GELU_TANH, ModelSpec

__all__ = ["ARCHITECTURES", "logical_tensors", "megatron_parameters", "quantised_parameters", "read_spec", "sglang_parameters"]

ARCHITECTURES = ("Gemma3ForCausalLM",)
FULL = "full_attention"


def read_spec(reader: ConfigReader) -> ModelSpec:
    reader.expect("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    reader.expect("attention_bias", False, False)
    reader.expect("tie_word_embeddings", True, True)
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        reader.expect(key, None, None)
    if reader.values.get("use_bidirectional_attention"):
        reader.expect("use_bidirectional_attention", False, False)
    rope = _rope(reader)
    return read_common(
        reader,
        "gemma3",
        head_dim=reader.integer("head_dim", 256),
        tie_word_embeddings=True,
        rope_theta=rope[FULL],
        qk_norm=True,
        norms_after=True,
        zero_centred_norms=True,
        activation=GELU_TANH,
        embedding_scale=reader.integer("hidden_size") ** 0.5,
        attention_scale=reader.integer("query_pre_attn_scalar") ** -0.5,
        window=reader.integer("sliding_window"),
        windowed_layers=_windowed(reader),
        windowed_rope_theta=rope[SLIDING],
    )


def _rope(reader: ConfigReader) -> dict[str, float]:
    """The theta of each kind of layer, from the keys of transformers 5 or older ones. Raises ConfigError for scaled rotary embeddings."""
    stated: Mapping[str, Any] = reader.values.get("rope_parameters") or {}
    if FULL not in stated:
        full = {"rope_theta": reader.number("rope_theta", 1e6), **(reader.values.get("rope_scaling") or {})}
        stated = {FULL: full, SLIDING: {"rope_theta": reader.number("rope_local_base_freq", 1e4)}}
    for rope in stated.values():
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(f"{reader.source}: rope_type = {rope['rope_type']!r} is not supported, only 'default' is")
    return {kind: float(stated[kind]["rope_theta"]) for kind in (FULL, SLIDING)}


def _windowed(reader: ConfigReader) -> tuple[int, ...]:
    pattern = reader.integer("sliding_window_pattern", 6)
    layers = range(reader.integer("num_hidden_layers"))
    kinds = reader.values.get("layer_types") or [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in layers]
    return tuple(layer for layer in layers if kinds[layer] == SLIDING)


def sglang_parameters(spec: ModelSpec, topology: GeneratorTopology, device: str) -> tuple[Parameter, ...]:
    """SGLang's parameters. Every rank has the whole embedding."""
    layers = attention.sglang(spec, topology, device) + mlp.sglang(topology, device, spec.intermediate_size)
    return vocabulary.sglang_of_whole([*layers, attention.sglang_norm(), *norms_after.sglang(spec)])
