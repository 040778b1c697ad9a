"""Results that both ends of the weights channel compute for themselves. They must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megarl.base.rollout_types import Version
from megarl.plan.resolve import RunPlan
from megarl.plan.topologies import engines_layout
from megarl.reshard.layout import Layout, pool_layout, together, trainer_layout
from megarl.reshard.map import ReshardMap


def sent_layout(plan: RunPlan, base: Layout, layer_spec: str) -> Layout:
    """The trainer's layout of the tensors that updates carry: the model's, and those of adapters if they are not merged."""
    if plan.adapters is None:
        return base
    return together(base, trainer_layout(plan.spec, plan.trainer_topology, plan.config.model.dtype, layer_spec, plan.adapters))


def weights_map(plan: RunPlan, source: Layout, engines: Sequence[int] = ()) -> ReshardMap:
    """The reshard map from the trainer's layout `source` to all engines of the run, or to `engines`, the number of each group. Ranks are
    numbered group by group."""
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", plan.config.model.dtype
    destination = engines_layout(plan.spec, plan.groups, dtype, device, engines)
    if plan.adapters is not None:
        (group,) = plan.groups  # adapters are only sent if all engines are alike
        topology = replace(group.topology, engines=destination.world_size // group.topology.tp)
        destination = together(destination, pool_layout(plan.spec, topology, group.dtype(dtype), device, plan.adapters))
    return ReshardMap.build(source, destination)


def is_probe_version(version: Version, every: int) -> bool:
    """Whether both sides score a probe batch under `version`."""
    return every > 0 and version % every == 0
