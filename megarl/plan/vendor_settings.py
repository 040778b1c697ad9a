"""Checks the settings for Megatron and SGLang before anything starts.

vendor_arguments.json has the arguments of the pinned versions, so a machine without these packages
checks them too. tests/tools/vendor_arguments.py writes it.
"""

from __future__ import annotations

import builtins
import difflib
import functools
import json
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megarl.config.keys import yaml_text
from megarl.config.limits import did_you_mean, similar_names
from megarl.config.schema import RunConfig

VENDOR_ARGUMENTS = Path(__file__).with_name("vendor_arguments.json")
MEGATRON = "megatron-core"
SGLANG = "sglang"
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


@dataclass(frozen=True)
class Argument:
    """One argument.

    If its annotation uses the package's own names, the type is Any. If its choices do, they are
    None.
    """

    type: Any
    annotation: str
    choices: tuple[Any, ...] | None = None
    aliases: tuple[str, ...] = ()  # other names of its flag


@functools.cache
def vendor_table() -> Mapping[str, Any]:
    """Package -> its version, and section of the run's config -> its arguments by name."""
    return json.loads(VENDOR_ARGUMENTS.read_text(encoding="utf-8"))


def version_of(package: str) -> str:
    return vendor_table()[package]["version"]


@functools.cache
def vendor_arguments(package: str, section: str) -> Mapping[str, Argument]:
    """All arguments of a section such as "trainer.ddp" by name."""
    arguments = {}
    for name, fields in vendor_table()[package][section].items():
        choices = fields.get("choices")
        arguments[name] = Argument(
            type=as_type(fields["annotation"]),
            annotation=fields["annotation"],
            choices=None if choices is None else tuple(choices),
            aliases=tuple(fields.get("aliases", ())),
        )
    return arguments


def as_type(annotation: str) -> Any:
    """The type; Any if the annotation uses the package's own names."""
    try:
        return eval(annotation, vars(builtins) | vars(typing))
    except (NameError, TypeError, AttributeError):
        return Any


def misfits(argument: Argument, value: Any) -> Iterator[str]:
    """Problems with `value`, which follow the argument's name in a message."""
    try:
        msgspec.convert(value, argument.type)
    except msgspec.ValidationError:
        yield f"must be {_type_name(argument.type)}"
        return
    except TypeError:
        return  # only the package's own code can check this type
    if argument.choices is not None and value is not None:
        values = value if isinstance(value, list) else [value]
        wrong = [str(choice) for choice in values if choice not in argument.choices]
        if wrong:
            choices = sorted(map(str, argument.choices))
            suggestion = did_you_mean(similar_names(wrong[0], choices))
            yield f"must be one of {', '.join(choices)}{suggestion}"


def nearest(name: str, names: Iterable[str]) -> str | None:
    matches = difflib.get_close_matches(name, names, n=1)
    return matches[0] if matches else None


def _type_name(type_: Any) -> str:
    if type_ in _KINDS:
        return _KINDS[type_]
    choices, null = _literals(type_)
    if choices:
        return f"one of {', '.join(map(str, choices))}" + (" or null" if null else "")
    text = str(type_).replace("typing.", "").replace("NoneType", "None")
    for kind, name in _KINDS.items():
        if text == f"Optional[{kind.__name__}]":
            return f"{name} or null"
    return text


def _literals(type_: Any) -> tuple[tuple[Any, ...], bool]:
    """(the values of a Literal, or of an optional one; whether it is optional); no values for other
    types.
    """
    if typing.get_origin(type_) is typing.Literal:
        return typing.get_args(type_), False
    if typing.get_origin(type_) is not typing.Union:
        return (), False
    parts = [part for part in typing.get_args(type_) if part is not type(None)]
    if len(parts) == 1 and typing.get_origin(parts[0]) is typing.Literal:
        return typing.get_args(parts[0]), True
    return (), False


def mapping_of(names: Mapping[str, Argument]) -> dict[str, str]:
    """Name of a flag -> name of its argument."""
    return {alias: name for name, argument in names.items() for alias in (name, *argument.aliases)}


CLASSES = {  # key of the run's config -> the classes with its fields
    "trainer.megatron": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ),
    "trainer.ddp": (
        ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
    ),
    "trainer.optimizer.megatron": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}


