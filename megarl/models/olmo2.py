"""OLMo 2: norms after attention and MLP, and of all query and key heads together; no biases."""

from __future__ import annotations

from megarl.config.errors import ConfigError
from megarl.models.attention import Attention
from megarl.models.norms import Norms
from megarl.models.reading import read_common
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("Olmo2ForCausalLM",)


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError also for a head width that SGLang would ignore."""
    reader.assume(rms_norm_eps=1e-5, pad_token_id=1)
    reader.expect("attention_bias", False, False)
    spec = read_common(
        reader,
        "olmo2",
        attention=Attention(qk_norm=True, qk_norm_of_all_heads=True),
        norms=Norms(before=False, after=True),
    )
    if spec.head_dim * spec.num_attention_heads != spec.hidden_size:
        raise ConfigError(
            f"{reader.source}: head_dim = {spec.head_dim} is not hidden_size / num_attention_heads"
        )
    return spec
