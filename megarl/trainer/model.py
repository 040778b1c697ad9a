"""Builds Megatron's GPTModel for a model shape and a place on the trainer's mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.errors import ConfigError
from megarl.models.parameters import padded_vocab_size
from megarl.models.spec import ModelSpec
from megarl.plan.topology import TrainerTopology
from megarl.trainer.layers import CausalAttention, RMSNorm
from megarl.trainer.norm_names import norm_names

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_supported(spec: ModelSpec, topology: TrainerTopology, dtype: str) -> None:
    """Raises ConfigError, all problems at once, where this trainer cannot build the model on the topology."""
    later = {axis: getattr(topology, axis) for axis in ("vpp", "cp", "ep", "etp")}
    problems = [f"trainer.{axis}={size}: only 1 is there yet" for axis, size in later.items() if size != 1]
    if topology.zero not in (0, 1):
        problems.append(f"trainer.zero={topology.zero}: allowed are 0 (plain data parallel) and 1 (distributed optimizer)")
    if dtype not in DTYPES:
        problems.append(f"model.dtype={dtype}: allowed are {', '.join(DTYPES)}")
    if spec.family != "llama":
        problems.append(f"model.path: family {spec.family!r} is not supported; supported is llama")
    for what, count in (
        ("attention heads", spec.num_attention_heads),
        ("key/value heads", spec.num_kv_heads),
        ("intermediate size", spec.intermediate_size),
    ):
        if count % topology.tp:
            problems.append(f"trainer.tp={topology.tp}: must divide the model's {what} ({count})")
    if spec.num_layers % topology.pp:
        problems.append(f"trainer.pp={topology.pp}: must divide the model's number of layers ({spec.num_layers})")
    rope_type = _rope_type(spec)
    if rope_type not in ("default", "llama3", "linear"):
        problems.append(f"model.path: rope_scaling type {rope_type!r} is not supported; supported are default, linear, llama3")
    if problems:
        raise ConfigError(problems)


def transformer_config(
    spec: ModelSpec, topology: TrainerTopology, dtype: torch.dtype, sequence_parallel: bool, recompute: bool
) -> TransformerConfig:
    """Megatron's configuration of the decoder; fused CUDA kernels are asked for only where CUDA is."""
    cuda, fused = torch.cuda.is_available(), norm_names() == "te"
    recompute_all: dict[str, Any] = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.intermediate_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        sequence_parallel=sequence_parallel and topology.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not cuda,
        # Weights always come from a checkpoint or from hf_io.init_random, which does not depend on the topology. Megatron's
        # own initialisation must still run: it is what marks parameters as split over tensor ranks.
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=fused,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        apply_rope_fusion=fused,
        attention_softmax_in_fp32=True,
        # Microbatches differ in shape, so pipeline stages exchange shapes first.
        variable_seq_lengths=topology.pp > 1,
        moe_token_dispatcher_type="alltoall",  # the default is refused with variable lengths, with or without experts
        # On gloo a send may still read the tensor when its storage is taken away.
        deallocate_pipeline_outputs=cuda,
        # Gradients are plain sums; the denominator is part of the loss (see step.py).
        calculate_per_token_loss=True,
        **(recompute_all if recompute else {}),
    )


def build_model(spec: ModelSpec, config: TransformerConfig) -> GPTModel:
    """This rank's part of the model (its pipeline stage, its tensor slice), weights not yet set."""
    rope_type, scaling = _rope_type(spec), dict(spec.rope_scaling or {})
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(config),
        vocab_size=padded_vocab_size(spec.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,  # type: ignore[arg-type]
        seq_len_interpolation_factor=float(scaling["factor"]) if rope_type == "linear" else None,
    )
    if rope_type == "llama3":
        # GPTModel's own rope_scaling flag fixes all but the factor at Llama 3.1's values.
        rotary = model.rotary_pos_emb
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq,
            factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_position_embeddings=scaling["original_max_position_embeddings"],
        )
    return model if not torch.cuda.is_available() else model.cuda()


def parameters_by_name(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters; `decoder.layers.N` counts layers of the whole model, not of the pipeline stage."""
    named = {}
    for name, parameter in model.named_parameters():
        head, found, rest = name.partition("decoder.layers.")
        if found:
            local, dot, rest = rest.partition(".")
            name = f"{head}{found}{model.decoder.layers[int(local)].layer_number - 1}{dot}{rest}"
        named[name] = parameter
    return named


def _rope_type(spec: ModelSpec) -> str:
    scaling = spec.rope_scaling or {}
    return scaling.get("rope_type") or scaling.get("type") or "default"


def _layer_spec(config: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    if norm_names() == "te":
        return get_gpt_layer_with_transformer_engine_spec()
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
