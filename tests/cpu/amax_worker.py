"""One trainer rank of test_amax_exchange.py: quantises its part of a random model into tensors of
its own, and saves their bits.

amax_worker.py '<JSON of a Job>' RANK
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from copies_reference import apply_copy
from reshard_reference import full_tensors, megatron

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models import ModelSpec
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.weight_sync.writing import AmaxExchange

# at tp 2: 64 rows of k and v, 192 of gate and up
SPEC = ModelSpec("llama", 2, 192, 384, 4, 2, 64, 100, 64, False, 1e-6, 1e4)


class AmaxJob(msgspec.Struct, frozen=True):
    port: int
    quantization: str
    dp: int
    folder: str
    timeout_s: float = 60.0
    silent_rank: int = -1  # does nothing after the group has met


def work(rank: int, job: AmaxJob) -> None:
    topology = TrainerTopology(tp=2, dp=job.dp)
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo",
        f"tcp://127.0.0.1:{job.port}",
        timeout=limit,
        rank=rank,
        world_size=topology.world_size,
    )
    generator = generator_layout(SPEC, GeneratorTopology(), "bfloat16", "cpu", job.quantization)
    map = ReshardMap.build(trainer_layout(SPEC, topology, "float32"), generator)
    exchange = AmaxExchange(map, rank, job.timeout_s)
    if rank == job.silent_rank:
        time.sleep(60)
    tensors = megatron(SPEC, full_tensors(SPEC, torch.float32), topology, rank, fill=7.0)
    table = exchange.table(tensors)
    written = {
        t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in generator.tensors(0)
    }
    for copy in map.writes_from(rank):
        apply_copy(copy, tensors.get(copy.source_tensor), written[copy.destination_tensor], table)
    torch.save(
        {name: values.view(torch.uint8) for name, values in written.items()},
        f"{job.folder}/{rank}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(int(sys.argv[2]), msgspec.json.decode(sys.argv[1], type=AmaxJob))
