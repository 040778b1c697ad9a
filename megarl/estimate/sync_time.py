"""Seconds of a weight update: the bytes of the busiest rank over its link."""

from __future__ import annotations

from megarl.config.schema import RunConfig
from megarl.estimate.hardware import Cluster
from megarl.models import ModelSpec
from megarl.plan.topologies import generator_topology, trainer_topology
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.relays import busiest_bytes, delta_bytes, foreseen

CHANGED = 0.01  # share of the elements that change in a step, where a delta is predicted; published are 0.9 to 3 % of bf16 at 8B to 70B


def sync_s(spec: ModelSpec, config: RunConfig, cluster: Cluster) -> tuple[float, float]:
    """Seconds by the map that the run would carry out: of a full update, and of one that carries only what has changed, if that is CHANGED.

    Ranks of one node write over NVLink, others over their NICs.
    """
    dtype = config.model.dtype
    source = trainer_layout(spec, trainer_topology(config.trainer), dtype)
    quantization = config.generator.quantization
    engine_dtype = dtype if quantization is None else "bfloat16"
    destination = generator_layout(spec, generator_topology(config.generator), engine_dtype, cluster.gpu.device, quantization)
    carried_out = foreseen(ReshardMap.build(source, destination), config.weights.relay, config.generator.tp)
    rate = link_bytes_per_s(source.world_size + destination.world_size, cluster)
    return busiest_bytes(*carried_out) / rate, delta_bytes(*carried_out, CHANGED) / rate


def balanced_sync_s(engine_bytes: float, generator_ranks: int, trainer_ranks: int, cluster: Cluster, relaying: int = 0) -> float:
    """Seconds without a map, for a search: every generator rank gets `engine_bytes`, and the trainer ranks send equal shares.

    `relaying`: how many engines pass weights on to each other (weights.relay=engines); each gets its part from the trainer in turn.
    """
    fan_out = generator_ranks / trainer_ranks
    busiest = max(1.0, fan_out)
    if relaying:
        busiest = min(busiest, fan_out / relaying + (1 - 1 / relaying))
    return engine_bytes * busiest / link_bytes_per_s(generator_ranks + trainer_ranks, cluster)


def link_bytes_per_s(ranks: int, cluster: Cluster) -> float:
    return cluster.gpu.nvlink_bytes_per_s if ranks <= cluster.gpus_per_node else cluster.gpu.nic_bytes_per_s
