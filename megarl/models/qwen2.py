"""Qwen2 and Qwen2.5: biases on q, k and v; small models tie the output layer to the embedding."""

from __future__ import annotations

from megarl.models.attention import Attention
from megarl.models.reading import expect_no_window_of_qwen, read_common
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("Qwen2ForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    reader.assume(num_key_value_heads=32)
    expect_no_window_of_qwen(reader)
    return read_common(reader, "qwen2", attention=Attention(qkv_bias=True))
