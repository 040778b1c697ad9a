"""Phi-4, and Phi-3 without a window: Llama's tensors, but checkpoints have q, k and v in one
tensor, and gate and up in another.
"""

from __future__ import annotations

from megarl.config.errors import ConfigError
from megarl.models import attention, mlp
from megarl.models.parameters import Parameter
from megarl.models.reading import expect_no_biases, read_common
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("Phi3ForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError also for a window shorter than the context (Phi-3), which SGLang would
    ignore.
    """
    reader.assume(rms_norm_eps=1e-5, pad_token_id=32000)
    expect_no_biases(reader)
    reader.expect_no_window()
    spec = read_common(reader, "phi3")
    if spec.rope_scaling is not None:
        raise ConfigError(
            f"{reader.source}: rope_type = {spec.rope_type!r} is not supported, only 'default' is"
        )
    return spec


def fused_tensors(spec: ModelSpec) -> tuple[Parameter, ...]:
    return attention.fused(), mlp.fused()
