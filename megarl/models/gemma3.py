"""Gemma 3 without images (270M, 1B): zero-centred norms before and after attention and MLP, windows
in most layers, tied embeddings.
"""

from __future__ import annotations

from megarl.base.geometry import GeneratorTopology
from megarl.config.errors import ConfigError
from megarl.models import decoder, vocabulary
from megarl.models.attention import Attention
from megarl.models.norms import Norms
from megarl.models.parameters import Parameter
from megarl.models.reading import read_common
from megarl.models.registry import FULL, SLIDING, ConfigReader, rope_type
from megarl.models.spec import GELU_TANH, ModelSpec

ARCHITECTURES = ("Gemma3ForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    reader.assume(
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=4096,
        rope_theta=1e6,
    )
    reader.assume(pad_token_id=0)
    reader.expect("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    reader.expect("attention_bias", False, False)
    reader.expect("tie_word_embeddings", True, True)
    rope = _rope(reader)
    return read_common(
        reader,
        "gemma3",
        tie_word_embeddings=True,
        rope_theta=rope[FULL],
        norms=Norms(after=True, zero_centred=True),
        activation=GELU_TANH,
        embedding_scale=reader.integer("hidden_size") ** 0.5,
        attention=Attention(
            qk_norm=True,
            scale=reader.integer("query_pre_attn_scalar") ** -0.5,
            window=reader.integer("sliding_window"),
            windowed_layers=_windowed(reader),
            windowed_rope_theta=rope[SLIDING],
        ),
    )


def _rope(reader: ConfigReader) -> dict[str, float]:
    """The theta of each kind of layer, from the keys of transformers 5 or older ones.

    Raises ConfigError for scaled rotary embeddings.
    """
    nested = reader.mapping("rope_parameters")
    of_kinds = ConfigReader(reader.source, nested)
    full = {**of_kinds.mapping(FULL), **reader.mapping("rope_scaling")}
    windowed = of_kinds.mapping(SLIDING)
    if any(rope_type(rope) != "default" for rope in (nested, full, windowed)):
        kinds = sorted({rope_type(rope) for rope in (nested, full, windowed)} - {"default"})
        raise ConfigError(
            f"{reader.source}: rope_type = {kinds[0]!r} is not supported, only 'default' is"
        )
    thetas = {}
    for kind, rope, key, default in (
        (FULL, full, "rope_theta", 1e6),
        (SLIDING, windowed, "rope_local_base_freq", 1e4),
    ):
        thetas[kind] = ConfigReader(reader.source, rope).number(
            "rope_theta", reader.number(key, default)
        )
    return thetas


def _windowed(reader: ConfigReader) -> tuple[int, ...]:
    pattern = reader.integer("sliding_window_pattern", 6)
    layers = range(1, reader.integer("num_hidden_layers") + 1)
    return reader.windowed_layers([SLIDING if layer % pattern else FULL for layer in layers])


def sglang_parameters(
    spec: ModelSpec, topology: GeneratorTopology, device: str
) -> tuple[Parameter, ...]:
    """SGLang's parameters. Every rank has the whole embedding."""
    return vocabulary.sglang_of_whole(decoder.sglang_layers(spec, topology, device))
