"""Builds Megatron's GPTModel from a model's shape and this rank's position on the trainer's mesh,
one for each virtual pipeline stage.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import HAVE_FLA, GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.base.geometry import TrainerTopology
from megarl.base.rollout_types import RemoteSequence, TrainSequence
from megarl.config.errors import ConfigError
from megarl.config.keys import yaml_text
from megarl.config.schema import TRAIN, TrainerConfig
from megarl.models.attention import Attention
from megarl.models.latent_attention import YARN_KEYS, MultiHeadLatentAttention
from megarl.models.parameters import padded_vocab_size
from megarl.models.registry import flops_per_token
from megarl.models.routing import RoutingFormat
from megarl.models.spec import CLAMPED_SWIGLU, GELU_TANH, LM, SCALAR, SILU, ModelSpec
from megarl.reshard.layout import trainer_layout
from megarl.trainer import cpu_support, fully_sharded, hf_io, layers, multi_token, parallel
from megarl.trainer.cpu_support import layer_spec
from megarl.trainer.distributed import to_device
from megarl.trainer.hf_io import Writing
from megarl.trainer.layers import (
    CausalAttention,
    DeltaNet,
    LatentAttention,
    NormedResidual,
    NormOfAllHeads,
    NormOfEachHead,
    OwnOutput,
    PairedRows,
    RMSNorm,
    RoutingReplay,
    ScalarHead,
    packed_sequences,
    token_values,
)
from megarl.trainer.logprobs import scored_rows, token_logprobs
from megarl.trainer.microbatch import (
    Alignment,
    MicroBatch,
    MicrobatchPlan,
    build,
    plan_microbatches,
)
from megarl.trainer.multi_token import MultiToken
from megarl.trainer.parallel import PlannedShapes, context_group, data_group

NEED_TRANSFORMER_ENGINE = (
    "fp8",
    "fp4",
    "tp_comm_overlap",
    "cpu_offloading",
    "attention_backend",
    "use_te_activation_func",
)
RECOMPUTED_BY_TRANSFORMER_ENGINE = ("layernorm", "moe_act", "mla_up_proj")
_CORRUPT = re.compile("corrupt", re.IGNORECASE)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ACTIVATIONS = {
    SILU: F.silu,
    GELU_TANH: partial(F.gelu, approximate="tanh"),
    CLAMPED_SWIGLU: quick_gelu,
}


@dataclass(frozen=True)
class AttentionModules:
    """Megatron's classes for a block of attention, and what its own local spec lacks."""

    config: type[TransformerConfig]
    core: type[CausalAttention]
    key_norm: str  # name of the norm of keys


MODULES_OF_ATTENTION = {
    Attention: AttentionModules(TransformerConfig, CausalAttention, "k_layernorm"),
    MultiHeadLatentAttention: AttentionModules(
        MLATransformerConfig, LatentAttention, "kv_layernorm"
    ),
}


def modules_of(attention: Attention) -> AttentionModules:
    """Those of the block's class, or else of the nearest class that it extends."""
    classes = type(attention).__mro__
    return next(MODULES_OF_ATTENTION[name] for name in classes if name in MODULES_OF_ATTENTION)


_OF_MTP = "mtp_layer.mtp_model_layer."
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(
    r"(mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias|adapter\.[ab])))(\d+)(.*)"
)


def check_transformer_engine(spec: ModelSpec, trainer: TrainerConfig) -> None:
    """Raises ConfigError for settings that need Transformer Engine if it is not used, since they
    would be ignored silently. On GPUs, experts and latent attention need it too, because Megatron's
    modules for them use names that do not exist without it. (On CPUs, cpu_support fixes that.)
    """
    if layer_spec() != "te" and (
        settings := [name for name in NEED_TRANSFORMER_ENGINE if trainer.megatron.get(name)]
    ):
        raise ConfigError(
            f"trainer.megatron.{settings[0]}={trainer.megatron[settings[0]]}: needs GPUs with "
            "Transformer Engine"
        )
    modules = []
    for name in trainer.megatron.get("recompute_modules") or ():
        if name in RECOMPUTED_BY_TRANSFORMER_ENGINE:
            modules.append(name)
    if layer_spec() != "te" and modules:
        raise ConfigError(
            f"trainer.megatron.recompute_modules: {', '.join(modules)} needs GPUs with "
            "Transformer Engine"
        )
    if torch.cuda.is_available() and spec.linear_layers and not HAVE_FLA:
        raise ConfigError(
            f"model.path: a {spec.family} model needs flash-linear-attention on GPUs, which is not "
            "installed"
        )
    if (
        torch.cuda.is_available()
        and layer_spec() != "te"
        and (spec.experts or type(spec.attention) is not Attention)
    ):
        raise ConfigError(
            f"model.path: a {spec.family} model needs Transformer Engine on GPUs, which is not "
            "installed: see docs/cluster.md"
        )


