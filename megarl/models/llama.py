"""Llama 3, 3.1 and 3.2."""

from __future__ import annotations

from megarl.models.reading import expect_no_biases, read_common
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("LlamaForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError for a missing key, and for variants whose tensors are not listed here
    (biases).
    """
    expect_no_biases(reader)
    return read_common(reader, "llama")
