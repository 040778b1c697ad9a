"""One trainer rank as a process: holds its shards of an HF checkpoint, cut by the trainer layout,
and writes them to the engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.models.registry import load_spec
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.weight_sync.transports.base import Endpoint
from megarl.weight_sync.transports.choice import transport_class
from megarl.weight_sync.transports.shared_memory import SharedMemoryTransport
from megarl.weight_sync.writing import send, shapes_of


class OneFlippedElement(SharedMemoryTransport):
    """Writes everything right except one element of one tensor."""

    def write(self, copy, values):
        if copy.destination_tensor.endswith("layers.1.mlp.down_proj.weight"):
            values = values.clone()
            values[0, -1] = -values[0, -1]
        super().write(copy, values)


def shards(logical: dict[str, torch.Tensor], layout, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of one rank; padding stays zero."""
    result = {}
    for tensor in layout.tensors(rank):
        values = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for piece in tensor.pieces:
            values[piece.local.slices()] = logical[piece.logical_name][piece.logical.slices()]
        result[tensor.name] = values
    return result


def reshard_map(model: str | Path, dtype: str, topology: dict[str, int], tp: int) -> ReshardMap:
    spec = load_spec(model)
    source = trainer_layout(spec, TrainerTopology(**topology), dtype)
    return ReshardMap.build(
        source, generator_layout(spec, GeneratorTopology(tp=tp), dtype, device="cpu")
    )


def main(job: dict) -> None:
    torch.set_num_threads(1)
    map = reshard_map(job["model"], job["dtype"], job["topology"], job["tp"])
    sources = shards(load_file(Path(job["model"]) / "model.safetensors"), map.source, job["rank"])
    endpoints = [Endpoint.decode(text) for text in job["endpoints"]]
    transport = transport_class(job["transport"])(job["rank"], timeout_s=60)
    transport.connect(endpoints)
    sent = send(transport, map.writes_from(job["rank"]), sources, shapes_of(endpoints), audit=True)
    transport.close()
    print(json.dumps(sent.shares))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
