"""Model families, one file each.

A family declares the names of its checkpoints' architectures, and reads a config.json as a
`ModelSpec`: sizes, and the blocks that the family composes. Each block, in a module of its own,
says where the Hugging Face checkpoint, Megatron-core 0.19 and SGLang 0.5.23 keep its tensors, and
what it costs.

    block              what every decoder has, and what is asked of blocks
    attention, latent_attention, gated_delta_net, norms, mlp, experts, paired_experts, vocabulary
    spec               ModelSpec, which has the blocks
    decoder            joins the tensors of a spec's blocks
    family             what a family's module declares
    reading            keys of config.json that families share

A new family is one file, `megarl/models/<name>.py`, or one outside the package that `model.family`
names, without registration. docs/extending.md says how to write one, and how to add a block. To
test a family, add its name to FAMILIES in tests/unit/reshard_cases.py, and its tensors by plain
slicing to tests/unit/reshard_reference.py.
"""

from __future__ import annotations

from megarl.models.registry import load_spec
from megarl.models.spec import ModelSpec

__all__ = ["ModelSpec", "load_spec"]
