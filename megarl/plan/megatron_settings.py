"""Checks `trainer.megatron`, `trainer.ddp` and `trainer.optimizer.megatron`: fields of Megatron's classes, passed on as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megarl.config.keys import yaml_text
from megarl.config.schema import RunConfig
from megarl.plan.megatron_arguments import CLASSES, arguments, version
from megarl.plan.vendor_arguments import misfits, nearest

_SHAPE = "model.path, whose config.json decides it"
_STAGES = "trainer.pp and trainer.vpp"
BY_KEY = {
    "trainer.megatron": {
        **dict.fromkeys(
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization layernorm_epsilon "
            "gated_linear_unit add_bias_linear add_qkv_bias qk_layernorm multi_latent_attention num_moe_experts moe_ffn_hidden_size "
            "moe_layer_freq moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor "
            "moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias moe_shared_expert_intermediate_size "
            "softmax_scale rotary_interleaved layernorm_zero_centered_gamma".split(),
            _SHAPE,
        ),
        "tensor_model_parallel_size": "trainer.tp",
        "pipeline_model_parallel_size": "trainer.pp",
        "virtual_pipeline_model_parallel_size": "trainer.vpp",
        "context_parallel_size": "trainer.cp",
        "expert_model_parallel_size": "trainer.ep",
        "expert_tensor_parallel_size": "trainer.etp",
        "sequence_parallel": "trainer.sequence_parallel",
        "num_layers_in_first_pipeline_stage": "trainer.first_stage_layers",
        "num_layers_in_last_pipeline_stage": "trainer.last_stage_layers",
        "account_for_embedding_in_pipeline_split": "trainer.first_stage_layers",
        "account_for_loss_in_pipeline_split": "trainer.last_stage_layers",
        **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16"), "model.dtype"),
        **dict.fromkeys(("overlap_p2p_comm", "batch_p2p_comm", "variable_seq_lengths", "deallocate_pipeline_outputs"), _STAGES),
        "moe_enable_routing_replay": "trainer.routing_replay",
    },
    "trainer.ddp": {"use_distributed_optimizer": "trainer.zero"},
    "trainer.optimizer.megatron": {
        "lr": "trainer.optimizer.lr",
        "min_lr": "trainer.optimizer.min_lr_ratio",
        "weight_decay": "trainer.optimizer.weight_decay",
        **dict.fromkeys(("adam_beta1", "adam_beta2"), "trainer.optimizer.betas"),
        "adam_eps": "trainer.optimizer.eps",
        "clip_grad": "trainer.optimizer.clip_grad",
        **dict.fromkeys(("bf16", "params_dtype"), "model.dtype"),
        "use_distributed_optimizer": "trainer.zero",
    },
}
_LOSS = "the loss is the algorithm's alone, and its denominator would not fit another"
_DROPS = "training and generation would compute with different experts"
_LAYOUT = "weights are read as the layout has them, and it would put them elsewhere"
_OTHER_MODEL = "the engines do not compute it"
_LOSS_SCALING = "float16 is not trained in: model.dtype is float32 or bfloat16"
_MASTERS = "checkpoints hold float32 master weights and moments, and compare them with what the model computes with"
REFUSED = {
    "trainer.megatron": {
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), "log-probs that are trained on would differ from those of the engines"),
        **dict.fromkeys(("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type", "mtp_num_layers"), _LOSS),
        **dict.fromkeys(
            "moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_token_dropping moe_input_jitter_eps "
            "moe_router_force_load_balancing moe_router_force_biased".split(),
            _DROPS,
        ),
        **dict.fromkeys(
            "gtp_weight_remat_size expert_gtp_weight_remat_size tensor_parallel_num_weight_shards "
            "expert_tensor_parallel_num_weight_shards moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size "
            "moe_single_grouped_weight moe_single_grouped_bias".split(),
            _LAYOUT,
        ),
        **dict.fromkeys(
            "window_size experimental_attention_variant qk_l2_norm attention_output_gate no_rope_freq softmax_type glu_linear_offset "
            "activation_func_clamp_value moe_apply_probs_on_input moe_latent_size moe_shared_expert_gate mrope_section "
            "linear_attention_freq heterogeneous_block_specs use_mup".split(),
            _OTHER_MODEL,
        ),
        **dict.fromkeys(("fp16", "grad_scale_func"), _LOSS_SCALING),
        **dict.fromkeys(("qk_clip", "moe_router_bias_update_rate"), "weights would change outside the optimizer"),
        **dict.fromkeys(("fp8_param", "fp4_param"), "weights are read for the engines as model.dtype has them"),
        "calculate_per_token_loss": "the trainer divides the loss itself",
        "finalize_model_grads_func": "the trainer sets it",
        "use_cpu_initialization": "the trainer sets it",
        "perform_initialization": "weights come from a checkpoint, but Megatron's initialisation marks how parameters are split",
    },
    "trainer.ddp": {
        **dict.fromkeys(
            ("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy"), "weights are read whole after each step"
        ),
        "overlap_param_gather": "weights are read whole for the engines after each step, so a gather has nothing to hide behind",
        "average_in_collective": "gradients are sums; the loss is divided by its denominator once",
        "grad_reduce_in_fp32": "gradients are reduced in float32",
        "num_distributed_optimizer_instances": _MASTERS,
    },
    "trainer.optimizer.megatron": {
        "decoupled_weight_decay": "the optimizer is AdamW",
        **dict.fromkeys(("decoupled_lr", "decoupled_min_lr"), "all parameters have the same learning rate"),
        **dict.fromkeys(("optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload", "main_params_dtype"), _MASTERS),
        "use_layer_wise_distributed_optimizer": _MASTERS,
        **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "store_param_remainders"), _MASTERS),
        **dict.fromkeys(("fp16", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), _LOSS_SCALING),
        **dict.fromkeys(("overlap_param_gather", "overlap_param_gather_with_optimizer_step"), "weights are read whole after each step"),
    },
}
AT_LEAST = {("trainer.ddp", "bucket_size"): 1}  # with less each parameter would be a bucket of its own
_NOT_TEXT = ("Callable", "RecipeConfig", "dtype", "PipelineParallelLayerLayout")  # types no YAML value can have


def check_megatron_settings(config: RunConfig) -> Iterable[str]:
    """Refuses fields that Megatron does not have, that other keys decide, and that would break what the run relies on."""
    trainer, of_optimizer = config.trainer, "trainer.optimizer.megatron"
    for key, table, settings in (
        ("trainer.megatron", "trainer.megatron", trainer.megatron),
        ("trainer.ddp", "trainer.ddp", trainer.ddp),
        (of_optimizer, of_optimizer, trainer.optimizer.megatron),
        ("critic.optimizer.megatron", of_optimizer, config.critic.optimizer.megatron),
        ("sft.optimizer.megatron", of_optimizer, config.sft.optimizer.megatron),
        ("reward_model.optimizer.megatron", of_optimizer, config.reward_model.optimizer.megatron),
    ):
        known = arguments(table) if settings else {}
        for name, value in settings.items():
            for problem in _problems(table, str(name), value, known):
                yield f"{key}.{name}={yaml_text(value)}: {problem}"
    if trainer.recompute and "recompute_granularity" in trainer.megatron:
        yield "trainer.megatron.recompute_granularity: must be left out with trainer.recompute=true, which recomputes everything"


def _problems(key: str, name: str, value: Any, known: Mapping[str, Any]) -> Iterator[str]:
    if name in BY_KEY[key]:
        yield f"must be set by {BY_KEY[key][name]}"
    elif name in REFUSED[key]:
        yield f"must be left out; {REFUSED[key][name]}"
    elif known and name not in known:
        near = nearest(name, known)
        meant = f"did you mean {BY_KEY[key].get(near, near)}?" if near else f"it is no field of {CLASSES[key][-1][1]}"
        yield f"unknown to megatron-core {version()}; {meant}"
    elif known and any(part in known[name].annotation for part in _NOT_TEXT):
        yield f"must be left out; it is a {known[name].annotation}, which a config cannot state"
    elif (least := AT_LEAST.get((key, name))) is not None and type(value) is int and value < least:
        yield f"must be at least {least}"
    elif known:
        yield from misfits(known[name], value)
