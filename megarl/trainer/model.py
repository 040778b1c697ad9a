"""Builds Megatron's GPTModel for a model shape and a place on the trainer's mesh, one for each virtual pipeline stage."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.config.schema import TrainerConfig
from megarl.models.parameters import padded_vocab_size
from megarl.models.spec import SCALAR, ModelSpec
from megarl.topology import TrainerTopology
from megarl.trainer.layer_spec import layer_spec
from megarl.trainer.layers import CausalAttention, LatentAttention, RMSNorm
from megarl.trainer.supported import passed_on
from megarl.trainer.values import ScalarHead

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
YARN_KEYS = {  # MLATransformerConfig's → those of config.json
    "rotary_scaling_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


def transformer_config(spec: ModelSpec, topology: TrainerTopology, dtype: torch.dtype, trainer: TrainerConfig) -> TransformerConfig:
    """Megatron's configuration of the decoder; it asks for fused CUDA kernels only if CUDA is present."""
    chosen = _chosen(spec, topology, dtype, trainer) | trainer.megatron
    if "attention_backend" in chosen:
        chosen["attention_backend"] = AttnBackend[chosen["attention_backend"]]
    with passed_on("trainer.megatron", trainer.megatron):
        return (MLATransformerConfig if spec.kv_lora_rank else TransformerConfig)(**chosen)


def _chosen(spec: ModelSpec, topology: TrainerTopology, dtype: torch.dtype, trainer: TrainerConfig) -> dict[str, Any]:
    cuda, fused = torch.cuda.is_available(), layer_spec() == "te"
    recompute_all: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return dict(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.intermediate_size or spec.expert_intermediate_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm or spec.kv_lora_rank > 0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp if topology.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=topology.first_stage_layers,
        num_layers_in_last_pipeline_stage=topology.last_stage_layers,
        context_parallel_size=topology.cp,
        sequence_parallel=trainer.sequence_parallel and topology.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not cuda,
        # Weights always come from a checkpoint or from hf_io.init_random, which does not depend on the topology. Megatron's own
        # initialisation must still run, because it marks parameters as split over tensor ranks.
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=fused,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        apply_rope_fusion=fused and not spec.kv_lora_rank,
        attention_softmax_in_fp32=True,
        # Microbatches have different shapes. Virtual stages tell each other those of what they send; others know them (pipeline.py).
        variable_seq_lengths=topology.vpp > 1,
        moe_token_dispatcher_type="alltoall",  # the default is refused with variable lengths, with or without experts
        # There are two ways to communicate between virtual stages; the batched one gives wrong gradients on gloo.
        overlap_p2p_comm=topology.vpp > 1,
        batch_p2p_comm=topology.vpp == 1,
        batch_p2p_sync=False,  # with True the host waits for the GPU after each message, for the sake of old versions of PyTorch
        # On gloo a send may still be reading the tensor when its storage is freed.
        deallocate_pipeline_outputs=cuda,
        # Gradients are plain sums; the denominator is part of the loss (see step.py).
        calculate_per_token_loss=True,
        **(recompute_all if trainer.recompute else {}),
        **(_expert_settings(spec, topology) if spec.num_experts else {}),
        **(_latent_settings(spec) if spec.kv_lora_rank else {}),
    )


def _expert_settings(spec: ModelSpec, topology: TrainerTopology) -> dict[str, Any]:
    """The settings of experts. The only loss is the algorithm's: no load balancing, no z-loss. No token is dropped."""
    limited = spec.topk_groups < spec.num_expert_groups
    return {
        "num_moe_experts": spec.num_experts,
        "moe_ffn_hidden_size": spec.expert_intermediate_size,
        "moe_router_topk": spec.experts_per_token,
        "moe_router_score_function": spec.score_function,
        "moe_router_pre_softmax": not spec.norm_topk_prob,  # softmax over all experts; otherwise over the chosen ones
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": layer_spec() == "te",
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.etp,
        # (A list, even of ones, would change how checkpoints name layers.)
        "moe_layer_freq": [int(layer >= spec.first_dense_layers) for layer in range(spec.num_layers)] if spec.first_dense_layers else 1,
        "moe_shared_expert_intermediate_size": spec.shared_intermediate_size or None,
        "moe_router_num_groups": spec.num_expert_groups if limited else None,
        "moe_router_group_topk": spec.topk_groups if limited else None,
        "moe_router_topk_scaling_factor": spec.routed_scaling_factor,
        # The bias balanced the experts while the model was pretrained; here it does not change.
        "moe_router_enable_expert_bias": spec.router_bias,
        "moe_router_bias_update_rate": 0.0,
    }


def _latent_settings(spec: ModelSpec) -> dict[str, Any]:
    """The settings of latent attention and its own rotary embedding: DeepSeek's YaRN, or a plain one."""
    yarn = spec.rope_scaling
    return dict(
        q_lora_rank=spec.q_lora_rank,
        kv_lora_rank=spec.kv_lora_rank,
        qk_head_dim=spec.qk_nope_head_dim,
        qk_pos_emb_head_dim=spec.qk_rope_head_dim,
        v_head_dim=spec.v_head_dim,
        rotary_base=spec.rope_theta,
        rope_type="yarn" if yarn else "rope",
        **({ours: yarn[theirs] for ours, theirs in YARN_KEYS.items()} if yarn else {}),
    )


