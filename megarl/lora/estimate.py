"""The memory and time that adapters need, for `megarl plan`."""

from __future__ import annotations

import functools
from dataclasses import replace

from megarl.base.geometry import TrainerTopology
from megarl.config.schema import RunConfig, TrainerConfig
from megarl.estimate.hardware import Cluster
from megarl.estimate.memory import (
    AdapterElements,
    WeightElements,
    one_replica,
    rank_bytes,
    shape_of,
    stage_elements,
)
from megarl.estimate.times import update_bytes_per_s
from megarl.lora.layout import Lora, trainer_adapters, unserved
from megarl.lora.plan import AdapterPlan
from megarl.models import ModelSpec
from megarl.plan.topologies import engine_groups, trainer_topology
from megarl.reshard.forwarding import busiest_bytes, planned_relays
from megarl.reshard.layout import Layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import prove_exactly_once


def adapter_elements(
    config: RunConfig, spec: ModelSpec, trainer: TrainerConfig, device: str
) -> AdapterElements | None:
    """What trainer ranks keep beside the frozen weights: the adapters, and a copy of the weights
    with adapters merged, unless updates carry only adapters. None if all weights are trained.
    """
    adapters = AdapterPlan.of(config, spec)
    if adapters is None:
        return None
    adapter_memory = adapter_elements_by_stage(spec, trainer, config.model.dtype, adapters.lora)
    merges = not adapters.are_sent_alone(device)
    return AdapterElements(
        [adapter for adapter, _ in adapter_memory],
        [adapter.total + merges * merged.total for adapter, merged in adapter_memory],
    )


def adapter_elements_by_stage(
    spec: ModelSpec, trainer: TrainerConfig, dtype: str, lora: Lora
) -> list[tuple[WeightElements, WeightElements]]:
    """(elements of adapters, elements of the weights with adapters) on the fullest rank of each
    pipeline stage.
    """
    return _adapter_elements_by_stage(
        shape_of(spec), one_replica(trainer_topology(trainer)), dtype, lora
    )


@functools.lru_cache(maxsize=4096)
def _adapter_elements_by_stage(
    spec: ModelSpec, topology: TrainerTopology, dtype: str, lora: Lora
) -> list[tuple[WeightElements, WeightElements]]:
    model_layout = trainer_layout(spec, topology, dtype)
    names = {adapter.weight.name for adapter in trainer_adapters(spec, topology, "local", lora)}
    adapted_layout = Layout(
        model_layout.name,
        model_layout.world_size,
        tuple(kind for kind in model_layout.kinds if kind.name in names),
    )
    return list(
        zip(
            stage_elements(lora.trainer_layout(spec, topology, dtype)),
            stage_elements(adapted_layout),
            strict=True,
        )
    )


def pool_bytes(config: RunConfig, spec: ModelSpec, device: str) -> int:
    """Bytes of SGLang's pool for adapters on a generator rank, which has two slots; 0 if engines
    serve none.
    """
    adapters = AdapterPlan.of(config, spec)
    if adapters is None or not adapters.are_sent_alone(device):
        return 0
    # adapters are sent only if all engines are in one group
    one = replace(engine_groups(config.generator)[0].topology, engines=1)
    return 2 * max(rank_bytes(adapters.lora.pool_layout(spec, one, config.model.dtype, device)))


def alone_s(config: RunConfig, spec: ModelSpec, cluster: Cluster) -> float | None:
    """Seconds of an update if it carries adapters alone; None if it carries all weights."""
    adapters = AdapterPlan.of(config, spec)
    device = cluster.gpu.device
    if adapters is None or not adapters.are_sent_alone(device):
        return None
    return adapters_s(spec, config, device, update_bytes_per_s(config, cluster))


def adapters_s(
    spec: ModelSpec, config: RunConfig, device: str, link_bytes_per_s: float
) -> float | None:
    """Seconds of an update of adapters alone, by its map, which is proven.

    None if there are no adapters, or if engines cannot serve them.
    """
    lora = Lora.of(config.lora)
    group, *other_groups = engine_groups(config.generator)
    if lora is None or other_groups or unserved(spec, group.topology, device, lora):
        return None
    source = lora.trainer_layout(spec, trainer_topology(config.trainer), config.model.dtype)
    map = ReshardMap.build(
        source, lora.pool_layout(spec, group.topology, group.dtype(config.model.dtype), device)
    )
    prove_exactly_once(map)
    return (
        busiest_bytes(*planned_relays(map, config.weights.relay, config.generator.tp))
        / link_bytes_per_s
    )
