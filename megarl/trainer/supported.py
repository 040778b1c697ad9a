"""What of a model this trainer cannot build here. What it can build nowhere is refused when a run is planned (megarl.plan)."""

from __future__ import annotations

import torch

from megarl.config.errors import ConfigError
from megarl.models.spec import ModelSpec
from megarl.trainer.layer_spec import layer_spec


def check_transformer_engine(spec: ModelSpec) -> None:
    """Raises ConfigError for experts and latent attention on GPUs without it: Megatron's router and its latent attention then ask for names
    that they lack. (On CPUs cpu_support mends that.)"""
    if torch.cuda.is_available() and layer_spec() != "te" and (spec.num_experts or spec.kv_lora_rank):
        raise ConfigError(
            f"model.path: a {spec.family} model needs Transformer Engine on GPUs, which is not installed: see docs/cluster.md"
        )
