"""Qwen3.5: like Qwen3-Next, but the projections of gated delta nets are stored kind by kind, and
smaller models are dense.

Published checkpoints have a vision tower, and then other names for the language model. Only the
language model is trained and served; exports copy the tower. Checkpoints without a tower
(`…ForCausalLM`) are another architecture in Hugging Face and SGLang. The layer for multi-token
prediction (`mtp.*`) is left out.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.models import experts
from megarl.models.decoder import logical_tensors
from megarl.models.parameters import Parameter, whole
from megarl.models.qwen3_next import read_hybrid, read_mixture
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec
from megarl.models.vocabulary import HEAD

TEXT = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
SEEING = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
ARCHITECTURES = TEXT + SEEING
UNUSED = ("mtp.",)
GATES = ("silu", "swish")  # two names of the same function


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError also if the weights of chosen experts do not sum to 1, since Hugging
    Face's always do.
    """
    reader.expect("norm_topk_prob", True, True)
    if reader.values.get("output_gate_type") not in (None, *GATES):
        reader.expect("output_gate_type", None, GATES[-1])
    (architecture, *_) = reader.values["architectures"]
    seeing = architecture in SEEING
    mixture = architecture.startswith("Qwen3_5Moe")
    kv_heads = 2 if mixture else 4
    reader.assume(num_key_value_heads=kv_heads, num_experts=256, num_experts_per_tok=8)
    mixture_fields = read_mixture(reader, stacked=seeing) if mixture else {}
    return read_hybrid(reader, "qwen3_5", by_kind=True, vision_tower=seeing, **mixture_fields)


def fused_tensors(spec: ModelSpec) -> tuple[Parameter, ...]:
    """The tensors with other names in files: with a vision tower, all but the output layer; also
    experts that are stacked in one tensor.
    """
    stacked = experts.stacked() if spec.experts and spec.experts.stacked else ()
    parts = set()
    for parameter in stacked:
        for part in parameter.parts:
            parts.add(part.logical_name)
    parameters = [*stacked]
    for tensor in logical_tensors(spec):
        if spec.vision_tower and tensor.name not in parts:
            parameters.append(whole(tensor.name, tensor.place, tensor.name))
    return tuple(
        replace(parameter, name=_named(spec, parameter.name))
        for parameter in dict.fromkeys(parameters)
    )


def _named(spec: ModelSpec, name: str) -> str:
    if name == HEAD or not spec.vision_tower:
        return name
    return name.replace("model.", "model.language_model.", 1)
