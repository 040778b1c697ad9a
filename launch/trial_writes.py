"""Test writes between neighbours, for `megarl doctor`.

Each is a weight update from one process into another, with the reshard map, the writes and the
audit of a run. Every transport that can connect two processes of this machine is tried.

    python -P -m megarl.launch.trial_writes --gpu    from each GPU to the next, 1 GiB
    python -P -m megarl.launch.trial_writes          in host memory, 16 MiB

It prints each encoded Write on a line of its own as soon as it is done. It is a separate process,
since it imports torch, and a broken GPU may hang it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time

import msgspec
import torch

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.messaging.host import loopback
from megarl.models import ModelSpec, load_spec
from megarl.reshard.forwarding import SentTensors
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.schedule import scheduled_writes
from megarl.weight_sync.audit import compare, packed, packed_shares
from megarl.weight_sync.engine_process import EngineProcess
from megarl.weight_sync.transports.base import NCCL, Endpoint, Offer, Opening
from megarl.weight_sync.transports.choice import (
    AUTO,
    TABLE,
    this_host,
    transport_between,
    transport_class,
)
from megarl.weight_sync.writing import send, shapes_of

DTYPE = "bfloat16"
TIMES = 3
WRITE_S = 60.0  # for each step of a write: to open memory, to connect, to write


class Write(msgspec.Struct, frozen=True):
    """The result of a test write from one device to another."""

    kind: str  # kind of transport
    source: str  # device, in torch's notation
    target: str
    is_default: bool  # whether weights.transport=auto uses this kind here
    bytes: int = 0
    gb_per_s: float = 0.0
    error: str = ""  # empty: all bytes arrived as sent


def model(gpu: bool) -> ModelSpec:
    """A Llama of 1 GiB, or of 16 MiB, in bf16."""
    hidden, layers, vocabulary = (2048, 6, 33792) if gpu else (256, 4, 8192)
    heads = hidden // 128
    return load_spec(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "vocab_size": vocabulary,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 128,
        }
    )


def ring(devices: list[str]) -> list[tuple[str, str]]:
    """Pairs of each device and the next. A single device is paired with itself."""
    return list(zip(devices, devices[1:] + devices[:1]))


def write(kind: str, source: str, map: ReshardMap, neighbour: EngineProcess) -> tuple[int, float]:
    """Writes weights from `source` to the neighbour, once to connect and TIMES again.

    Returns (bytes, GB/s of the fastest write).

    Raises AuditError if other bytes have arrived, and TimeoutError or RuntimeError if a step fails.
    """
    transport_type = transport_class(kind)
    host = this_host()
    stores = []
    opening = Opening(map, {0: [0]}, [host, host], loopback(), WRITE_S, stores)
    offer: Offer = transport_type.offers(opening)[0]
    endpoint = Endpoint.decode(neighbour.ask("open", kind, offer, loopback()))
    weights = {
        t.name: torch.randn(t.shape, device=source).to(getattr(torch, t.dtype))
        for t in map.source.tensors(0)
    }
    transport = transport_type(0, WRITE_S)
    copies = scheduled_writes(map, 0)
    shapes = shapes_of([endpoint])
    shares = {}
    size = 0
    took_s = math.inf
    for attempt in range(1 + TIMES):
        neighbour.ask("scramble")
        if not transport_type.one_sided:
            neighbour.start("receive")
        if not attempt:
            transport.connect([endpoint])
        start = time.monotonic()
        sent = send(transport, copies, weights, shapes, audit=not attempt)
        if not transport_type.one_sided:
            neighbour.answer()
        if transport_type.lands_at(endpoint):
            neighbour.ask("spread")
        took_s = min(took_s, time.monotonic() - start)
        size = sent.bytes
        shares = shares or sent.shares
        compare([packed(neighbour.ask("hashes"))], [packed_shares(shares)], SentTensors(map))
    transport.close()
    stores.clear()
    return size, size / took_s / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", action="store_true")
    gpu = parser.parse_args().gpu
    if gpu and not torch.cuda.is_available():
        sys.exit("torch finds no GPU that it can use")
    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if gpu else ["cpu"]
    spec = model(gpu)
    host = this_host()
    generator_tensors = generator_layout(spec, GeneratorTopology(), DTYPE, "cuda" if gpu else "cpu")
    map = ReshardMap.build(trainer_layout(spec, TrainerTopology(), DTYPE), generator_tensors)
    kinds = [kind for kind in TABLE if not transport_class(kind).hindrance(host, host)]
    default = transport_between(AUTO, host, host)
    with contextlib.ExitStack() as resources:
        # start concurrently
        neighbours = {
            pair: resources.enter_context(EngineProcess(pair[1], generator_tensors, WRITE_S))
            for pair in ring(devices)
        }
        for (source, target), neighbour in neighbours.items():
            if gpu:
                torch.cuda.set_device(source)
            # two NCCL ranks cannot share a GPU
            for kind in [kind for kind in kinds if kind != NCCL or source != target]:
                result = Write(kind, source, target, is_default=kind == default)
                try:
                    size, rate = write(kind, source, map, neighbour)
                    result = msgspec.structs.replace(result, bytes=size, gb_per_s=rate)
                except Exception as error:
                    last_line = (str(error).strip().splitlines() or [repr(error)])[-1]
                    result = msgspec.structs.replace(result, error=last_line)
                    # the old one may still be busy
                    neighbour = resources.enter_context(
                        EngineProcess(target, generator_tensors, WRITE_S)
                    )
                print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    main()
