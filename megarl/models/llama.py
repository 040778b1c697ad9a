"""Llama 3, 3.1 and 3.2."""

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

ARCHITECTURES = ("LlamaForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError for a missing key, and for variants whose tensors are not listed here
    (biases).
    """
    expect_no_biases(reader)
    return read_common(reader, "llama")
