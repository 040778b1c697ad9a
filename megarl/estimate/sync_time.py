"""Seconds of a weight update: the bytes of the busiest rank over its link, and the generator's messages and calls."""

from __future__ import annotations

from megarl.config.schema import RunConfig
from megarl.estimate.constants import Constants
from megarl.estimate.hardware import Cluster
from megarl.models import ModelSpec
from megarl.models.adapter_pool import unserved
from megarl.models.adapters import Lora
from megarl.plan.lora import sends_adapters
from megarl.plan.topologies import generator_topology, trainer_topology
from megarl.reshard.layout import generator_layout, pool_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.reshard.relays import busiest_bytes, delta_bytes, foreseen

CHANGED = 0.01  # share of the elements that change in a step, where a delta is predicted; published are 0.9 to 3 % of bf16 at 8B to 70B


def sync_s(spec: ModelSpec, config: RunConfig, cluster: Cluster) -> tuple[float, float]:
    """Seconds by the map that the run would carry out: of an update (of adapters, where they are sent alone), and of one that carries only
    what has changed of all weights, if that is CHANGED.

    Ranks of one node write over NVLink, others over their NICs.
    """
    source = trainer_layout(spec, trainer_topology(config.trainer), config.model.dtype)
    device, quantization = cluster.gpu.device, config.generator.quantization
    destination = generator_layout(spec, generator_topology(config.generator), _engine_dtype(config), device, quantization)
    carried_out = foreseen(ReshardMap.build(source, destination), config.weights.relay, config.generator.tp)
    rate = link_bytes_per_s(source.world_size + destination.world_size, cluster)
    alone_s = adapters_s(spec, config, device, rate) if sends_adapters(config, spec, device) else None
    return busiest_bytes(*carried_out) / rate if alone_s is None else alone_s, delta_bytes(*carried_out, CHANGED) / rate


def adapters_s(spec: ModelSpec, config: RunConfig, device: str, link_bytes_per_s: float) -> float | None:
    """Seconds of an update of adapters alone, whose map it proves; None if there are none, or if the engines cannot serve them."""
    lora, topology = Lora.of(config.lora), generator_topology(config.generator)
    if lora is None or unserved(spec, topology, device, lora):
        return None
    source = trainer_layout(spec, trainer_topology(config.trainer), config.model.dtype, lora=lora)
    map = ReshardMap.build(source, pool_layout(spec, topology, _engine_dtype(config), device, lora))
    prove_exactly_once(map)
    return busiest_bytes(*foreseen(map, config.weights.relay, config.generator.tp)) / link_bytes_per_s


def control_s(trainer_ranks: int, engines: int, tp: int, constants: Constants) -> float:
    """Seconds that the generator's only process spends on an update's messages and calls, while engines are paused."""
    of_ranks = trainer_ranks * constants.trainer_message_s + engines * tp * constants.worker_message_s
    return of_ranks + engines * constants.engine_calls_s


def _engine_dtype(config: RunConfig) -> str:
    return config.model.dtype if config.generator.quantization is None else "bfloat16"


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
