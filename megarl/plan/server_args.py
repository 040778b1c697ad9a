"""Checks `generator.server_args` against the arguments of SGLang, and against what other keys or the run itself decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megarl.config.keys import yaml_text
from megarl.config.schema import RunConfig
from megarl.plan.sglang_arguments import arguments, version
from megarl.plan.vendor_arguments import Argument, mapping_of, misfits, nearest

BY_KEY = {
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
    "enable_return_routed_experts": "trainer.routing_replay",
    "enable_lora": "lora.sync",
    "max_lora_rank": "lora.rank",
    "lora_target_modules": "lora.targets",
    "experts_shared_outer_loras": "lora.experts",
}
KEPT = frozenset(
    [
        "host",
        "port",
        "api_key",
        "admin_api_key",
        "base_gpu_id",
        "custom_weight_loader",
        "weight_version",
        "skip_tokenizer_init",
        "sampling_defaults",
        "device",
        "nnodes",
        "node_rank",
        "dist_init_addr",
        "context_length",
        "disable_shared_experts_fusion",
        "sampling_mask_max_tokens",
        "max_loras_per_batch",
        "enable_lora_overlap_loading",
    ]
)
_MOVED = "weights are written to the experts where the layout has them, and it would "
_COPIES = "it may compute with copies of the weights, which nobody writes to"
_NO_LAYOUT = "the layout that weights are written by does not know it"
_NO_KEYS = "requests go by HTTP with a key, and it would serve them otherwise"
REFUSED = {
    "enable_eplb": f"{_MOVED}move them",
    "init_expert_location": f"{_MOVED}place them elsewhere",
    "ep_num_redundant_experts": "only one copy of an expert is written to",
    "elastic_ep_backend": f"{_MOVED}move them",
    "speculative_algorithm": "nobody writes to the weights of a draft model",
    "pp_size": _NO_LAYOUT,
    "moe_dense_tp_size": _NO_LAYOUT,
    "dp_size": _NO_LAYOUT,
    "moe_dp_size": _NO_LAYOUT,
    "attn_cp_size": _NO_LAYOUT,
    "enable_dp_lm_head": _NO_LAYOUT,
    "enable_paged_experts": f"{_MOVED}move them",
    "enable_nvidia_megakernel": _COPIES,
    "enable_amd_monokernel": _COPIES,
    "cpu_offload_gb": "weights are written to where they lie, and it would move them",
    "offload_group_size": "weights are written to where they lie, and it would move them",
    "lora_paths": "engines serve the adapter that is trained (lora.rank), and the trainer does not score what another adds",
    "is_embedding": "the launcher decides what engines answer",
    "disaggregation_mode": "each engine must prefill and decode",
    "delete_ckpt_after_loading": "it removes the weights that engines are started again with",
    "use_ray": "the launcher starts an engine's processes",
    "smg_grpc_mode": _NO_KEYS,
    "grpc_mode": _NO_KEYS,
    "grpc_port": _NO_KEYS,
    "ssl_keyfile": _NO_KEYS,
    "ssl_certfile": _NO_KEYS,
}
# Nobody writes to the weights of a frozen model, so its engines may keep them as they like.
FROZEN = ("tp", "tp_size", "ep_size", "max_total_tokens", "max_running_requests", "mem_fraction_static")
REFUSED_FROZEN = ("is_embedding", "disaggregation_mode", "delete_ckpt_after_loading", "use_ray", "smg_grpc_mode", "grpc_mode", "grpc_port",
                  "ssl_keyfile", "ssl_certfile")  # fmt: skip
MOE_RUNNERS = ("triton", "deep_gemm")  # FlashInfer's store up before gate, in a tensor of the same shape; others repack the experts


def check_server_args(config: RunConfig) -> Iterable[str]:
    """Of the policy's engines and those of roles. Refuses arguments that SGLang does not know; that other keys decide; that the run must
    decide itself, to stay closed to strangers and to know mu; and with which SGLang would compute with other weights than those written,
    unseen by the audit."""
    truncated = config.rollout.truncated
    yield from _check("generator", config.generator.server_args, BY_KEY, lambda name, value: _refused(name, value, truncated))
    for name, role in config.roles.items():
        if role is not None:
            key = f"roles.{name}"
            by_key = {
                argument: key + of_generator.removeprefix("generator") for argument, of_generator in BY_KEY.items() if argument in FROZEN
            }
            by_key |= {"model_path": f"{key}.path", "tokenizer_path": f"{key}.path", "dtype": f"{key}.dtype", "random_seed": "seed"}
            yield from _check(
                key, role.server_args, by_key, lambda name, _: f"must be left out; {REFUSED[name]}" if name in REFUSED_FROZEN else None
            )


def _check(section: str, given: Mapping[str, Any], by_key: Mapping[str, str], refused: Callable[[str, Any], str | None]) -> Iterable[str]:
    known = arguments() if given else {}
    for name, value in given.items():
        shown = f"{section}.server_args.{name}={yaml_text(value)}"
        if name in by_key:
            yield f"{shown}: must be set by {by_key[name]}"
        elif name in KEPT:
            yield f"{shown}: must be left out; the launcher decides it"
        elif (reason := refused(name, value)) is not None:
            yield f"{shown}: {reason}"
        elif known and name not in known:
            yield f"{shown}: unknown to SGLang {version()}; {_meant(str(name), known, by_key)}"
        elif name in known:
            yield from (f"{shown}: {problem}" for problem in misfits(known[name], value))


def _refused(name: str, value: Any, truncated: bool) -> str | None:
    if name in REFUSED:
        return f"must be left out; {REFUSED[name]}"
    if name == "sampling_backend" and value == "ascend" and truncated:
        return "must not be ascend with rollout.top_p, top_k or min_p: it does not record which tokens it keeps"
    if name == "moe_runner_backend" and value not in MOE_RUNNERS:
        return f"must be {' or '.join(MOE_RUNNERS)}: what computes with experts as they are written"
    return None


def _meant(name: str, known: Mapping[str, Argument], by_key: Mapping[str, str]) -> str:
    """Suggests the name that was meant: flags are written with dashes, and some have several names."""
    plain = name.lstrip("-").replace("-", "_").lower()
    of_flag = mapping_of(known)
    near = plain if plain in of_flag else nearest(plain, of_flag)
    if near is None:
        return "python -m sglang.launch_server --help lists its arguments"
    return f"did you mean {by_key.get(of_flag[near], of_flag[near])}?"
