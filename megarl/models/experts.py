"""The router and the routed experts of a mixture of experts.

`mlp` has the norm before it and the shared experts.

Checkpoints differ only in names: `module` is "mlp" (gate_proj, up_proj, down_proj) or
"block_sparse_moe" (Mixtral: w1, w3, w2).
"""

from __future__ import annotations

from typing import Any

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.mlp import SGLANG_CPU_PADDING
from megarl.models.parameters import LAYER, Layers, LogicalTensor, Parameter, Part, round_up, whole
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

_L = "model.layers.{layer}."
_PROJECTIONS = {
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "block_sparse_moe": ("w1", "w3", "w2"),
}
# Megatron's names of expert K: in a module per expert (SequentialMLP), or in Transformer Engine's
# grouped linear layers.
MEGATRON_NAMES = {
    "local": "local_experts.{expert}.linear_fc%d.weight",
    "te": "linear_fc%d.weight{expert}",
}


def quantised(module: str) -> tuple[str, ...]:
    return f"{_L}{module}.experts.w13_weight", f"{_L}{module}.experts.w2_weight"


def read_sigmoid_router(reader: ConfigReader) -> dict[str, Any]:
    """Fields of the spec for mixtures like DeepSeek-V3's and GLM-4.5's: sigmoid scores, a bias on
    the choice, groups, shared experts.
    """
    reader.expect("topk_method", "noaux_tc", "noaux_tc")
    reader.expect("scoring_func", "sigmoid", "sigmoid")
    rows = reader.integer("moe_intermediate_size")
    return {
        "num_experts": reader.renamed("n_routed_experts", "num_local_experts"),
        "experts_per_token": reader.integer("num_experts_per_tok"),
        "expert_intermediate_size": rows,
        "shared_intermediate_size": reader.integer("n_shared_experts", minimum=0) * rows,
        "first_dense_layers": reader.integer("first_k_dense_replace", minimum=0),
        "score_function": "sigmoid",
        "norm_topk_prob": reader.flag("norm_topk_prob", True),
        "router_bias": True,
        "num_expert_groups": reader.integer("n_group"),
        "topk_groups": reader.integer("topk_group"),
        "routed_scaling_factor": reader.number("routed_scaling_factor", 1.0),
    }


def logical(
    spec: ModelSpec, module: str = "mlp", layers: Layers | None = None
) -> list[LogicalTensor]:
    gate, up, down = _names(module)
    count = spec.num_experts
    rows = spec.expert_intermediate_size
    hidden = spec.hidden_size
    tensors = [LogicalTensor(_router(module), (count, hidden), LAYER, layers)]
    if spec.router_bias:
        tensors.append(
            LogicalTensor(_router_bias(module), (count,), LAYER, layers, dtype="float32")
        )
    for name, shape in ((gate, (rows, hidden)), (up, (rows, hidden)), (down, (hidden, rows))):
        tensors.append(LogicalTensor(name, shape, LAYER, layers, count))
    return tensors


def stacked() -> tuple[Parameter, ...]:
    """The tensors of checkpoints that stack all experts of a layer: gate and up, one below the
    other, and down.
    """
    gate, up, down = _names("mlp")
    joined = (("gate_up_proj", (gate, up)), ("down_proj", (down,)))
    return tuple(
        Parameter(f"{_L}mlp.experts.{name}", LAYER, tuple(map(Part, parts)))
        for name, parts in joined
    )


def megatron(
    spec: ModelSpec,
    topology: TrainerTopology,
    layer_spec: str,
    module: str = "mlp",
    layers: Layers | None = None,
) -> list[Parameter]:
    gate, up, down = _names(module)
    units = (("ffn rows of an expert", spec.expert_intermediate_size),)
    prefix = "decoder.layers.{layer}.mlp."
    names = "decoder.layers.{layer}.mlp.experts." + MEGATRON_NAMES[layer_spec]
    parameters = [whole(prefix + "router.weight", LAYER, _router(module), layers=layers)]
    if spec.router_bias:  # this buffer is always float32 (moe/router.py)
        parameters.append(
            whole(
                prefix + "router.expert_bias",
                LAYER,
                _router_bias(module),
                layers=layers,
                dtype="float32",
            )
        )
    fc1, fc2 = (names.replace("%d", n) for n in "12")
    return parameters + [
        Parameter(
            fc1,
            LAYER,
            (Part(gate), Part(up)),
            dim=0,
            groups=topology.etp,
            layers=layers,
            units=units,
        ),
        Parameter(fc2, LAYER, (Part(down),), dim=1, groups=topology.etp, layers=layers),
    ]


def sglang(
    spec: ModelSpec,
    topology: GeneratorTopology,
    device: str,
    module: str = "mlp",
    layers: Layers | None = None,
    router_dtype: str | None = None,
) -> list[Parameter]:
    """Each of `ep` shards has a contiguous run of experts, sharded over its tp / ep ranks (moe
    tp).
    """
    moe_tp = topology.tp // topology.ep
    rows = spec.expert_intermediate_size
    if device == "cpu":
        rows = round_up(rows, topology.tp * SGLANG_CPU_PADDING)
    gate, up, down = _names(module)
    w13, w2 = quantised(module)
    units = (("ffn rows of an expert", rows),)
    parameters = [
        Parameter(
            w13,
            LAYER,
            (Part(gate, rows), Part(up, rows)),
            dim=0,
            groups=moe_tp,
            layers=layers,
            units=units,
        ),
        Parameter(w2, LAYER, (Part(down, rows),), dim=1, groups=moe_tp, layers=layers),
        whole(_router(module), LAYER, _router(module), layers=layers, dtype=router_dtype),
    ]
    if spec.router_bias:
        parameters.append(
            whole(_router_bias(module), LAYER, _router_bias(module), layers=layers, dtype="float32")
        )
    return parameters


def _names(module: str) -> tuple[str, str, str]:
    gate, up, down = (
        f"{_L}{module}.experts.{{expert}}.{projection}.weight"
        for projection in _PROJECTIONS[module]
    )
    return gate, up, down


def _router(module: str) -> str:
    return f"{_L}{module}.gate.weight"


def _router_bias(module: str) -> str:
    return f"{_L}{module}.gate.e_score_correction_bias"
