"""Measures what a weight update costs the processor of one sending rank: values, audit hashes,
staging, lists of writes. Nothing crosses a network.

Real: the map and the senders of a config, `send`, and Mooncake's sending end. Light: tensors, which
keep their number and their cuts, but have few columns. Left out: handing the writes to Mooncake.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass

import torch

from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.models import ModelSpec
from megarl.plan.topologies import engines_layout, trainer_topology
from megarl.reshard.execute import AmaxTable, Payloads, amax_parts
from megarl.reshard.layout import Layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.schedule import scheduled_writes
from megarl.weight_sync.transports import mooncake
from megarl.weight_sync.transports.base import Endpoint, RemoteTensor
from megarl.weight_sync.writing import content_of, send, shapes_of

CONFIG = "configs/405b_aipo.yaml"
# of 405B only the number of rows that a rank holds of a layer's matrices matters here
LAYERS = 4
THIN = ModelSpec("llama", LAYERS, 1024, 8192, 16, 8, 128, 8192, 131072, False, 1e-5, 5e5)
REPEATS = 5
RANK = 17  # of the trainer


@dataclass(frozen=True)
class Cost:
    trainer: str
    wire: str
    writes: int
    contents: int  # writes with different values
    write_us: float  # median, per write
    content_us: float  # the same time per content


class WithoutNetwork(mooncake.MooncakeTransport):
    """Mooncake's sending end with its engine and registered memory, which sends nothing."""

    def _send_runs(self, rank: int, runs: list[mooncake.Run]) -> str:
        return ""


def run(as_json: bool) -> None:
    torch.set_num_threads(1)
    costs = []
    for zero in (1, 3):
        for wire in ("null", "fp8_block", "fp8_channel"):
            sizes = [f"trainer.zero={zero}", f"generator.quantization={wire}"]
            costs.append(measure(f"tp 8, dp 64, zero {zero}", wire, load_config(CONFIG, sizes)))
    print(json.dumps([asdict(cost) for cost in costs]) if as_json else render(costs))


def measure(name: str, wire: str, config: RunConfig, spec: ModelSpec = THIN) -> Cost:
    source = trainer_layout(spec, trainer_topology(config.trainer), config.model.dtype)
    destination = engines_layout(config, spec, "cuda")
    map = ReshardMap.build(source, destination)
    copies = scheduled_writes(map, RANK)
    tensors = {
        tensor.name: torch.randn(tensor.shape, dtype=torch.bfloat16)
        for tensor in source.tensors(RANK)
    }
    amax = AmaxTable.measure(amax_parts(map, RANK), tensors)
    endpoints = [endpoint_of(destination, rank) for rank in range(destination.world_size)]
    transport = WithoutNetwork(RANK, timeout_s=60.0)
    transport.connect(endpoints)
    shapes = shapes_of(endpoints)
    payloads = Payloads()
    times_s = []
    for _ in range(1 + REPEATS):
        begin_s = time.thread_time()
        send(transport, copies, tensors, shapes, True, amax, payloads)
        times_s.append(time.thread_time() - begin_s)
    transport.close()
    time_s = statistics.median(times_s[1:])  # the first one makes views and buffers
    contents = len({content_of(copy) for copy in copies})
    return Cost(
        trainer=name,
        wire=wire,
        writes=len(copies),
        contents=contents,
        write_us=time_s / len(copies) * 1e6,
        content_us=time_s / contents * 1e6,
    )


def endpoint_of(layout: Layout, rank: int) -> Endpoint:
    """An engine worker whose parameters lie in its memory in C order, all at its beginning."""
    tensors = []
    for tensor in layout.tensors(rank):
        strides = [1]
        for extent in reversed(tensor.shape[1:]):
            strides.insert(0, strides[0] * extent)
        tensors.append(RemoteTensor(tensor.name, tensor.shape, tensor.dtype, tuple(strides)))
    return Endpoint(rank, "mooncake", "tcp://127.0.0.1:1/0", 0, tensors)


def render(costs: list[Cost]) -> str:
    lines = [
        "| trainer | engines | writes | contents | us a write | us a content |",
        "|" + "---|" * 6,
    ]
    for cost in costs:
        lines.append(
            f"| {cost.trainer} | {cost.wire} | {cost.writes:,} | {cost.contents:,} | "
            f"{cost.write_us:.0f} | {cost.content_us:.0f} |"
        )
    return "\n".join(lines)
