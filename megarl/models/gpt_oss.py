"""gpt-oss (20b, 120b): a mixture of experts in every layer, biases on all linear layers, a window
in every other layer, sinks.
"""

from __future__ import annotations

from megarl.config.errors import ConfigError
from megarl.models import paired_experts
from megarl.models.attention import Attention
from megarl.models.paired_experts import PairedExperts
from megarl.models.parameters import Parameter
from megarl.models.reading import read_common
from megarl.models.registry import FULL, SLIDING, ConfigReader
from megarl.models.spec import CLAMPED_SWIGLU, ModelSpec

ARCHITECTURES = ("GptOssForCausalLM",)
ALPHA = 1.702
YARN_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
YARN = {  # of files that say nothing
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError also for rotary embeddings that are scaled otherwise than gpt-oss's (YaRN
    without rounding of its range).
    """
    reader.assume(
        num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=150000.0, rope_parameters=YARN
    )
    reader.assume(head_dim=64, sliding_window=128, num_local_experts=128, num_experts_per_tok=4)
    reader.expect("attention_bias", True, True)
    reader.expect("tie_word_embeddings", False, False)
    reader.expect("hidden_act", "silu", "silu")
    for key in ("swiglu_alpha", "hidden_act_alpha"):  # Hugging Face's name, and SGLang's
        reader.expect(key, ALPHA, ALPHA)
    layers = reader.integer("num_hidden_layers")
    alternating = [FULL if layer % 2 else SLIDING for layer in range(layers)]
    spec = read_common(
        reader,
        "gpt_oss",
        activation=CLAMPED_SWIGLU,
        activation_limit=reader.number("swiglu_limit", 7.0),
        intermediate_size=0,
        attention=Attention(
            qkv_bias=True,
            output_bias=True,
            sinks=True,
            window=reader.integer("sliding_window"),
            windowed_layers=reader.windowed_layers(alternating),
            window_pool=0.8,
        ),
        experts=PairedExperts(
            count=reader.renamed("num_local_experts", "num_experts"),
            per_token=reader.renamed("num_experts_per_tok", "experts_per_token"),
            intermediate_size=reader.integer("intermediate_size"),
        ),
    )
    _check_rope(reader, spec)
    return spec


def _check_rope(reader: ConfigReader, spec: ModelSpec) -> None:
    scaling = spec.rope_scaling or {}
    if spec.rope_type != "yarn":
        raise ConfigError(
            f"{reader.source}: rope_type = {spec.rope_type!r} is not supported, only 'yarn' is"
        )
    missing = [key for key in YARN_KEYS if key not in scaling]
    if missing:
        raise ConfigError(f"{reader.source}: rope_scaling lacks {', '.join(missing)}")
    if scaling.get("truncate", True):
        raise ConfigError(
            f"{reader.source}: truncate = true in rope_scaling is not supported, only false is"
        )
    unsupported = []
    for key in ("mscale", "mscale_all_dim", "attention_factor"):
        if scaling.get(key) is not None:
            unsupported.append(key)
    if unsupported:
        raise ConfigError(
            f"{reader.source}: rope_scaling has {', '.join(unsupported)}, which is not supported"
        )


def fused_tensors(spec: ModelSpec) -> tuple[Parameter, ...]:
    return paired_experts.stacked()


def quantised_parameters(spec: ModelSpec) -> tuple[str, ...]:
    """Raises ConfigError, since SGLang keeps experts with biases in bf16 or MXFP4."""
    raise ConfigError(
        "generator.quantization: must be null for a gpt_oss model: SGLang keeps its experts in "
        "bf16, or in MXFP4"
    )