def build_chunks(spec: ModelSpec, topology: TrainerTopology, config: TransformerConfig) -> list[GPTModel]:
    """This rank's part of the model (its pipeline stage and tensor slice), with unset weights: a chunk per virtual stage."""
    return [_build_chunk(spec, config, stage if topology.vpp > 1 else None) for stage in range(topology.vpp)]


def _build_chunk(spec: ModelSpec, config: TransformerConfig, stage: int | None) -> GPTModel:
    scaling = dict(spec.rope_scaling or {})
    model = GPTModel(
        config=config,
        transformer_layer_spec=cast(ModuleSpec, _layer_spec(spec, config, stage)),  # it takes both, and is annotated with one
        vocab_size=padded_vocab_size(spec.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,  # type: ignore[arg-type]
        seq_len_interpolation_factor=float(scaling["factor"]) if spec.rope_type == "linear" else None,
        vp_stage=stage,
    )
    if model.pre_process and spec.padding_token is not None:
        model.embedding.word_embeddings.register_forward_hook(partial(_without_padding, spec.padding_token))
    if spec.rope_type == "llama3":
        # GPTModel's own rope_scaling flag fixes all but the factor at Llama 3.1's values.
        rotary: Any = model.rotary_pos_emb  # which a checker takes for a tensor or any module
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq,
            factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_position_embeddings=scaling["original_max_position_embeddings"],
        )
    if model.post_process and spec.head == SCALAR:
        model.output_layer = ScalarHead(config)  # type: ignore[assignment]
    elif model.post_process:
        # Log-probs are made from hidden states (logprobs.py). The layer is still called, and so are DDP's hooks on it.
        model.output_layer.forward = _hidden_states  # type: ignore[method-assign]
    return model if not torch.cuda.is_available() else model.cuda()


def _without_padding(token: int, embedding: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """No gradient goes from lookups of the padding `token` into its embedding, as nn.Embedding has it (padding_idx). `inputs`: the ids
    [b, s]; `output` [b, s, h], or under sequence parallelism this rank's part of [s, b, h]."""
    ids = inputs[0]
    if embedding.reduce_scatter_embeddings:
        ids = ids.t().chunk(embedding.tp_group.size())[embedding.tp_group.rank()]
    return torch.where((ids == token)[..., None], output.detach(), output)


def _hidden_states(hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[Any, None]:
    """Stands in for the output layer's product: GPTModel returns the hidden states, [b, s, h]."""
    return hidden, None


def output_weight(chunk: GPTModel) -> torch.nn.Parameter:
    """The weight of the output layer, [padded vocabulary / tp, h], of a chunk that ends the model."""
    weight: Any = chunk.shared_embedding_or_output_weight() if chunk.share_embeddings_and_output_weights else chunk.output_layer.weight
    return weight


def parameters_by_name(chunks: list[GPTModel]) -> dict[str, torch.Tensor]:
    """This rank's parameters, and the routers' biases, which are not trained. Layers and experts have the numbers of the whole model, not
    those of the chunk and the rank."""
    named: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".router.expert_bias"))
        for name, parameter in (*chunk.named_parameters(), *biases):
            found = _LAYER.match(name)
            if found:
                layer: Any = chunk.decoder.layers[int(found[1])]
                name = f"decoder.layers.{layer.layer_number - 1}.{_global_expert(found[2], layer)}"
            named[name] = parameter
    return named


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|adapter\.[ab])))(\d+)(.*)")


def _global_expert(name: str, layer: Any) -> str:
    """The parameter `name` of a layer, with the expert's number among all experts."""
    found = _EXPERT.fullmatch(name)
    return f"{found[1]}{layer.mlp.local_expert_indices[int(found[2])]}{found[3]}" if found else name


def _layer_spec(spec: ModelSpec, config: TransformerConfig, stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    if layer_spec() == "te":
        if spec.first_dense_layers:
            return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
        own = {"num_experts": spec.num_experts or None, "moe_grouped_gemm": config.moe_grouped_gemm, "qk_layernorm": config.qk_layernorm}
        return get_gpt_layer_with_transformer_engine_spec(**own, multi_latent_attention=spec.kv_lora_rank > 0)
    first, count = get_transformer_layer_offset(config, vp_stage=stage), get_num_layers_to_build(config, vp_stage=stage)
    dense, sparse = (_local_layer_spec(spec, config, experts) for experts in (None, spec.num_experts or None))
    layers = [dense if layer < spec.first_dense_layers else sparse for layer in range(first, first + count)]
    norm: Any = RMSNorm  # a class, as Megatron's own specs give it; annotated is a module
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _local_layer_spec(spec: ModelSpec, config: TransformerConfig, experts: int | None) -> ModuleSpec:
    """The spec of a layer of Megatron's own modules, with the norms and attention of `layers`."""
    latent = spec.kv_lora_rank > 0
    layer = get_gpt_layer_local_spec(
        experts, config.moe_grouped_gemm, config.qk_layernorm, multi_latent_attention=latent, normalization="RMSNorm"
    )
    submodules: Any = layer.submodules  # annotated as any object
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    attention = submodules.self_attention.submodules
    attention.core_attention = LatentAttention if latent else CausalAttention
    for norm in ("q_layernorm", "kv_layernorm" if latent else "k_layernorm") if config.qk_layernorm else ():
        setattr(attention, norm, RMSNorm)
    return layer
