"""Qwen3-MoE: Qwen3's attention; every layer is a mixture of experts without shared experts."""

from __future__ import annotations

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models import attention, experts, sparse
from megarl.models.dense import read_common
from megarl.models.parameters import LogicalTensor, Parameter
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
MODULE = "mlp"


def read_spec(reader: ConfigReader) -> ModelSpec:
    """Raises ConfigError also if some layers are dense."""
    reader.expect("attention_bias", False, False)
    reader.expect("use_sliding_window", False, False)
    reader.expect("decoder_sparse_step", 1, 1)
    reader.expect("mlp_only_layers", [], [])
    return read_common(
        reader,
        "qwen3_moe",
        qk_norm=True,
        head_dim=reader.integer("head_dim", 128),
        intermediate_size=0,
        num_experts=reader.integer("num_experts", reader.values.get("num_local_experts")),  # transformers 5's name
        experts_per_token=reader.integer("num_experts_per_tok"),
        expert_intermediate_size=reader.integer("moe_intermediate_size"),
        norm_topk_prob=reader.flag("norm_topk_prob", False),
    )


def logical_tensors(spec: ModelSpec) -> tuple[LogicalTensor, ...]:
    return sparse.logical_tensors(spec, MODULE)


def megatron_parameters(spec: ModelSpec, topology: TrainerTopology, layer_spec: str) -> tuple[Parameter, ...]:
    return sparse.megatron_parameters(spec, topology, layer_spec, MODULE)


def sglang_parameters(spec: ModelSpec, topology: GeneratorTopology, device: str) -> tuple[Parameter, ...]:
    return sparse.sglang_parameters(spec, topology, device, MODULE)


def quantised_parameters(spec: ModelSpec) -> tuple[str, ...]:
    return attention.QUANTISED + experts.quantised(MODULE)
