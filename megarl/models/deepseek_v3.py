"""DeepSeek-V3 and R1: latent attention; a few dense layers, then mixtures with shared experts and a bias on the router's choice.

The multi-token-prediction layer (index num_hidden_layers in the checkpoint) is left out: neither side runs it. SGLang must be
started with disable_shared_experts_fusion, since it may otherwise keep the shared expert as one more routed expert.
"""

from __future__ import annotations

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.config.errors import ConfigError
from megarl.models import experts, latent_attention, mlp, vocabulary
from megarl.models.attention import sglang_norm
from megarl.models.dense import read_common
from megarl.models.parameters import Layers, LogicalTensor, Parameter
from megarl.models.registry import ConfigReader
from megarl.models.spec import ModelSpec

ARCHITECTURES = ("DeepseekV3ForCausalLM",)
_ALLOWED = {
    "attention_bias": False,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "rms_norm_eps": 1e-6,  # Hugging Face always uses this for the two norms inside attention, SGLang uses config.json's value
}
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read_spec(reader: ConfigReader) -> ModelSpec:
    for key, allowed in _ALLOWED.items():
        reader.expect(key, allowed, allowed)
    _, scaling = reader.rope()
    if missing := [key for key in _YARN if scaling and key not in scaling]:  # Hugging Face and SGLang have different defaults
        raise ConfigError(f"{reader.source}: rope_scaling lacks {', '.join(missing)}")
    nope, rope = reader.integer("qk_nope_head_dim"), reader.integer("qk_rope_head_dim")
    expert_rows = reader.integer("moe_intermediate_size")
    return read_common(
        reader,
        "deepseek_v3",
        head_dim=nope + rope,
        num_experts=reader.integer("n_routed_experts"),
        experts_per_token=reader.integer("num_experts_per_tok"),
        expert_intermediate_size=expert_rows,
        shared_intermediate_size=reader.integer("n_shared_experts") * expert_rows,
        first_dense_layers=reader.integer("first_k_dense_replace"),
        score_function="sigmoid",
        norm_topk_prob=reader.flag("norm_topk_prob", True),
        router_bias=True,
        num_expert_groups=reader.integer("n_group"),
        topk_groups=reader.integer("topk_group"),
        routed_scaling_factor=reader.number("routed_scaling_factor", 1.0),
        q_lora_rank=reader.integer("q_lora_rank"),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=reader.integer("v_head_dim"),
    )


def logical_tensors(spec: ModelSpec) -> tuple[LogicalTensor, ...]:
    dense, sparse = _layers(spec)
    layers = latent_attention.logical(spec) + [mlp.norm(spec, dense), mlp.norm(spec, sparse)]
    layers += mlp.logical(spec, spec.intermediate_size, layers=dense) + experts.logical(spec, layers=sparse)
    return vocabulary.logical(spec, layers + mlp.logical(spec, spec.shared_intermediate_size, mlp.SHARED, sparse))


def megatron_parameters(spec: ModelSpec, topology: TrainerTopology, layer_spec: str) -> tuple[Parameter, ...]:
    dense, sparse = _layers(spec)
    layers = latent_attention.megatron(spec, topology, layer_spec)
    layers += [mlp.megatron_norm(layer_spec, dense), mlp.megatron_norm("local", sparse)]
    layers += mlp.megatron(topology, spec.intermediate_size, layers=dense)
    layers += experts.megatron(spec, topology, layer_spec, layers=sparse)
    layers += mlp.megatron(topology, spec.shared_intermediate_size, mlp.SHARED, sparse)
    return vocabulary.megatron(spec, topology, layers)


def sglang_parameters(spec: ModelSpec, topology: GeneratorTopology, device: str) -> tuple[Parameter, ...]:
    dense, sparse = _layers(spec)
    layers = latent_attention.sglang(spec, topology, device)
    layers += mlp.sglang(topology, device, spec.intermediate_size, layers=dense)
    layers += experts.sglang(spec, topology, device, layers=sparse)
    layers += mlp.sglang(topology, device, spec.shared_intermediate_size, mlp.SHARED, sparse)
    return vocabulary.sglang(spec, topology, device, layers + [sglang_norm(), mlp.sglang_norm(dense), mlp.sglang_norm(sparse)])


def quantised_parameters(spec: ModelSpec) -> tuple[str, ...]:
    """All linear layers except the router and the output layer, as in DeepSeek's own fp8 checkpoints."""
    dense = mlp.QUANTISED if spec.first_dense_layers else ()
    sparse = mlp.QUANTISED_SHARED + experts.quantised("mlp") if spec.first_dense_layers < spec.num_layers else ()
    return latent_attention.QUANTISED + dense + sparse


def _layers(spec: ModelSpec) -> tuple[Layers, Layers]:
    """Dense layers, layers with experts. Megatron names the norms before the two differently."""
    return (0, spec.first_dense_layers), (spec.first_dense_layers, spec.num_layers)
