"""The router and experts of gpt-oss, with biases.

On all three sides, gate and up are one tensor with alternating rows.

Files of a checkpoint stack the experts of a layer in one tensor, with rows and columns exchanged.
"""

from __future__ import annotations

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.experts import MEGATRON_NAMES
from megarl.models.mlp import SGLANG_CPU_PADDING
from megarl.models.parameters import LAYER, LogicalTensor, Parameter, Part, round_up, whole
from megarl.models.spec import ModelSpec

_L = "model.layers.{layer}.mlp."
ROUTER = _L + "router.weight"
ROUTER_BIAS = _L + "router.bias"
GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS = (
    _L + "experts.{expert}." + name
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
)


def logical(spec: ModelSpec) -> list[LogicalTensor]:
    count = spec.num_experts
    rows = spec.expert_intermediate_size
    hidden = spec.hidden_size
    shapes = {
        GATE_UP: (2 * rows, hidden),
        GATE_UP_BIAS: (2 * rows,),
        DOWN: (hidden, rows),
        DOWN_BIAS: (hidden,),
    }
    router = [
        LogicalTensor(ROUTER, (count, hidden), LAYER),
        LogicalTensor(ROUTER_BIAS, (count,), LAYER),
    ]
    return router + [
        LogicalTensor(name, shape, LAYER, experts=count) for name, shape in shapes.items()
    ]


def stacked() -> tuple[Parameter, ...]:
    """The tensors of a checkpoint; each has all experts of a layer."""
    return tuple(
        Parameter(
            name.replace(".{expert}", ""), LAYER, (Part(name),), transposed=name in (GATE_UP, DOWN)
        )
        for name in (GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS)
    )


def megatron(spec: ModelSpec, topology: TrainerTopology, layer_spec: str) -> list[Parameter]:
    """Megatron's parameters.

    Gate and up alternate here too, so that an engine gets one run of rows
    (`trainer.layers.PairedRows`).
    """
    prefix = "decoder.layers.{layer}.mlp."
    etp = topology.etp
    fc1, fc2 = (prefix + "experts." + MEGATRON_NAMES[layer_spec] % n for n in (1, 2))
    units = (("ffn rows of an expert", spec.expert_intermediate_size),)
    return [
        whole(prefix + "router.weight", LAYER, ROUTER),
        whole(prefix + "router.bias", LAYER, ROUTER_BIAS),
        Parameter(fc1, LAYER, (Part(GATE_UP),), dim=0, groups=etp, units=units),
        Parameter(fc1.replace(".weight", ".bias"), LAYER, (Part(GATE_UP_BIAS),), dim=0, groups=etp),
        Parameter(fc2, LAYER, (Part(DOWN),), dim=1, groups=etp),
        whole(fc2.replace(".weight", ".bias"), LAYER, DOWN_BIAS),
    ]


def sglang(spec: ModelSpec, topology: GeneratorTopology, device: str) -> list[Parameter]:
    """SGLang's parameters.

    Among ranks that share an expert, the first has the bias of `down`, the others zeros. Biases are
    float32.
    """
    moe_tp = topology.tp // topology.ep
    rows = spec.expert_intermediate_size
    hidden = spec.hidden_size
    if device == "cpu":
        rows = round_up(rows, topology.tp * SGLANG_CPU_PADDING)
    units = (("ffn rows of an expert", rows),)
    prefix = _L + "experts."
    down_bias = Part(DOWN_BIAS, hidden * moe_tp)
    return [
        whole(ROUTER, LAYER, ROUTER),
        whole(ROUTER_BIAS, LAYER, ROUTER_BIAS),
        Parameter(
            prefix + "w13_weight",
            LAYER,
            (Part(GATE_UP, 2 * rows),),
            dim=0,
            groups=moe_tp,
            units=units,
        ),
        Parameter(
            prefix + "w13_weight_bias",
            LAYER,
            (Part(GATE_UP_BIAS, 2 * rows),),
            dim=0,
            groups=moe_tp,
            dtype="float32",
        ),
        Parameter(prefix + "w2_weight", LAYER, (Part(DOWN, rows),), dim=1, groups=moe_tp),
        Parameter(
            prefix + "w2_weight_bias", LAYER, (down_bias,), dim=0, groups=moe_tp, dtype="float32"
        ),
    ]