_SHAPE = "model.path, whose config.json decides it"
_STAGES = "trainer.pp and trainer.vpp"
MEGATRON_BY_KEY = {
    "trainer.megatron": {
        **dict.fromkeys(
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups "
            "kv_channels normalization layernorm_epsilon "
            "gated_linear_unit add_bias_linear add_qkv_bias qk_layernorm multi_latent_attention "
            "num_moe_experts moe_ffn_hidden_size "
            "moe_layer_freq moe_router_topk moe_router_pre_softmax moe_router_score_function "
            "moe_router_topk_scaling_factor "
            "moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias "
            "moe_shared_expert_intermediate_size "
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
        **dict.fromkeys(
            (
                "overlap_p2p_comm",
                "batch_p2p_comm",
                "variable_seq_lengths",
                "deallocate_pipeline_outputs",
            ),
            _STAGES,
        ),
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
        **dict.fromkeys(
            (
                "optimizer_cpu_offload",
                "optimizer_offload_fraction",
                "use_precision_aware_optimizer",
            ),
            "trainer.optimizer.offload",
        ),
    },
}
_LOSS = "the loss is the algorithm's own, and a further term would have the wrong denominator"
_DROPS = "training and generation would compute with different experts"
_LAYOUT = "weights are read where the layout has them, and this would put them elsewhere"
_OTHER_MODEL = "the engines do not compute it"
_LOSS_SCALING = "float16 is not trained in: model.dtype is float32 or bfloat16"
_MASTERS = (
    "checkpoints hold float32 master weights and moments, and compare them with the model's weights"
)
MEGATRON_REFUSED = {
    "trainer.megatron": {
        **dict.fromkeys(
            ("hidden_dropout", "attention_dropout"),
            "the trainer's log-probs would differ from those of the engines",
        ),
        **dict.fromkeys(
            (
                "moe_aux_loss_coeff",
                "moe_z_loss_coeff",
                "moe_router_load_balancing_type",
                "mtp_num_layers",
            ),
            _LOSS,
        ),
        **dict.fromkeys(
            "moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_token_dropping "
            "moe_input_jitter_eps "
            "moe_router_force_load_balancing moe_router_force_biased".split(),
            _DROPS,
        ),
        **dict.fromkeys(
            "gtp_weight_remat_size expert_gtp_weight_remat_size tensor_parallel_num_weight_shards "
            "expert_tensor_parallel_num_weight_shards moe_mlp_glu_interleave_size "
            "moe_shared_expert_glu_interleave_size "
            "moe_single_grouped_weight moe_single_grouped_bias".split(),
            _LAYOUT,
        ),
        **dict.fromkeys(
            "window_size experimental_attention_variant qk_l2_norm attention_output_gate "
            "no_rope_freq softmax_type glu_linear_offset "
            "activation_func_clamp_value moe_apply_probs_on_input moe_latent_size "
            "moe_shared_expert_gate mrope_section "
            "linear_attention_freq heterogeneous_block_specs use_mup".split(),
            _OTHER_MODEL,
        ),
        **dict.fromkeys(("fp16", "grad_scale_func"), _LOSS_SCALING),
        **dict.fromkeys(
            ("qk_clip", "moe_router_bias_update_rate"), "weights would change outside the optimizer"
        ),
        **dict.fromkeys(
            ("fp8_param", "fp4_param"), "weights are read for the engines as model.dtype has them"
        ),
        "calculate_per_token_loss": "the trainer divides the loss itself",
        "finalize_model_grads_func": "the trainer sets it",
        "use_cpu_initialization": "the trainer sets it",
        "perform_initialization": "weights come from a checkpoint, but Megatron's initialisation "
        "marks how parameters are split",
    },
    "trainer.ddp": {
        **dict.fromkeys(
            ("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy"),
            "weights are read whole after each step",
        ),
        "overlap_param_gather": "weights are read whole for the engines after each step, so a "
        "gather has nothing to hide behind",
        "average_in_collective": "gradients are sums; the loss is divided by its denominator once",
        "grad_reduce_in_fp32": "gradients are reduced in float32",
        "num_distributed_optimizer_instances": _MASTERS,
    },
    "trainer.optimizer.megatron": {
        "decoupled_weight_decay": "the optimizer is AdamW",
        **dict.fromkeys(
            ("decoupled_lr", "decoupled_min_lr"), "all parameters have the same learning rate"
        ),
        **dict.fromkeys(("optimizer", "main_params_dtype"), _MASTERS),
        "use_layer_wise_distributed_optimizer": _MASTERS,
        **dict.fromkeys(
            ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "store_param_remainders"),
            _MASTERS,
        ),
        **dict.fromkeys(
            (
                "fp16",
                "loss_scale",
                "initial_loss_scale",
                "min_loss_scale",
                "loss_scale_window",
                "hysteresis",
            ),
            _LOSS_SCALING,
        ),
        **dict.fromkeys(
            ("overlap_param_gather", "overlap_param_gather_with_optimizer_step"),
            "weights are read whole after each step",
        ),
    },
}
MINIMUM = {("trainer.ddp", "bucket_size"): 1}  # otherwise each parameter would be its own bucket
# types that no YAML value has
_NOT_TEXT = ("Callable", "RecipeConfig", "dtype", "PipelineParallelLayerLayout")