@contextlib.contextmanager
def passed_on(key: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Names `key` if Megatron fails to build with the fields that the key sets, for example because
    software is missing.
    """
    try:
        yield
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        if not settings or isinstance(error, (ConfigError, torch.OutOfMemoryError)):
            raise
        raise ConfigError(
            f"{key}={yaml_text(settings)}: Megatron refuses it: {str(error) or repr(error)}"
        ) from error


class _Refuse(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if _CORRUPT.search(text := record.getMessage()):
            raise RuntimeError(f"{record.name} warns of corruption: {text}")


def refuse_corruption() -> None:
    """Turns every warning of Megatron about corruption into an error with its text.

    It is a RuntimeError if the warning is logged, and the Warning itself if `warnings` issues it.
    Repeated calls do nothing.
    """
    logger = logging.getLogger("megatron")
    if not any(isinstance(handler, _Refuse) for handler in logger.handlers):
        logger.addHandler(_Refuse(logging.WARNING))
        warnings.filterwarnings("error", message=f"(?is).*{_CORRUPT.pattern}", module=r"megatron\b")


def transformer_config(
    spec: ModelSpec, topology: TrainerTopology, dtype: torch.dtype, trainer: TrainerConfig
) -> TransformerConfig:
    """Megatron's configuration of the decoder.

    It requests fused CUDA kernels only if CUDA is present.
    """
    settings = _chosen(spec, topology, dtype, trainer) | trainer.megatron
    if "attention_backend" in settings:
        settings["attention_backend"] = AttnBackend[settings["attention_backend"]]
    with passed_on("trainer.megatron", trainer.megatron):
        config = modules_of(spec.attention).config(**settings)
    for name, value in _yarn_settings(spec).items():
        setattr(config, name, value)
    return config


def _chosen(
    spec: ModelSpec, topology: TrainerTopology, dtype: torch.dtype, trainer: TrainerConfig
) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    fused = layer_spec() == "te"
    settings: dict[str, Any] = dict(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.intermediate_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_norm_eps,
        gated_linear_unit=True,
        layernorm_zero_centered_gamma=spec.norms.zero_centred,
        activation_func=ACTIVATIONS[spec.activation],
        glu_linear_offset=1.0 if spec.activation == CLAMPED_SWIGLU else 0.0,
        activation_func_clamp_value=spec.activation_limit or None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not cuda,
        # Weights always come from a checkpoint or from hf_io.init_random, which does not depend on
        # the topology. But Megatron's own initialisation must run, because it marks parameters as
        # split over tensor ranks.
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=fused,
        bias_activation_fusion=cuda and spec.activation == SILU,
        # transformer/moe/experts.py:206
        bias_dropout_fusion=cuda and not (spec.experts and spec.experts.BIASES),
        # rope_utils.py:320 ignores mscale
        apply_rope_fusion=fused and spec.rope_type != "yarn",
        attention_softmax_in_fp32=True,
        # Gradients are plain sums; the denominator is part of the loss (see step.py).
        calculate_per_token_loss=True,
        **_parallel_settings(topology, trainer),
    )
    if trainer.recompute:
        settings["recompute_granularity"] = "full"
        settings["recompute_method"] = "uniform"
        settings["recompute_num_layers"] = 1
    for mixer, _ in spec.mixers:
        settings |= mixer.megatron_settings(spec)
    if spec.experts:
        settings |= spec.experts.megatron_settings(spec, layer_spec())
        settings["expert_model_parallel_size"] = topology.ep
        settings["expert_tensor_parallel_size"] = topology.etp
    return settings


def _parallel_settings(topology: TrainerTopology, trainer: TrainerConfig) -> dict[str, Any]:
    """How the model is cut, and how stages talk to each other."""
    return dict(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp if topology.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=topology.first_stage_layers,
        num_layers_in_last_pipeline_stage=topology.last_stage_layers,
        context_parallel_size=topology.cp,
        sequence_parallel=trainer.sequence_parallel and topology.tp > 1,
        # Microbatches have different shapes. Virtual stages send each other the shapes; other
        # stages know them (PlannedShapes).
        variable_seq_lengths=topology.vpp > 1,
        # the default is refused with variable lengths, with or without experts
        moe_token_dispatcher_type="alltoall",
        # Of the two ways to communicate between virtual stages, the batched one gives wrong
        # gradients on gloo.
        overlap_p2p_comm=topology.vpp > 1,
        batch_p2p_comm=topology.vpp == 1,
        # with True the host waits for the GPU after each message, for the sake of old versions of
        # PyTorch
        batch_p2p_sync=False,
        # On gloo a send may still be reading the tensor when its storage is freed.
        deallocate_pipeline_outputs=torch.cuda.is_available(),
    )


def _yarn_settings(spec: ModelSpec) -> dict[str, Any]:
    """Fields that GPTModel's own YaRN reads from the configuration, although its class does not
    declare them.
    """
    if spec.rope_type != "yarn" or spec.attention.OWN_ROPE:
        return {}
    scaling = {}
    for name, key in YARN_KEYS.items():
        scaling[f"yarn_{name}"] = (spec.rope_scaling or {}).get(key)
    return scaling | {"yarn_correction_range_round_to_int": False}


def build_chunks(
    spec: ModelSpec, topology: TrainerTopology, config: TransformerConfig, mtp_trained: bool = False
) -> list[GPTModel]:
    """This rank's part of the model (its pipeline stage and tensor slice), without weights: one
    chunk for each virtual stage.
    """
    result: list[GPTModel] = []
    for stage in range(topology.vpp):
        result.append(_build_chunk(spec, config, stage if topology.vpp > 1 else None, mtp_trained))
    return result


def _build_chunk(
    spec: ModelSpec, config: TransformerConfig, stage: int | None, mtp_trained: bool
) -> GPTModel:
    scaling = dict(spec.rope_scaling or {})
    layers_of_chunk = _layer_spec(spec, config, stage)
    model = GPTModel(
        config=config,
        # it accepts both, but its annotation has only one
        transformer_layer_spec=cast(ModuleSpec, layers_of_chunk),
        vocab_size=padded_vocab_size(spec.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tie_word_embeddings,
        position_embedding_type="yarn"
        if spec.rope_type == "yarn" and not spec.attention.OWN_ROPE
        else "rope",
        rotary_base=spec.rope_theta,  # type: ignore[arg-type]
        rotary_percent=spec.partial_rotary_factor,
        seq_len_interpolation_factor=float(scaling["factor"])
        if spec.rope_type == "linear"
        else None,
        vp_stage=stage,
    )
    if spec.attention.sinks and layer_spec() == "te":
        _prepare_sinks(model, config)
    if model.pre_process and spec.padding_token is not None:
        model.embedding.word_embeddings.register_forward_hook(
            partial(_without_padding, spec.padding_token)
        )
    if model.pre_process and spec.embedding_scale != 1.0:
        # rounded as by Hugging Face
        scale = torch.tensor(spec.embedding_scale, dtype=config.params_dtype).item()
        model.embedding.register_forward_hook(partial(_scaled, scale))
    if spec.attention.windowed_rope_theta:
        _give_windows_their_rope(spec, model)
    if spec.rope_type == "llama3":
        # GPTModel's own rope_scaling flag has Llama 3.1's values for all but the factor.
        rotary: Any = model.rotary_pos_emb  # for type checkers it is a tensor or any module
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
        # Log-probs are computed from hidden states (logprobs.py). But the layer is still called, so
        # that DDP's hooks run.
        model.output_layer.forward = _hidden_states  # type: ignore[method-assign]
    if model.post_process and spec.mtp_layers:
        if isinstance(layers_of_chunk, ModuleSpec):
            layer_specs = layers_of_chunk
        else:
            layer_specs = (layers_of_chunk.layer_specs or [])[-1]
        model.mtp_layer = multi_token.build_layer(config, layer_specs, stage, mtp_trained)
    if not torch.cuda.is_available():
        return model
    return model.cuda()


def _prepare_sinks(model: GPTModel, config: TransformerConfig) -> None:
    """Transformer Engine makes sinks in float32, and does not mark them as split over tensor
    ranks.
    """
    for name, sinks in model.named_parameters():
        if name.endswith("softmax_offset"):
            sinks.data = sinks.data.to(config.params_dtype)
            set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)


def _without_padding(
    token: int, embedding: Any, inputs: tuple[Any, ...], output: torch.Tensor
) -> torch.Tensor:
    """Stops the gradient of the padding `token`'s embedding, like padding_idx of nn.Embedding.

    `inputs`: the ids [b, s]. `output`: [b, s, h], or under sequence parallelism this rank's part of
    [s, b, h].
    """
    ids = inputs[0]
    if embedding.reduce_scatter_embeddings:
        ids = ids.t().chunk(embedding.tp_group.size())[embedding.tp_group.rank()]
    return torch.where((ids == token)[..., None], output.detach(), output)


def _scaled(
    scale: float, embedding: Any, inputs: tuple[Any, ...], output: torch.Tensor
) -> torch.Tensor:
    return output * scale


def _give_windows_their_rope(spec: ModelSpec, model: GPTModel) -> None:
    """Gives layers with a window their own rotary embedding, since GPTModel has one for all
    layers.
    """
    on_cpu = model.config.use_cpu_initialization
    rope = RotaryEmbedding(
        spec.head_dim,
        spec.partial_rotary_factor,
        rotary_base=spec.attention.windowed_rope_theta,  # type: ignore[arg-type]
        use_cpu_initialization=on_cpu,
    )

    def give(
        attention: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, Any]:
        return arguments, named | {
            "rotary_pos_emb": rope(len(named["rotary_pos_emb"]), packed_seq=True)
        }

    layers: Any = model.decoder.layers
    for layer in layers:
        if layer.layer_number - 1 in spec.attention.windowed_layers:
            layer.self_attention.register_forward_pre_hook(give, with_kwargs=True)


def _hidden_states(
    hidden: torch.Tensor,
    weight: torch.Tensor | None = None,
    runtime_gather_output: bool | None = None,
) -> tuple[Any, None]:
    """Replaces the product of the output layer, so that GPTModel returns the hidden states, [b, s,
    h].
    """
    return hidden, None


def output_weight(chunk: GPTModel) -> torch.nn.Parameter:
    """The weight of the output layer, [padded vocabulary / tp, h], of the chunk that ends the
    model.
    """
    if chunk.share_embeddings_and_output_weights:
        weight: Any = chunk.shared_embedding_or_output_weight()
    else:
        weight = chunk.output_layer.weight
    return weight


def parameters_by_name(chunks: list[GPTModel]) -> dict[str, torch.Tensor]:
    """This rank's parameters, and the routers' biases, which are not trained.

    Numbers of layers and experts are those of the whole model, not of the chunk or the rank.
    """
    named: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        biases = (
            (name, buffer)
            for name, buffer in chunk.named_buffers()
            if name.endswith(".router.expert_bias")
        )
        for name, parameter in (*chunk.named_parameters(), *biases):
            match = _LAYER.match(name)
            if match:
                layer: Any = chunk.decoder.layers[int(match[1])]
                name = f"decoder.layers.{layer.layer_number - 1}.{_global_expert(match[2], layer)}"
            elif name.startswith(_OF_MTP):
                of_layer: Any = chunk.mtp_layer
                name = _OF_MTP + _global_expert(
                    name.removeprefix(_OF_MTP), of_layer.mtp_model_layer
                )
            named[name] = parameter
    return named


def _global_expert(name: str, layer: Any) -> str:
    """The parameter `name` of a layer, with the number that the expert has among all experts."""
    match = _EXPERT.fullmatch(name)
    if match:
        return f"{match[1]}{layer.mlp.local_expert_indices[int(match[2])]}{match[3]}"
    return name


def _layer_spec(
    spec: ModelSpec, config: TransformerConfig, stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    experts = spec.experts.count if spec.experts else None
    if layer_spec() == "te":
        if spec.linear_layers:
            block = get_transformer_block_with_experimental_attention_variant_spec(
                config, vp_stage=stage
            )
            for layer in block.layer_specs or ():
                _adapt_gated_delta_net(layer)
            return block
        if spec.experts and spec.experts.first_layer:
            return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
        arguments = {
            "num_experts": experts,
            "moe_grouped_gemm": config.moe_grouped_gemm,
            "qk_layernorm": config.qk_layernorm,
        }
        layer = get_gpt_layer_with_transformer_engine_spec(
            **arguments, multi_latent_attention=config.multi_latent_attention
        )
        _place_norms(spec, config, layer.submodules)
        return layer
    first = get_transformer_layer_offset(config, vp_stage=stage)
    count = get_num_layers_to_build(config, vp_stage=stage)
    dense = _local_layer_spec(spec, config, None)
    sparse = _local_layer_spec(spec, config, experts)
    layers = []
    for layer in range(first, first + count):
        of_layer = dense if layer < spec.dense_layers else sparse
        if layer in spec.linear_layers:
            of_layer = _with_gated_delta_net(of_layer)
        layers.append(of_layer)
    norm: Any = RMSNorm  # a class, as in Megatron's own specs; the annotation has a module
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _local_layer_spec(
    spec: ModelSpec, config: TransformerConfig, experts: int | None
) -> ModuleSpec:
    """The spec of a layer of Megatron's own modules, with the norms and the attention of
    `layers`.
    """
    modules = modules_of(spec.attention)
    layer = get_gpt_layer_local_spec(
        experts,
        config.moe_grouped_gemm,
        config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    submodules: Any = layer.submodules  # its annotation is any object
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    attention = submodules.self_attention.submodules
    attention.core_attention = modules.core
    if config.qk_layernorm:
        for norm in ("q_layernorm", modules.key_norm):
            setattr(attention, norm, RMSNorm)
    if experts and spec.experts and spec.experts.BIASES:
        of_experts = submodules.mlp.keywords["submodules"].experts.keywords["submodules"]
        of_experts.linear_fc1 = PairedRows
        of_experts.linear_fc2 = OwnOutput
    _place_norms(spec, config, submodules)
    return layer


def _with_gated_delta_net(layer: ModuleSpec) -> ModuleSpec:
    """The local spec of a layer, with a gated delta net instead of attention."""
    parts = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=NormOfEachHead, out_proj=RowParallelLinear
    )
    submodules: Any = replace(
        cast(Any, layer.submodules), self_attention=ModuleSpec(DeltaNet, submodules=parts)
    )
    return replace(layer, submodules=submodules)


def _adapt_gated_delta_net(layer: Any) -> None:
    """Adapts Megatron's own spec, which is for Transformer Engine.

    Its norm would be zero-centred like the others.
    """
    attention = layer.submodules.self_attention
    if attention.module is GatedDeltaNet:
        attention.module = DeltaNet
        attention.submodules.out_norm = NormOfEachHead


def _place_norms(spec: ModelSpec, config: TransformerConfig, layer: Any) -> None:
    """Gives the submodules of `layer` the norms that are not in Megatron's own specs."""
    attention = layer.self_attention.submodules
    if spec.attention.qk_norm_of_all_heads:
        attention.q_layernorm = partial(NormOfAllHeads, heads=spec.num_attention_heads)
        attention.k_layernorm = partial(NormOfAllHeads, heads=spec.num_kv_heads)
    if not spec.norms.before:
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    if spec.norms.after:
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(NormedResidual, params={"config": config})
    # its linear layers would normalise their input
    if not spec.norms.before and layer_spec() == "te":
        provider: Any = gpt_layer_specs.TESpecProvider  # None without Transformer Engine
        attention.linear_qkv = layer.mlp.keywords["submodules"].linear_fc1 = (
            provider().column_parallel_linear()
        )


class MegatronModel:
    """One rank's part of a model: its forward passes, the outputs computed from hidden states, and
    its weights as checkpoints.

    MegatronTrainer (step.py) adds gradients and an optimizer. Without these, a model is frozen: a
    teacher, or a reference of another shape.

    Every method is collective: all ranks call it with the same arguments.

    torch.distributed must be initialised with `topology.world_size` ranks. Without CUDA,
    cpu_support.install() must have been called before this module is imported. Weights are zero
    until a call of load_hf.
    """

    TRAINED = False  # whether all weights are trained

    def __init__(
        self,
        spec: ModelSpec,
        topology: TrainerTopology,
        trainer: TrainerConfig,
        dtype: str,
        seed: int,
        *,
        timeout_s: float,
    ):
        """`timeout_s` limits each time that one rank waits for another, in all of Megatron's
        groups.

        Raises ConfigError for what cannot be built here, and RuntimeError for a wrong number of
        processes.
        """
        if not cpu_support.installed():
            raise RuntimeError(
                "no CUDA here: call megarl.trainer.cpu_support.install() before importing the "
                "trainer"
            )
        refuse_corruption()
        check_transformer_engine(spec, trainer)
        layers.rotate_packed_sequences_at_once()
        if dist.get_world_size() != topology.world_size:
            raise RuntimeError(
                f"the trainer's topology has {topology.world_size} ranks, torch.distributed has "
                f"{dist.get_world_size()}"
            )
        self.spec = spec
        self.layout = trainer_layout(spec, topology, dtype, layer_spec())
        self.topology = topology
        self.coordinate = topology.coordinate(dist.get_rank())
        self.seed = seed
        self.dtype = DTYPES[dtype]
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.device = torch.device("cpu")
        self.max_tokens = trainer.max_tokens_per_microbatch
        self.logprob_chunk_tokens = trainer.logprob_chunk_tokens
        self.alignment = Alignment.of(topology, trainer.sequence_parallel)
        self.flops = flops = flops_per_token(spec, 0)  # without attention, which is in `squares`
        # Attention's part of the cost of a sequence (see plan_microbatches). A second model on
        # these ranks must use the first model's value, since each rank has the sequences that the
        # first model assigns to it.
        self.squares = (flops_per_token(spec, 1) - flops) / flops
        parallel.initialize(topology, seed, timeout_s)
        self.config = transformer_config(spec, topology, self.dtype, trainer)
        self.sequence_parallel = bool(self.config.sequence_parallel)
        self.mtp_trained = trainer.mtp == TRAIN and spec.mtp_layers > 0
        with passed_on("trainer.megatron", trainer.megatron):
            self.chunks = self._build_chunks()
        self.mtp = self._find_mtp() if self.mtp_trained and self.chunks[-1].post_process else None
        # of fully sharded parameters, the weights in the model's dtype if the shards are not
        self._rounded: dict[torch.Tensor, torch.Tensor] = {}
        adapters = self._adapter_parameters()
        if topology.zero == 3:
            fully_sharded.shard(self.chunks, self.dtype, trained=self.TRAINED, whole=adapters)
            for parameter in self._parameters():
                shard = fully_sharded.local_shard(parameter)
                if shard.dtype != self.dtype:
                    self._rounded[parameter] = torch.zeros_like(shard, dtype=self.dtype)
        self._check_parameters(adapters)
        # modules that Megatron's schedules run
        self.modules: list[torch.nn.Module] = [*self.chunks]
        self.routing: RoutingFormat | None = None
        self.replay: RoutingReplay | None = None

    def _build_chunks(self) -> list[GPTModel]:
        sharded = self.topology.zero == 3
        with fully_sharded.without_memory() if sharded else contextlib.nullcontext():
            return build_chunks(self.spec, self.topology, self.config, self.mtp_trained)

    def _check_parameters(self, adapters: set[torch.nn.Parameter]) -> None:
        """Raises ConfigError if the model has other parameters than the layout and `adapters`: one
        more would be trained, and reach no engine and no export.
        """
        declared = {t.name: tuple(t.shape) for t in self.layout.tensors(dist.get_rank())}
        built = {}
        for name, parameter in parameters_by_name(self.chunks).items():
            if parameter not in adapters:
                built[name] = tuple(self.live_weights(parameter).shape)
        differing = []
        for name in sorted(declared.keys() | built.keys()):
            if declared.get(name) != built.get(name):
                differing.append(f"{name} {built.get(name)}, not {declared.get(name)}")
        if differing:
            raise ConfigError(
                f"model.path: Megatron's parameters of a {self.spec.family} model are not those "
                f"that its family declares: {'; '.join(differing[:3])}"
                + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
            )

    def _adapter_parameters(self) -> set[torch.nn.Parameter]:
        """The parameters beside the model's own, which trainer.zero=3 does not shard."""
        return set()

    def _find_mtp(self) -> MultiToken:
        return MultiToken(
            self.spec,
            self.config,
            self.chunks[-1],
            padded_vocab_size(self.spec.vocab_size, self.topology.tp),
        )

    # -- scoring

    def token_logprobs(
        self, sequences: Sequence[TrainSequence | RemoteSequence], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """The log-prob of every token of `loss_mask` given the tokens before it, one array per
        sequence, with 0 for other tokens. The same on every rank.
        """
        assert self.spec.head == LM
        return self._scored(sequences, temperature)

    def token_values(self, sequences: Sequence[TrainSequence | RemoteSequence]) -> list[np.ndarray]:
        """The scalar head's value for the tokens before each token of `loss_mask`, one array per
        sequence, with 0 for other tokens. The same on every rank.
        """
        assert self.spec.head == SCALAR
        return self._scored(sequences, temperature=1.0)

    def _scored(
        self, sequences: Sequence[TrainSequence | RemoteSequence], temperature: float
    ) -> list[np.ndarray]:
        plan = self._plan(sequences)
        with torch.no_grad():
            scored = self._run(
                plan,
                partial(build, sequences=sequences, device=self.device, routing=self.routing),
                lambda microbatch, hidden, non_loss_data: self._outputs(
                    hidden, microbatch, temperature
                )[0],
                forward_only=True,
            )
        lengths = [len(s) for s in sequences]
        flat = torch.zeros(sum(lengths), dtype=torch.float32)
        slices = flat.split(lengths)  # views
        if self.coordinate.tp == self.coordinate.cp == 0:
            for microbatch, outputs in zip(plan, scored):
                outputs = outputs.cpu()
                for start, index in zip(microbatch.boundaries, microbatch.indices):
                    slices[index][1:] = outputs[start : start + lengths[index] - 1]
        if self.topology.world_size > 1:
            flat = to_device(flat, self.device)
            dist.all_reduce(flat)
        return [part.numpy() for part in flat.cpu().split(lengths)]

    def scored_hidden(
        self, sequences: Sequence[TrainSequence | RemoteSequence]
    ) -> dict[tuple[int, ...], torch.Tensor]:
        """The hidden states [N, h] that predict the tokens of `loss_mask`, in host memory on the
        last pipeline stage. Keys: the sequences of each microbatch. Each context rank has those of
        its positions.
        """
        plan = self._plan(sequences)
        with torch.no_grad():
            rows = self._run(
                plan,
                partial(build, sequences=sequences, device=self.device, routing=self.routing),
                lambda microbatch, hidden, non_loss_data: scored_rows(
                    hidden[0], microbatch, self.sequence_parallel
                ).rows.cpu(),
                forward_only=True,
            )
        if rows:
            return dict(zip((microbatch.indices for microbatch in plan), rows))
        return {}

    # -- shared by training and scoring

    def shares(self, sequences: Sequence[TrainSequence | RemoteSequence]) -> list[list[int]]:
        """[dp][…] the sequences that each data-parallel rank needs.

        It may be given all others as RemoteSequence.
        """
        result: list[list[int]] = []
        for plan in self._plans(sequences):
            result.append([index for microbatch in plan for index in microbatch.indices])
        return result

    def summed(self, values: Sequence[float]) -> list[float]:
        """The sums over the data-parallel ranks, each of which has its own values."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=data_group())
        return total.tolist()

    def _plan(self, sequences: Sequence[TrainSequence | RemoteSequence]) -> list[MicrobatchPlan]:
        return self._plans(sequences)[self.coordinate.dp]

    def _plans(
        self, sequences: Sequence[TrainSequence | RemoteSequence]
    ) -> list[list[MicrobatchPlan]]:
        lengths = [len(s) for s in sequences]
        stages = self.topology.pp if self.topology.vpp > 1 else 1
        return plan_microbatches(
            lengths, self.topology.dp, self.max_tokens, self.alignment, self.squares, stages
        )

    def _outputs(
        self, hidden: torch.Tensor, microbatch: MicroBatch, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The values from which the loss is computed, and the entropies."""
        if self.spec.head == SCALAR:
            values = token_values(hidden[0], microbatch, sequence_parallel=self.sequence_parallel)
            return values, torch.full_like(values, math.nan)
        return token_logprobs(
            scored_rows(hidden[0], microbatch, self.sequence_parallel),
            output_weight(self.chunks[-1]),
            microbatch,
            self.spec.vocab_size,
            temperature=temperature,
            chunk_tokens=self.logprob_chunk_tokens,
        )

    def _run(
        self,
        plan: list[MicrobatchPlan],
        make: Callable[[MicrobatchPlan], MicroBatch],
        head: Callable[..., Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Runs Megatron's schedule over the microbatches.

        Returns the results of `head` on the last stage.

        `head(microbatch, hidden)` gets hidden states [1, t / cp, h], or [1, t / cp / tp, h] under
        sequence parallelism. With a scalar head, which GPTModel has applied, h is 1.
        """

        def forward_step(
            batches: Iterator[MicroBatch], model: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            microbatch = next(batches)
            inputs = layers.cut(microbatch.inputs, microbatch.plan.boundaries, context_group())
            if self.replay is not None:
                assert microbatch.routing is not None
                self.replay.put(model, microbatch.routing, microbatch.plan.boundaries)
            # No ids or mask: the boundaries of the sequences imply rotary positions and causality.
            packed = packed_sequences(microbatch, self.topology.cp)
            return model(inputs[None], None, None, packed_seq_params=packed), partial(
                head, microbatch
            )

        options: dict[str, Any] = {}
        if self.topology.pp > 1 and self.topology.vpp == 1:
            split = self.topology.cp * (self.topology.tp if self.sequence_parallel else 1)
            communicator = PlannedShapes(self.config, plan, split)
            options = {
                "p2p_communicator": communicator,
                "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
            }
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            # chunks of a rank are at different microbatches
            data_iterator=[map(make, plan) for _ in self.modules],
            model=[*self.modules],
            num_microbatches=len(plan),
            # Not used, although the schedule multiplies them.
            seq_length=plan[0].positions,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            **options,
        )
        fully_sharded.reshard(self.chunks)
        return outputs

    # -- weights

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for chunk in self.chunks for parameter in chunk.parameters())

    def local_parameters(self) -> dict[str, torch.Tensor]:
        """This rank's live parameters, which are the tensors of `layout`, by Megatron's names with
        global layer numbers.
        """
        named = parameters_by_name(self.chunks)
        return {name: self.live_weights(parameter) for name, parameter in named.items()}

    def live_weights(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter in the model's dtype, as `layout` describes it."""
        return self._rounded.get(parameter, fully_sharded.local_shard(parameter))

    def round_masters(self) -> None:
        """Sets the live weights of fully sharded parameters to the rounded master weights."""
        for parameter, rounded in self._rounded.items():
            rounded.copy_(fully_sharded.local_shard(parameter))

    sent_parameters = merged_parameters = local_parameters  # as engines and exports get them

    def load_hf(self, path: str, new_head: hf_io.NewHead | None = None) -> None:
        """Loads the weights of an HF checkpoint folder.

        Raises ConfigError for missing tensors and wrong shapes.

        `new_head`: initial values of the scalar head if the checkpoint has none; None: it has one.
        """
        hf_io.load_hf(self.spec, self.layout, self.local_parameters(), path, new_head, self.seed)

    def export_hf(self, path: str, hf_config_dir: str, files: Mapping[str, str] = {}) -> None:
        """Writes the weights as an HF checkpoint folder, with `files` (name → text).

        Configuration and tokenizer files come from `hf_config_dir`.
        """
        self.begin_export(path, hf_config_dir, files, beside=False).finish()

    def begin_export(
        self, path: str, hf_config_dir: str, files: Mapping[str, str] = {}, *, beside: bool
    ) -> Writing[None]:
        """Like `export_hf`, but complete once `finish` of the result has returned.

        `beside`: whether training goes on meanwhile.
        """
        return hf_io.export_hf(
            self.spec,
            self.layout,
            self.merged_parameters(),
            path,
            hf_config_dir,
            files=files,
            beside=beside,
        )
