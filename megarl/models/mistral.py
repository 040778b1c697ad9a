"""Mistral's dense models with Llama's tensors: 7B from v0.2 on, Nemo, Small, Large."""

from __future__ import annotations

from megarl.models.dense import (
    expect_no_biases,
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

ARCHITECTURES = ("MistralForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError also for a window shorter than the context, which SGLang would ignore."""
    reader.assume(num_key_value_heads=8, sliding_window=4096)
    expect_no_biases(reader)
    reader.expect_no_window()
    return read_common(reader, "mistral")
