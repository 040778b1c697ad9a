"""Qwen2 and Qwen2.5: biases on q, k and v; small models tie the output layer to the embedding."""

from __future__ import annotations

from megarl.models.dense import (
    expect_no_window_of_qwen,
    logical_tensors,
    megatron_parameters,
    quantised_parameters,
    read_common,
    sglang_parameters,
)
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

__all__ = [
    "ARCHITECTURES",
    "logical_tensors",
    "megatron_parameters",
    "quantised_parameters",
    "read_spec",
    "sglang_parameters",
]

ARCHITECTURES = ("Qwen2ForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    reader.assume(num_key_value_heads=32)
    expect_no_window_of_qwen(reader)
    return read_common(reader, "qwen2", qkv_bias=True)
