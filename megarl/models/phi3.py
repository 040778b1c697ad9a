"""Phi-4, and Phi-3 without a window: Llama's tensors, but checkpoints have q, k and v in one tensor, and gate and up in another."""

from __future__ import annotations

from megarl.models import attention, mlp
from megarl.models.dense import logical_tensors, megatron_parameters, quantised_parameters, read_common, sglang_parameters
from megarl.models.parameters import Parameter
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

__all__ = ["ARCHITECTURES", "logical_tensors", "megatron_parameters", "quantised_parameters", "read_spec", "sglang_parameters"]

ARCHITECTURES = ("Phi3ForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError also for a sliding window (Phi-3), which SGLang would ignore."""
    reader.expect("sliding_window", None, None)
    return read_common(reader, "phi3")


def fused_tensors(spec: ModelSpec) -> tuple[Parameter, ...]:
    return attention.fused(), mlp.fused()
