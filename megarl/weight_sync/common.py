"""What both ends of the weights channel compute, each for itself, and alike."""

from __future__ import annotations

from dataclasses import replace

import torch

from megarl.plan.resolve import RunPlan
from megarl.reshard.layout import Layout, generator_layout
from megarl.reshard.map import ReshardMap
from megarl.types import Version


def weights_map(plan: RunPlan, source: Layout, engines: int | None = None) -> ReshardMap:
    """The reshard map from the trainer's layout `source` to all engines of the run, or to `engines` of them."""
    topology = plan.generator_topology if engines is None else replace(plan.generator_topology, engines=engines)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    quantization = plan.config.generator.quantization
    return ReshardMap.build(source, generator_layout(plan.spec, topology, plan.engine_dtype, device, quantization))


def is_probe_version(version: Version, every: int) -> bool:
    """Whether both sides score a probe batch under `version`."""
    return every > 0 and version % every == 0
