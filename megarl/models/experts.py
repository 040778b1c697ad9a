"""The router, the routed and the shared experts of a mixture of experts.

Checkpoints differ only in names: `module` is "mlp" (gate_proj, up_proj, down_proj) or
"block_sparse_moe" (Mixtral: w1, w3, w2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models import mlp
from megarl.models.block import Sizes
from megarl.models.mlp import SGLANG_CPU_PADDING
from megarl.models.parameters import LAYER, Layers, LogicalTensor, Parameter, Part, round_up, whole

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
SHARED_GATE = _L + "mlp.shared_expert_gate.weight"


@dataclass(frozen=True)
class Experts:
    """Its settings; the default means that the model does not have the feature."""

    BIASES: ClassVar = False  # of the router and the experts

    count: int
    per_token: int
    intermediate_size: int
    shared_size: int = 0  # intermediate size of all shared experts together
    shared_gate: bool = False  # the shared expert's output is multiplied by a sigmoid
    first_layer: int = 0  # layers before it have a dense MLP
    score_function: str = "softmax"  # of the router: "softmax" | "sigmoid"
    norm_topk_prob: bool = True  # scale the weights of the chosen experts to sum 1
    router_bias: bool = False  # a bias added to the scores only to choose experts
    groups: int = 0  # experts are chosen within `topk_groups` of these groups
    topk_groups: int = 0
    scaling_factor: float = 1.0
    module: str = "mlp"
    router_dtype: str | None = None  # of SGLang's weight, if it differs from the model's
    # Whether files stack the experts of a layer in one tensor. No shape depends on it.
    stacked: bool = field(default=False, compare=False)

    def logical(self, sizes: Sizes, layers: Layers | None) -> list[LogicalTensor]:
        gate, up, down = _names(self.module)
        rows = self.intermediate_size
        hidden = sizes.hidden_size
        tensors = [LogicalTensor(self._router, (self.count, hidden), LAYER, layers)]
        if self.router_bias:
            tensors.append(
                LogicalTensor(self._router_bias, (self.count,), LAYER, layers, dtype="float32")
            )
        for name, shape in ((gate, (rows, hidden)), (up, (rows, hidden)), (down, (hidden, rows))):
            tensors.append(LogicalTensor(name, shape, LAYER, layers, self.count))
        return tensors

    def megatron(
        self, topology: TrainerTopology, layer_spec: str, layers: Layers | None
    ) -> list[Parameter]:
        gate, up, down = _names(self.module)
        units = (("ffn rows of an expert", self.intermediate_size),)
        prefix = "decoder.layers.{layer}.mlp."
        names = prefix + "experts." + MEGATRON_NAMES[layer_spec]
        parameters = [whole(prefix + "router.weight", LAYER, self._router, layers=layers)]
        if self.router_bias:  # this buffer is always float32 (moe/router.py)
            name = prefix + "router.expert_bias"
            parameters.append(whole(name, LAYER, self._router_bias, layers=layers, dtype="float32"))
        cut = {"groups": topology.etp, "layers": layers}
        return parameters + [
            Parameter(names % 1, LAYER, (Part(gate), Part(up)), dim=0, units=units, **cut),
            Parameter(names % 2, LAYER, (Part(down),), dim=1, **cut),
        ]

    def sglang(
        self, sizes: Sizes, topology: GeneratorTopology, device: str, layers: Layers | None
    ) -> list[Parameter]:
        """Each of `ep` shards has a contiguous run of experts, sharded over its tp / ep ranks (moe
        tp).
        """
        moe_tp = topology.tp // topology.ep
        rows = self._sglang_rows(topology, device)
        gate, up, down = _names(self.module)
        units = (("ffn rows of an expert", rows),)
        cut = {"groups": moe_tp, "layers": layers}
        w13, w2 = self.quantised[-2:]
        fused = (Part(gate, rows), Part(up, rows))
        router = self._router
        parameters = [
            Parameter(w13, LAYER, fused, dim=0, units=units, **cut),
            Parameter(w2, LAYER, (Part(down, rows),), dim=1, **cut),
            whole(router, LAYER, router, layers=layers, dtype=self.router_dtype),
        ]
        if self.router_bias:
            bias = self._router_bias
            parameters.append(whole(bias, LAYER, bias, layers=layers, dtype="float32"))
        return parameters

    @property
    def quantised(self) -> tuple[str, ...]:
        """The SGLang parameters that are in fp8 when the engine is quantised."""
        shared = mlp.quantised(self.shared_module) if self.shared_size else ()
        prefix = f"{_L}{self.module}.experts."
        return *shared, prefix + "w13_weight", prefix + "w2_weight"

    def _sglang_rows(self, topology: GeneratorTopology, device: str) -> int:
        if device == "cpu":
            return round_up(self.intermediate_size, topology.tp * SGLANG_CPU_PADDING)
        return self.intermediate_size

    @property
    def _router(self) -> str:
        return f"{_L}{self.module}.gate.weight"

    @property
    def _router_bias(self) -> str:
        return f"{_L}{self.module}.gate.e_score_correction_bias"

    @property
    def shared_module(self) -> str:
        return mlp.GATED_SHARED if self.shared_gate else mlp.SHARED

    def shared_logical(self, sizes: Sizes, layers: Layers) -> list[LogicalTensor]:
        if not self.shared_size:
            return []
        hidden = sizes.hidden_size
        tensors = mlp.logical(hidden, self.shared_size, self.shared_module, layers)
        if self.shared_gate:
            tensors.append(LogicalTensor(SHARED_GATE, (1, hidden), LAYER, layers))
        return tensors

    def shared_megatron(self, topology: TrainerTopology, layers: Layers) -> list[Parameter]:
        if not self.shared_size:
            return []
        parameters = mlp.megatron(topology, self.shared_size, self.shared_module, layers)
        if self.shared_gate:
            name = f"decoder.layers.{{layer}}.{mlp.SHARED}.gate_weight"
            parameters.append(whole(name, LAYER, SHARED_GATE, layers=layers))
        return parameters

    def shared_sglang(
        self, topology: GeneratorTopology, device: str, layers: Layers
    ) -> list[Parameter]:
        if not self.shared_size:
            return []
        parameters = mlp.sglang(topology, device, self.shared_size, self.shared_module, layers)
        if self.shared_gate:
            parameters.append(whole(SHARED_GATE, LAYER, SHARED_GATE, layers=layers))
        return parameters

    def problems(self) -> Iterator[str]:
        """Problems with routers that Megatron cannot train, or that it computes differently from
        Hugging Face and SGLang.
        """
        if self.per_token > self.count:
            yield (
                f"num_experts_per_tok = {self.per_token} must be at most the number of "
                f"experts, {self.count}"
            )
        if self.groups and (self.count % self.groups or self.topk_groups > self.groups):
            yield (
                f"n_group = {self.groups} must divide the {self.count} experts, and be at least "
                f"topk_group = {self.topk_groups}"
            )
        if self.topk_groups < self.groups and self.per_token != 2 * self.topk_groups:
            # Megatron scores a group by num_experts_per_tok // topk_group of its experts, Hugging
            # Face and SGLang by two.
            yield (
                f"num_experts_per_tok = {self.per_token} must be twice topk_group = "
                f"{self.topk_groups}"
            )
        if self.score_function == "sigmoid" and not self.norm_topk_prob:
            yield "norm_topk_prob must be true for a router of sigmoid scores"
        if self.per_token == 1 and self.norm_topk_prob:
            yield "norm_topk_prob=true with one expert per token: the router would never learn"

    def megatron_settings(self, sizes: Sizes, layer_spec: str) -> dict[str, Any]:
        """Arguments of Megatron's TransformerConfig.

        No loss is added to the algorithm's: no load balancing, no z-loss. No token is dropped.
        """
        limited = self.topk_groups < self.groups
        # (A list, even of ones, would change how checkpoints name layers.)
        frequency: int | list[int] = 1
        if self.first_layer:
            frequency = [int(layer >= self.first_layer) for layer in range(sizes.num_layers)]
        return {
            "ffn_hidden_size": sizes.intermediate_size or self.intermediate_size,
            "num_moe_experts": self.count,
            "moe_ffn_hidden_size": self.intermediate_size,
            "moe_router_topk": self.per_token,
            "moe_router_score_function": self.score_function,
            # softmax over all experts, or else over the chosen ones
            "moe_router_pre_softmax": not self.norm_topk_prob,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": layer_spec == "te",
            "moe_layer_freq": frequency,
            "moe_shared_expert_intermediate_size": self.shared_size or None,
            "moe_shared_expert_gate": self.shared_gate,
            "moe_router_num_groups": self.groups if limited else None,
            "moe_router_group_topk": self.topk_groups if limited else None,
            "moe_router_topk_scaling_factor": self.scaling_factor,
            # The bias balanced the experts during pretraining; here it does not change.
            "moe_router_enable_expert_bias": self.router_bias,
            "moe_router_bias_update_rate": 0.0,
        }

    def activation_elements(self, sizes: Sizes, etp: int, parts: int) -> float:
        """Elements per token that a trainer keeps of the routed experts: the router in fp32 (two
        16-bit elements each), tokens permuted before and after they are sent, and `parts` values
        for each of the experts' rows.
        """
        per_expert = 2 * sizes.hidden_size + parts * self.intermediate_size / etp
        return 2 * sizes.hidden_size + 4 * self.count + self.per_token * per_expert


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


def _names(module: str) -> tuple[str, str, str]:
    gate, up, down = (
        f"{_L}{module}.experts.{{expert}}.{projection}.weight"
        for projection in _PROJECTIONS[module]
    )
    return gate, up, down
