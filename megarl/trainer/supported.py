"""Refuses models that the trainer cannot build on this machine. Those it can build nowhere are refused by megarl.plan."""

from __future__ import annotations

import torch

from megarl.config.errors import ConfigError
from megarl.models.spec import ModelSpec
from megarl.trainer.layer_spec import layer_spec


def check_transformer_engine(spec: ModelSpec) -> None:
    """Raises ConfigError for experts and latent attention on GPUs without Transformer Engine: Megatron's router and its latent attention
    then use names that do not exist. (On CPUs cpu_support fixes that.)"""
    if torch.cuda.is_available() and layer_spec() != "te" and (spec.num_experts or spec.kv_lora_rank):
        raise ConfigError(
            f"model.path: a {spec.family} model needs Transformer Engine on GPUs, which is not installed: see docs/cluster.md"
        )
