"""The models and layouts for tests of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_reference  # noqa: F401  makes transformers importable without CUDA
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCAB = 50  # padded to 128 per tensor-parallel rank: at tp=2 the second rank holds only padding
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
COMMON: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "initializer_range": 0.2,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
YARN_EXACT = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 16.0,
    "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False,
}  # fmt: skip
SIGMOID_ROUTER: dict[str, Any] = {
    "first_k_dense_replace": 1, "intermediate_size": 48, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_parameters": dict(rope_theta=500.0, **YARN), **SIGMOID_ROUTER,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
}  # fmt: skip
# (With keys of few dims or large weights, Hugging Face's own gradients and log-probs in float32
# have errors of 1e-5.)
SMALLER = COMMON | {"initializer_range": 0.1}
QWEN3_NEXT: dict[str, Any] = {
    "full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"] * 2,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
    "linear_value_head_dim": 10,
    "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
# (Sections of rotary embeddings are those of texts beside images: of 4 rotated dims 2 angles.)
QWEN3_5: dict[str, Any] = QWEN3_NEXT | {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0], "mrope_interleaved": True,
    },
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}  # fmt: skip
UNTIED = {"tie_word_embeddings": False, "vocab_size": VOCAB}
# Models with a padding token have it in the middle of sequences, like models whose padding is the
# end of a turn.
MODELS: dict[str, PretrainedConfig] = {
    "untied": LlamaConfig(intermediate_size=48, pad_token_id=19, **UNTIED, **COMMON),
    "tied": LlamaConfig(
        intermediate_size=48,
        pad_token_id=59,
        tie_word_embeddings=True,
        vocab_size=140,
        rope_parameters=dict(rope_theta=500.0, **LLAMA3),
        **COMMON,
    ),
    "mistral": MistralConfig(
        intermediate_size=48, head_dim=16, sliding_window=None, **UNTIED, **COMMON
    ),
    "gemma3": Gemma3TextConfig(
        intermediate_size=48,
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=19,
        vocab_size=140,
        **COMMON,
    ),
    "olmo2": Olmo2Config(intermediate_size=48, pad_token_id=19, **UNTIED, **COMMON),
    "phi3": Phi3Config(intermediate_size=48, pad_token_id=19, **UNTIED, **COMMON),
    "qwen2": Qwen2Config(intermediate_size=48, tie_word_embeddings=True, vocab_size=140, **COMMON),
    "qwen3": Qwen3Config(intermediate_size=48, head_dim=16, **UNTIED, **COMMON),
    "qwen3_moe": Qwen3MoeConfig(
        moe_intermediate_size=24,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        **UNTIED,
        **COMMON,
    ),
    "mixtral": MixtralConfig(
        intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, **UNTIED, **COMMON
    ),
    "deepseek_v3": DeepseekV3Config(
        **DEEPSEEK_V3, **UNTIED, **COMMON | {"num_key_value_heads": 4, "rms_norm_eps": 1e-6}
    ),
    "glm4_moe": Glm4MoeConfig(
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        pad_token_id=19,
        **SIGMOID_ROUTER,
        **UNTIED,
        **COMMON,
    ),
    "gpt_oss": GptOssConfig(
        intermediate_size=24,
        head_dim=16,
        sliding_window=6,
        num_local_experts=8,
        num_experts_per_tok=2,
        swiglu_limit=0.5,  # low enough to be reached
        rope_parameters=YARN_EXACT,
        pad_token_id=19,
        **UNTIED,
        **COMMON,
    ),
    "qwen3_next": Qwen3NextConfig(
        **QWEN3_NEXT,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        head_dim=16,
        pad_token_id=19,
        **UNTIED,
        **SMALLER,
    ),
    "qwen3_5": Qwen3_5TextConfig(
        **{key: value for key, value in QWEN3_5.items() if "expert" not in key},
        intermediate_size=48,
        head_dim=16,
        pad_token_id=19,
        tie_word_embeddings=True,
        vocab_size=140,
        **SMALLER,
    ),
    # As published, with a vision tower.
    "qwen3_5_moe": Qwen3_5MoeConfig(
        text_config=dict(
            **QWEN3_5,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            head_dim=16,
            pad_token_id=19,
            **UNTIED,
            **SMALLER,
        ),
        vision_config=VISION,
    ),
    # Like GLM-4.5-Air: another share of each head is rotated, and heads have no norms.
    "glm4_moe_air": Glm4MoeConfig(
        head_dim=16,
        attention_bias=True,
        partial_rotary_factor=0.25,
        **SIGMOID_ROUTER,
        **UNTIED,
        **COMMON,
    ),
}
SP = {"sequence_parallel": True}
# name -> (world size, topology, trainer settings)
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "single": (1, {}, {}),
    "tp2": (2, {"tp": 2, "zero": 0}, {}),
    "tp2_zero1": (2, {"tp": 2}, {}),
    "tp2_sp_recompute": (2, {"tp": 2}, {"sequence_parallel": True, "recompute": True}),
    "pp2": (2, {"pp": 2}, {}),
    "pp2_zero0": (2, {"pp": 2, "zero": 0}, {}),
    "dp2_zero0": (2, {"dp": 2, "zero": 0}, {}),
    "dp2_zero1": (2, {"dp": 2, "zero": 1}, {}),
    # Several buckets, each reduced during the backward pass.
    "dp2_overlap": (2, {"dp": 2}, {"ddp": {"overlap_grad_reduce": True, "bucket_size": 1000}}),
    "dp2_zero0_overlap": (
        2,
        {"dp": 2, "zero": 0},
        {"ddp": {"overlap_grad_reduce": True, "bucket_size": 1000}},
    ),
    "dp2_pp2_vpp2_overlap": (
        4,
        {"dp": 2, "pp": 2, "vpp": 2},
        {"ddp": {"overlap_grad_reduce": True, "bucket_size": 1000}},
    ),
    "selective": (
        1,
        {},
        {
            "megatron": {
                "recompute_granularity": "selective",
                "recompute_modules": ["core_attn", "mlp"],
            }
        },
    ),
    "pp2_uneven": (2, {"pp": 2, "first_stage_layers": 1}, {}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}, {}),
    "cp2": (2, {"cp": 2}, {}),
    "ep2": (2, {"dp": 2, "ep": 2}, {}),
    "ep2_zero0": (2, {"dp": 2, "ep": 2, "zero": 0}, {}),
    "cp2_ep2": (2, {"cp": 2, "ep": 2}, {}),
    "tp2_etp1": (2, {"tp": 2}, SP),  # every tensor-parallel rank holds whole experts
    "tp2_etp2": (2, {"tp": 2, "etp": 2}, SP),
    "tp2_ep2": (2, {"tp": 2, "ep": 2}, {"sequence_parallel": True, "recompute": True}),
    # More ranks than key-value heads: each of these heads is on two ranks.
    "tp4": (4, {"tp": 4}, {}),
    "tp4_sp": (4, {"tp": 4}, SP),
    "tp4_ep2": (4, {"tp": 4, "ep": 2}, {"sequence_parallel": True, "recompute": True}),
    "tp2_pp2": (4, {"tp": 2, "pp": 2}, {}),
    "tp2_cp2": (4, {"tp": 2, "cp": 2}, SP),
    "tp2_dp2_ep2": (4, {"tp": 2, "dp": 2, "ep": 2}, SP),
    "dp2_tp2_etp2_ep2": (4, {"tp": 2, "dp": 2, "etp": 2, "ep": 2}, SP),
    "pp2_vpp2_ep2": (4, {"pp": 2, "vpp": 2, "dp": 2, "ep": 2}, {"recompute": True}),
    # Sharded parameters.
    "dp2_zero3": (2, {"dp": 2, "zero": 3}, {}),
    "dp2_recompute_zero3": (2, {"dp": 2, "zero": 3}, {"recompute": True}),
    "cp2_zero3": (2, {"cp": 2, "zero": 3}, {}),
    "tp2_zero3": (2, {"tp": 2, "zero": 3}, SP),
    "ep2_zero3": (2, {"dp": 2, "ep": 2, "zero": 3}, {}),
    "dp4_zero3": (4, {"dp": 4, "zero": 3}, {}),
    "tp2_dp2_zero3": (4, {"tp": 2, "dp": 2, "zero": 3}, {}),
    "tp2_dp2_sp_zero3": (4, {"tp": 2, "dp": 2, "zero": 3}, SP | {"recompute": True}),
    "tp4_zero3": (4, {"tp": 4, "zero": 3}, SP),
    "pp2_dp2_zero3": (4, {"pp": 2, "dp": 2, "zero": 3}, {}),
    "pp2_vpp2_dp2_zero3": (4, {"pp": 2, "vpp": 2, "dp": 2, "zero": 3}, {"recompute": True}),
    "dp4_ep2_zero3": (4, {"dp": 4, "ep": 2, "zero": 3}, {"recompute": True}),
    "tp2_dp2_ep2_zero3": (4, {"tp": 2, "dp": 2, "ep": 2, "zero": 3}, SP),
}
# The layouts for each model: its traits on every axis that treats them specially. Layouts after the
# bar are marked `long`. Those before the bar cover each model and each way to cut one.
TESTED = {
    "untied": (
        "single tp2_pp2 cp2 tp4_sp dp2_zero3 tp2_dp2_zero3 | tp4 selective dp2_overlap "
        "tp2 tp2_sp_recompute pp2 dp2_zero0 dp2_zero1 pp2_vpp2 dp2_recompute_zero3 "
        "cp2_zero3 tp2_zero3 dp4_zero3 tp2_dp2_sp_zero3 tp4_zero3 pp2_vpp2_dp2_zero3"
    ),
    "tied": (
        "tp2_sp_recompute dp2_pp2_vpp2_overlap pp2_uneven dp2_zero1 pp2_dp2_zero3 | tp4 "
        "single dp2_zero0_overlap tp2 pp2 dp2_zero0 tp2_pp2 pp2_vpp2 dp2_zero3 "
        "pp2_vpp2_dp2_zero3"
    ),
    "mistral": "single | tp4 tp2_pp2 cp2 dp2_zero3",
    "gemma3": "cp2 | tp4_sp single tp2_sp_recompute tp2_pp2 tp2_dp2_sp_zero3",
    "olmo2": "tp2 tp4 | tp4_sp single tp2_sp_recompute cp2 tp2_pp2 tp2_dp2_sp_zero3",
    "phi3": "tp2_cp2 | tp4 single tp2_pp2 dp4_zero3",
    "qwen2": "tp2_sp_recompute | tp4 single tp2_dp2_zero3",
    "qwen3": "tp2 | tp4 tp4_sp single tp2_cp2 tp2_dp2_sp_zero3",
    "qwen3_moe": (
        "pp2_vpp2 ep2_zero0 tp2_dp2_ep2 ep2_zero3 | tp4_ep2 single ep2 cp2_ep2 tp2_etp1 "
        "tp2_ep2 dp2_tp2_etp2_ep2 pp2_vpp2_ep2 dp4_ep2_zero3 dp4_zero3 pp2_vpp2_dp2_zero3"
    ),
    "mixtral": "ep2 | tp4_ep2 single dp4_ep2_zero3",
    "deepseek_v3": "tp2_ep2 tp2_dp2_ep2_zero3 | single cp2_ep2 pp2_vpp2_ep2 dp4_ep2_zero3",
    "glm4_moe": "cp2_ep2 | tp4_ep2 single tp2_ep2 pp2_vpp2_ep2 dp2_tp2_etp2_ep2 tp2_dp2_ep2_zero3",
    "glm4_moe_air": "single",
    "gpt_oss": (
        "tp2_etp1 | tp4_ep2 single cp2_ep2 tp2_ep2 pp2_vpp2_ep2 tp2_dp2_ep2_zero3 dp4_ep2_zero3"
    ),
    "qwen3_next": "tp2_ep2 tp4_ep2 | single cp2_ep2 tp2_cp2 pp2_vpp2_ep2 tp2_dp2_ep2_zero3",
    "qwen3_5": "single | tp4 tp2 tp2_cp2 pp2 tp2_dp2_zero3",
    "qwen3_5_moe": "tp2_ep2 | tp4_ep2 single pp2_vpp2_ep2 dp4_ep2_zero3",
}
# These are also tested with routing replay.
REPLAYED = [
    *(("qwen3_moe", layout) for layout in ("single", "pp2_vpp2", "cp2_ep2", "tp2_ep2",
    "pp2_vpp2_ep2")),
    ("mixtral", "ep2"), ("deepseek_v3", "single"), ("deepseek_v3", "pp2_vpp2_ep2"),
    ("glm4_moe", "cp2_ep2"), ("glm4_moe", "pp2_vpp2_ep2"), ("gpt_oss", "tp2_ep2"),
    ("gpt_oss", "pp2_vpp2_ep2"),
    ("qwen3_next", "tp2_ep2"), ("qwen3_5_moe", "tp2_ep2"),
]  # fmt: skip
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
# name -> (model, layout that saves, layouts that load; after the bar as above)
CHECKPOINTS = {
    "zero1": (
        "tied",
        "tp2_zero1",
        "dp2_zero1 dp2_zero3 pp2_vpp2 | tp4 single tp2_zero1 pp2 tp2_pp2",
    ),
    "zero0": ("tied", "tp2", "pp2_zero0 | dp2_zero0"),
    "experts": ("deepseek_v3", "ep2", "pp2_vpp2_ep2 | single ep2"),
    "dense_first": ("glm4_moe", "ep2", "| tp2_ep2"),
    "sinks": ("gpt_oss", "ep2", "| tp2_ep2"),
    "gated_delta_nets": ("qwen3_next", "ep2", "tp2_ep2 |"),
    "repeated_heads": ("qwen3", "tp4_sp", "tp2_zero1 |"),
    "sharded": ("tied", "dp2_zero3", "dp2_zero1 | single dp4_zero3 tp2_dp2_zero3 pp2_dp2_zero3"),
    "sharded_experts": ("qwen3_moe", "ep2_zero3", "ep2 | dp4_ep2_zero3 tp2_dp2_ep2_zero3"),
    "experts_zero0": ("qwen3_moe", "ep2_zero0", "| dp2_zero0"),
}


def cases(layouts_of: dict[str, str], only: list[tuple[str, str]] | None = None) -> list[Any]:
    """(name, layout) as parameters of a test: all, or those in `of`.

    Layouts after a bar are marked `long`.
    """
    params = []
    for name, layouts in layouts_of.items():
        quick, _, long = layouts.partition("|")
        marked = [(layout, []) for layout in quick.split()] + [
            (layout, [pytest.mark.long]) for layout in long.split()
        ]
        params += [
            pytest.param(name, layout, marks=marks)
            for layout, marks in marked
            if only is None or (name, layout) in only
        ]
    return params


CASES = cases(TESTED)
LOADS = cases({name: layouts for name, (_, _, layouts) in CHECKPOINTS.items()})


def is_zero_centred(name: str, key: str) -> bool:
    return name == "gemma3" or (
        name in HYBRID and not key.endswith("linear_attn.norm.weight") and ".visual." not in key
    )


def save_model(name: str, folder: Path, scores: bool = False, **changed: Any) -> None:
    """Saves a model with random weights, including norms and biases, which would otherwise be ones
    and zeros. `changed`: settings of the model's configuration. `scores`: with a scalar head.
    """
    torch.manual_seed(len(name))
    kind = AutoModelForImageTextToText if name == "qwen3_5_moe" else AutoModelForCausalLM
    kind = AutoModelForSequenceClassification if scores else kind
    changed |= {"num_labels": 1} if scores else {}
    model = kind.from_config(type(MODELS[name]).from_dict(MODELS[name].to_dict() | changed))
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1 or key.endswith("bias"):
            torch.nn.init.normal_(
                parameter, 0.0 if key.endswith("bias") or is_zero_centred(name, key) else 1.0, 0.1
            )
    for key, buffer in model.named_buffers():
        if key.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.1)
    # One model has several files with an index; the others have a single file.
    model.save_pretrained(folder, max_shard_size="20KB" if name == "untied" else "1GB")
    if name == "qwen3_5_moe":
        stack_experts(folder)


def stack_experts(folder: Path) -> None:
    """Replaces the experts of a layer by one tensor for gate and up, and one for down, as in
    Qwen3.5's published checkpoints.
    """
    tensors = load_file(folder / "model.safetensors")
    layers = sorted(
        {name.partition(".mlp.experts.")[0] for name in tensors if ".mlp.experts." in name}
    )
    for experts in (f"{layer}.mlp.experts" for layer in layers):
        count = sum(name.startswith(experts) for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}.{e}.{kind}_proj.weight") for e in range(count)])
            for kind in ("gate", "up", "down")
        )
        tensors |= {
            f"{experts}.gate_up_proj": torch.cat([gate, up], 1),
            f"{experts}.down_proj": down,
        }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
