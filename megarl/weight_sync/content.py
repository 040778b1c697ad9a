"""Decides what updates contain.

Trainer and generator each compute this, and must get the same result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megarl.base.rollout_types import Version
from megarl.lora.updates import AdapterUpdate, AdapterUpdates
from megarl.plan.resolve import RunPlan
from megarl.plan.topologies import engines_layout
from megarl.reshard.layout import Layout, combined_layout
from megarl.reshard.map import ReshardMap
from megarl.weight_sync.updates import DeltaUpdate
from megarl.weight_sync.writing import DeltaUpdates, FullUpdates, compares

WEIGHTS = "all weights"
CHANGES = "changed weights"
ADAPTERS = "adapters"


class Strategy(NamedTuple):
    trainer_updates: type[FullUpdates]  # at a trainer rank
    generator_update: type[
        DeltaUpdate
    ]  # at the generator, for an update with less than all weights


STRATEGIES = {
    WEIGHTS: Strategy(FullUpdates, DeltaUpdate),
    CHANGES: Strategy(DeltaUpdates, DeltaUpdate),
    ADAPTERS: Strategy(AdapterUpdates, AdapterUpdate),
}


def strategy_of(plan: RunPlan) -> Strategy:
    if plan.sent_adapters is not None:
        return STRATEGIES[ADAPTERS]
    return STRATEGIES[CHANGES if compares(plan.config.weights) else WEIGHTS]


def sent_layout(plan: RunPlan, base: Layout, layer_spec: str) -> Layout:
    """The trainer's layout of the tensors in an update: the model's tensors, and the adapters' if
    they are sent unmerged.
    """
    adapters = plan.sent_adapters
    if adapters is None:
        return base
    return combined_layout(
        base,
        adapters.lora.trainer_layout(
            plan.spec, plan.trainer_topology, plan.config.model.dtype, layer_spec
        ),
    )


def weights_map(plan: RunPlan, source: Layout) -> ReshardMap:
    """The reshard map from the trainer's layout `source` to all engines of the plan.

    Ranks are numbered group by group.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    destination = engines_layout(plan.config, plan.spec, device)
    adapters = plan.sent_adapters
    if adapters is not None:
        (group,) = plan.groups  # adapters are sent only if all engines are in one group
        dtype = group.dtype(plan.config.model.dtype)
        destination = combined_layout(
            destination, adapters.lora.pool_layout(plan.spec, group.topology, dtype, device)
        )
    return ReshardMap.build(source, destination)


def is_probe_version(version: Version, every: int) -> bool:
    """Whether both sides score a probe batch under `version`."""
    return every > 0 and version % every == 0
