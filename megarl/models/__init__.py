"""Model families, one file each.

A family declares its logical tensors, and where Megatron-core 0.19 and SGLang 0.5.23 keep them.

A new family is one file, `megarl/models/<name>.py`, or one outside the package that `model.family`
names. It declares

    ARCHITECTURES = ("<Name>ForCausalLM",)  # names as in config.json
    read_spec(reader) -> ModelSpec  # reads config.json; refuses unsupported variants
    # tensors of the HF checkpoint, in forward order
    logical_tensors(spec) -> tuple[LogicalTensor, ...]
    # parameters of the trainer
    megatron_parameters(spec, topology, layer_spec) -> tuple[Parameter, ...]
    # parameters of one engine
    sglang_parameters(spec, topology, device) -> tuple[Parameter, ...]
    # parameters that a quantised engine keeps in fp8
    quantised_parameters(spec) -> tuple[str, ...]
    # optional: checkpoint tensors that contain several
    fused_tensors(spec) -> tuple[Parameter, ...]
    UNUSED = ("<prefix>.",)  # optional: checkpoint tensors that are not loaded

and needs no registration. Most families are made of blocks, each of which declares one part of a
layer on all three sides: `vocabulary`, `attention`, `latent_attention`, `gated_delta_net`,
`norms_after`, `mlp`, `experts`, `paired_experts`. `hybrid_attention` uses one of two kinds of
attention in each layer. `dense` and `sparse` join blocks into whole layers. A new block is written
with the classes of `parameters`: read that module first, then `qwen2` (shortest) and `gpt_oss`
(longest). To test a family, add its name to FAMILIES in tests/unit/reshard_cases.py, and its
tensors by plain slicing to tests/unit/reshard_reference.py.
"""

from __future__ import annotations

from megarl.models.registry import load_spec
from megarl.models.spec import ModelSpec

__all__ = ["ModelSpec", "load_spec"]
