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

__all__ = ["ARCHITECTURES", "logical_tensors", "megatron_parameters", "quantised_parameters", "read_spec", "sglang_parameters"]

ARCHITECTURES = ("MistralForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError also for a sliding window, which SGLang would ignore. If the key is missing, Hugging Face has a window."""
    reader.assume(num_key_value_heads=8, sliding_window=4096)
    expect_no_biases(reader)
    reader.expect("sliding_window", None, None)
    return read_common(reader, "mistral")
