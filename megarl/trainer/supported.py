"""Refuses models that the trainer cannot build on this machine. Those it can build nowhere are refused by megarl.plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megarl.config.errors import ConfigError
from megarl.config.keys import yaml_text
from megarl.config.schema import TrainerConfig
from megarl.models.spec import ModelSpec
from megarl.trainer.layer_spec import layer_spec

NEED_TRANSFORMER_ENGINE = ("fp8", "fp4", "tp_comm_overlap", "cpu_offloading", "attention_backend", "use_te_activation_func")
RECOMPUTED_BY_TRANSFORMER_ENGINE = ("layernorm", "moe_act", "mla_up_proj")


def check_transformer_engine(spec: ModelSpec, trainer: TrainerConfig) -> None:
    """Raises ConfigError for what needs Transformer Engine, where it is not used. Settings of it would be ignored in silence. On GPUs
    experts and latent attention need it too: Megatron's router and its latent attention use names that do not exist without it. (On CPUs
    cpu_support fixes that.)"""
    if layer_spec() != "te" and (asked := [name for name in NEED_TRANSFORMER_ENGINE if trainer.megatron.get(name)]):
        raise ConfigError(f"trainer.megatron.{asked[0]}={trainer.megatron[asked[0]]}: needs GPUs with Transformer Engine")
    modules = [name for name in trainer.megatron.get("recompute_modules") or () if name in RECOMPUTED_BY_TRANSFORMER_ENGINE]
    if layer_spec() != "te" and modules:
        raise ConfigError(f"trainer.megatron.recompute_modules: {', '.join(modules)} needs GPUs with Transformer Engine")
    if torch.cuda.is_available() and layer_spec() != "te" and (spec.num_experts or spec.kv_lora_rank):
        raise ConfigError(
            f"model.path: a {spec.family} model needs Transformer Engine on GPUs, which is not installed: see docs/cluster.md"
        )


@contextlib.contextmanager
def passed_on(key: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Around what Megatron builds with fields of its own: names `key` where it fails, as it does if software is missing that they need."""
    try:
        yield
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        if not settings or isinstance(error, (ConfigError, torch.OutOfMemoryError)):
            raise
        raise ConfigError(f"{key}={yaml_text(settings)}: Megatron refuses it: {str(error) or repr(error)}") from error
