"""The dense gated MLP.

The shared experts of a mixture are also such an MLP.
"""

from __future__ import annotations

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.parameters import LAYER, Layers, LogicalTensor, Parameter, Part, round_up, whole

_L = "model.layers.{layer}."
# ffn rows are padded to a multiple of this times tp; sglang/srt/configs/update_config.py
SGLANG_CPU_PADDING = 32
MLP = "mlp"
SHARED = "mlp.shared_experts"
GATED_SHARED = "mlp.shared_expert"  # module names in HF checkpoints and SGLang
QUANTISED = (_L + MLP + ".gate_up_proj.weight", _L + MLP + ".down_proj.weight")


def logical(
    hidden: int, rows: int, module: str = MLP, layers: Layers | None = None
) -> list[LogicalTensor]:
    """`rows`: intermediate size."""
    gate, up, down = _names(module)
    wide = (rows, hidden)
    narrow = (hidden, rows)
    result: list[LogicalTensor] = []
    for name, shape in ((gate, wide), (up, wide), (down, narrow)):
        result.append(LogicalTensor(name, shape, LAYER, layers))
    return result


def quantised(module: str) -> tuple[str, ...]:
    return tuple(name.replace(MLP, module) for name in QUANTISED)


def fused() -> Parameter:
    """Gate and up as one tensor, for checkpoints that have them so.

    SGLang's parameter has the same name.
    """
    return whole(QUANTISED[0], LAYER, *_names(MLP)[:2])


def megatron(
    topology: TrainerTopology, rows: int, module: str = MLP, layers: Layers | None = None
) -> list[Parameter]:
    """Megatron's parameters. It uses the same module names, except for a gated shared expert."""
    tp = topology.tp
    units = _units(rows, module)
    gate, up, down = _names(module)
    prefix = f"decoder.layers.{{layer}}.{SHARED if module == GATED_SHARED else module}."
    return [
        Parameter(
            prefix + "linear_fc1.weight",
            LAYER,
            (Part(gate), Part(up)),
            dim=0,
            groups=tp,
            layers=layers,
            units=units,
        ),
        Parameter(
            prefix + "linear_fc2.weight", LAYER, (Part(down),), dim=1, groups=tp, layers=layers
        ),
    ]


def sglang(
    topology: GeneratorTopology,
    device: str,
    rows: int,
    module: str = MLP,
    layers: Layers | None = None,
) -> list[Parameter]:
    """SGLang's parameters. CPU engines pad the rows."""
    tp = topology.tp
    if device == "cpu":
        rows = round_up(rows, tp * SGLANG_CPU_PADDING)
    gate, up, down = _names(module)
    prefix = f"{_L}{module}."
    parts = (Part(gate, rows), Part(up, rows))
    units = _units(rows, module)
    return [
        Parameter(
            prefix + "gate_up_proj.weight",
            LAYER,
            parts,
            dim=0,
            groups=tp,
            layers=layers,
            units=units,
        ),
        Parameter(
            prefix + "down_proj.weight", LAYER, (Part(down, rows),), dim=1, groups=tp, layers=layers
        ),
    ]


def _names(module: str) -> tuple[str, str, str]:
    gate, up, down = (f"{_L}{module}.{x}_proj.weight" for x in ("gate", "up", "down"))
    return gate, up, down


def _units(rows: int, module: str) -> tuple[tuple[str, int], ...]:
    return (("ffn rows" if module == MLP else "ffn rows of the shared experts", rows),)