def check_megatron_settings(config: RunConfig) -> Iterable[str]:
    """Refuses fields that Megatron lacks, that other keys decide, or that would break an assumption
    of the run.
    """
    trainer = config.trainer
    for key, settings in (
        ("trainer.megatron", trainer.megatron),
        ("trainer.ddp", trainer.ddp),
        ("trainer.optimizer.megatron", trainer.optimizer.megatron),
    ):
        arguments = vendor_arguments(MEGATRON, key)
        for name, value in settings.items():
            for problem in _problems(key, str(name), value, arguments):
                yield f"{key}.{name}={yaml_text(value)}: {problem}"
    if trainer.recompute and "recompute_granularity" in trainer.megatron:
        yield (
            "trainer.megatron.recompute_granularity: must be left out with "
            "trainer.recompute=true, which recomputes everything"
        )


def _problems(key: str, name: str, value: Any, arguments: Mapping[str, Any]) -> Iterator[str]:
    minimum = MINIMUM.get((key, name))
    if name in MEGATRON_BY_KEY[key]:
        yield f"must be set by {MEGATRON_BY_KEY[key][name]}"
    elif name in MEGATRON_REFUSED[key]:
        yield f"must be left out; {MEGATRON_REFUSED[key][name]}"
    elif name not in arguments:
        near = nearest(name, arguments)
        hint = f"it is no field of {CLASSES[key][-1][1]}"
        if near:
            hint = f"did you mean {MEGATRON_BY_KEY[key].get(near, near)}?"
        yield f"unknown to megatron-core {version_of(MEGATRON)}; {hint}"
    elif any(part in arguments[name].annotation for part in _NOT_TEXT):
        yield f"must be left out; it is a {arguments[name].annotation}, which a config cannot state"
    elif minimum is not None and type(value) is int and value < minimum:
        yield f"must be at least {minimum}"
    else:
        yield from misfits(arguments[name], value)


SGLANG_BY_KEY = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    "dtype": "model.dtype",
    "tp": "generator.tp",
    "tp_size": "generator.tp",
    "ep_size": "generator.ep",
    "attn_dp_size": "generator.dp_attention",
    "enable_dp_attention": "generator.dp_attention",
    "quantization": "generator.quantization",
    "max_total_tokens": "generator.kv_cache_tokens",
    "max_running_requests": "generator.max_concurrency",
    "mem_fraction_static": "generator.mem_fraction",
    "random_seed": "seed",
    "enable_deterministic_inference": "deterministic",
    "enable_return_routed_experts": "trainer.routing_replay",
    "enable_lora": "lora.sync",
    "max_lora_rank": "lora.rank",
    "lora_target_modules": "lora.targets",
    "experts_shared_outer_loras": "lora.experts",
    "speculative_algorithm": "generator.speculative.algorithm",
    "speculative_draft_model_path": "generator.speculative.path",
    "speculative_num_steps": "generator.speculative.steps",
    "speculative_num_draft_tokens": "generator.speculative.steps",
}
SET_BY_LAUNCHER = (
    "host port api_key admin_api_key base_gpu_id custom_weight_loader weight_version "
    "skip_tokenizer_init sampling_defaults device nnodes node_rank dist_init_addr "
    "context_length disable_shared_experts_fusion sampling_mask_max_tokens "
    "max_loras_per_batch enable_lora_overlap_loading"
).split()
_MOVED = "weights are written to the experts where the layout has them, and it would "
_COPIES = "it may compute with copies of the weights, which no update writes"
_NO_LAYOUT = "the layout by which weights are written does not know it"
_NO_KEYS = "requests go by HTTP with a key, and this would serve them in another way"
_ROW = "a draft is one row of tokens"
SGLANG_REFUSED = {
    **dict.fromkeys(
        "speculative_eagle_topk speculative_ngram_min_bfs_breadth "
        "speculative_ngram_max_bfs_breadth".split(),
        _ROW,
    ),
    **dict.fromkeys("enable_nvidia_megakernel enable_amd_monokernel".split(), _COPIES),
    **dict.fromkeys(
        "pp_size moe_dense_tp_size dp_size moe_dp_size attn_cp_size enable_dp_lm_head".split(),
        _NO_LAYOUT,
    ),
    **dict.fromkeys(
        "smg_grpc_mode grpc_mode grpc_port ssl_keyfile ssl_certfile".split(),
        _NO_KEYS,
    ),
    "enable_eplb": f"{_MOVED}move them",
    "init_expert_location": f"{_MOVED}place them elsewhere",
    "ep_num_redundant_experts": "only one copy of an expert is written to",
    "elastic_ep_backend": f"{_MOVED}move them",
    "speculative_token_map": "the draft model would keep its own copy of the output layer, which "
    "no update writes",
    "speculative_draft_model_quantization": "the draft model has the format of the engine",
    "speculative_draft_load_format": "the launcher decides where the draft model's weights come "
    "from",
    "speculative_accept_threshold_single": "tokens would be kept that the policy would not have "
    "sampled",
    "speculative_accept_threshold_acc": "tokens would be kept that the policy would not have "
    "sampled",
    "enable_multi_layer_eagle": "one layer for multi-token prediction is known",
    "enable_paged_experts": f"{_MOVED}move them",
    "cpu_offload_gb": "weights are written in place, and this would move them",
    "offload_group_size": "weights are written in place, and this would move them",
    "lora_paths": "engines serve the adapter that is trained (lora.rank), and the trainer does "
    "not score what another adds",
    "is_embedding": "the launcher decides what engines answer",
    "disaggregation_mode": "each engine must prefill and decode",
    "delete_ckpt_after_loading": "it removes the weights that engines are started again with",
    "sampling_backend": "each sample has a seed, which only SGLang's sampler in PyTorch takes "
    "with top_p, top_k or min_p",
    "use_ray": "the launcher starts an engine's processes",
}
# No update writes to the weights of a frozen model, so its engines may keep them in any form.
FROZEN = "tp tp_size ep_size max_total_tokens max_running_requests mem_fraction_static".split()
REFUSED_FROZEN = (
    "is_embedding disaggregation_mode delete_ckpt_after_loading use_ray smg_grpc_mode "
    "grpc_mode grpc_port ssl_keyfile ssl_certfile"
).split()
# FlashInfer's stores up before gate, in a tensor of the same shape; others repack the experts
MOE_RUNNERS = ("triton", "deep_gemm")


