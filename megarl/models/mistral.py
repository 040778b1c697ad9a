"""Mistral's dense models with Llama's tensors: 7B from v0.2 on, Nemo, Small, Large."""

from __future__ import annotations

from megarl.models.reading import expect_no_biases, read_common
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("MistralForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError also for a window shorter than the context, which SGLang would ignore."""
    reader.assume(num_key_value_heads=8, sliding_window=4096)
    expect_no_biases(reader)
    reader.expect_no_window()
    return read_common(reader, "mistral")
