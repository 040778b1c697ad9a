"""Qwen3, dense: RMSNorm of every query and key head, no biases."""

from __future__ import annotations

from megarl.models.attention import Attention
from megarl.models.reading import expect_no_window_of_qwen, read_common
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("Qwen3ForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    reader.assume(num_key_value_heads=32, head_dim=128)
    reader.expect("attention_bias", False, False)
    expect_no_window_of_qwen(reader)
    return read_common(reader, "qwen3", attention=Attention(qk_norm=True))
