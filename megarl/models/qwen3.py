"""Qwen3, dense: RMSNorm of every query and key head, no biases."""

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

ARCHITECTURES = ("Qwen3ForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    reader.assume(num_key_value_heads=32, head_dim=128)
    reader.expect("attention_bias", False, False)
    expect_no_window_of_qwen(reader)
    return read_common(reader, "qwen3", qk_norm=True)
