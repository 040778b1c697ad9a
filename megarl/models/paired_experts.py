"""The router and experts of gpt-oss, with biases.

On all three sides, gate and up are one tensor with alternating rows.

Files of a checkpoint stack the experts of a layer in one tensor, with rows and columns exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.block import Sizes
from megarl.models.experts import MEGATRON_NAMES, Experts
from megarl.models.parameters import LAYER, Layers, LogicalTensor, Parameter, Part, whole

_L = "model.layers.{layer}.mlp."
ROUTER = _L + "router.weight"
ROUTER_BIAS = _L + "router.bias"
GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS = (
    _L + "experts.{expert}." + name
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
)


@dataclass(frozen=True)
class PairedExperts(Experts):
    BIASES: ClassVar = True

    def logical(self, sizes: Sizes, layers: Layers | None) -> list[LogicalTensor]:
        count = self.count
        rows = self.intermediate_size
        hidden = sizes.hidden_size
        shapes = {
            GATE_UP: (2 * rows, hidden),
            GATE_UP_BIAS: (2 * rows,),
            DOWN: (hidden, rows),
            DOWN_BIAS: (hidden,),
        }
        router = [
            LogicalTensor(ROUTER, (count, hidden), LAYER, layers),
            LogicalTensor(ROUTER_BIAS, (count,), LAYER, layers),
        ]
        return router + [
            LogicalTensor(name, shape, LAYER, layers, count) for name, shape in shapes.items()
        ]

    def megatron(
        self, topology: TrainerTopology, layer_spec: str, layers: Layers | None
    ) -> list[Parameter]:
        """Megatron's parameters.

        Gate and up alternate here too, so that an engine gets one run of rows
        (`trainer.layers.PairedRows`).
        """
        prefix = "decoder.layers.{layer}.mlp."
        fc1, fc2 = (prefix + "experts." + MEGATRON_NAMES[layer_spec] % n for n in (1, 2))
        units = (("ffn rows of an expert", self.intermediate_size),)
        cut = {"groups": topology.etp, "layers": layers}
        bias1 = fc1.replace(".weight", ".bias")
        bias2 = fc2.replace(".weight", ".bias")
        return [
            whole(prefix + "router.weight", LAYER, ROUTER, layers=layers),
            whole(prefix + "router.bias", LAYER, ROUTER_BIAS, layers=layers),
            Parameter(fc1, LAYER, (Part(GATE_UP),), dim=0, units=units, **cut),
            Parameter(bias1, LAYER, (Part(GATE_UP_BIAS),), dim=0, **cut),
            Parameter(fc2, LAYER, (Part(DOWN),), dim=1, **cut),
            whole(bias2, LAYER, DOWN_BIAS, layers=layers),
        ]

    def sglang(
        self, sizes: Sizes, topology: GeneratorTopology, device: str, layers: Layers | None
    ) -> list[Parameter]:
        """SGLang's parameters.

        Among ranks that share an expert, the first has the bias of `down`, the others zeros. Biases
        are float32.
        """
        moe_tp = topology.tp // topology.ep
        rows = self._sglang_rows(topology, device)
        units = (("ffn rows of an expert", rows),)
        w13, w2 = self.quantised
        gate_up = (Part(GATE_UP, 2 * rows),)
        gate_up_bias = (Part(GATE_UP_BIAS, 2 * rows),)
        down_bias = (Part(DOWN_BIAS, sizes.hidden_size * moe_tp),)
        cut = {"groups": moe_tp, "layers": layers}
        return [
            whole(ROUTER, LAYER, ROUTER, layers=layers),
            whole(ROUTER_BIAS, LAYER, ROUTER_BIAS, layers=layers),
            Parameter(w13, LAYER, gate_up, dim=0, units=units, **cut),
            Parameter(w13 + "_bias", LAYER, gate_up_bias, dim=0, dtype="float32", **cut),
            Parameter(w2, LAYER, (Part(DOWN, rows),), dim=1, **cut),
            Parameter(w2 + "_bias", LAYER, down_bias, dim=0, dtype="float32", **cut),
        ]

    def megatron_settings(self, sizes: Sizes, layer_spec: str) -> dict[str, Any]:
        settings = super().megatron_settings(sizes, layer_spec)
        # without Transformer Engine, `trainer.layers.PairedRows` does it
        return settings | {"moe_mlp_glu_interleave_size": 1 if layer_spec == "te" else None}


def stacked() -> tuple[Parameter, ...]:
    """The tensors of a checkpoint; each has all experts of a layer."""
    return tuple(
        Parameter(
            name.replace(".{expert}", ""), LAYER, (Part(name),), transposed=name in (GATE_UP, DOWN)
        )
        for name in (GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS)
    )