def check_server_args(config: RunConfig) -> Iterable[str]:
    """Checks the arguments of the policy's engines and of the roles' engines.

    Refuses arguments that SGLang does not know or that other keys decide. Refuses arguments that
    the run must set itself, to keep strangers out and to know mu, the behaviour policy. Refuses
    arguments that make SGLang compute with other weights than were written, since the audit would
    not see that.
    """
    settings = config.generator.server_args
    yield from _check("generator", settings, SGLANG_BY_KEY, _refusal)
    for name, role in config.roles.items():
        if role is not None:
            key = f"roles.{name}"
            by_key = {
                argument: SGLANG_BY_KEY[argument].replace("generator", key, 1)
                for argument in FROZEN
            }
            by_key |= {
                "model_path": f"{key}.path",
                "tokenizer_path": f"{key}.path",
                "dtype": "model.dtype",
                "random_seed": "seed",
            }
            yield from _check(key, role.server_args, by_key, _refusal_if_frozen)


def _check(
    section: str,
    settings: Mapping[str, Any],
    by_key: Mapping[str, str],
    refusal: Callable[[str, Any], str | None],
) -> Iterable[str]:
    arguments = vendor_arguments(SGLANG, "generator.server_args")
    for name, value in settings.items():
        for problem in _problems_with_argument(name, value, arguments, by_key, refusal):
            yield f"{section}.server_args.{name}={yaml_text(value)}: {problem}"


def _problems_with_argument(
    name: str,
    value: Any,
    arguments: Mapping[str, Argument],
    by_key: Mapping[str, str],
    refusal: Callable[[str, Any], str | None],
) -> Iterable[str]:
    reason = refusal(name, value)
    if name in by_key:
        yield f"must be set by {by_key[name]}"
    elif name in SET_BY_LAUNCHER:
        yield "must be left out; the launcher decides it"
    elif reason is not None:
        yield reason
    elif name not in arguments:
        yield f"unknown to SGLang {version_of(SGLANG)}; {_hint(str(name), arguments, by_key)}"
    else:
        yield from misfits(arguments[name], value)


def _refusal(name: str, value: Any) -> str | None:
    if name in SGLANG_REFUSED:
        return f"must be left out; {SGLANG_REFUSED[name]}"
    is_runner = name in ("moe_runner_backend", "speculative_moe_runner_backend")
    if is_runner and value not in MOE_RUNNERS:
        return f"must be {' or '.join(MOE_RUNNERS)}, which compute with experts as they are written"
    return None


def _refusal_if_frozen(name: str, _: Any) -> str | None:
    return f"must be left out; {SGLANG_REFUSED[name]}" if name in REFUSED_FROZEN else None


def _hint(name: str, arguments: Mapping[str, Argument], by_key: Mapping[str, str]) -> str:
    """Suggests the name that was meant.

    Flags are written with dashes, and some have several names.
    """
    flag = name.lstrip("-").replace("-", "_").lower()
    names_by_flag = mapping_of(arguments)
    near = flag if flag in names_by_flag else nearest(flag, names_by_flag)
    if near is None:
        return "python -m sglang.launch_server --help lists its arguments"
    argument = names_by_flag[near]
    return f"did you mean {by_key.get(argument, argument)}?"
