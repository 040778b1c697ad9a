"""Direct writes between two processes on one GPU: this one plays a trainer rank, the other an
engine. Map, transport, quantiser and audit are real.

On a GPU the transport is CUDA IPC; in a rehearsal, shared memory. The ceiling is a copy of as many
bytes within the device. The result is checked twice. The audit compares hashes of what was sent
with hashes of the other process's memory. And the hashes are compared with those of the weights in
the engine's layout, which torch has cut and quantised from whole tensors, without the map or the
kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.bench.gpu.measure import Bench, llama
from megarl.kernels.audit import hash_tensors
from megarl.kernels.quantise import quantise
from megarl.reshard.forwarding import SentTensors
from megarl.reshard.layout import QUANTISATIONS, Layout, generator_layout, hf_layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.reshard.schedule import scheduled_writes
from megarl.weight_sync.audit import compare, packed, packed_shares
from megarl.weight_sync.engine_process import EngineProcess
from megarl.weight_sync.transports.base import CUDA_IPC, SHARED_MEMORY, Endpoint
from megarl.weight_sync.transports.choice import transport_class
from megarl.weight_sync.writing import AmaxExchange, send, shapes_of

DTYPE = "bfloat16"
TIMEOUT_S = 40.0


def run(bench: Bench, format: str) -> None:
    """`format`: unquantised, or a value of generator.quantization."""
    quantization = None if format == "unquantised" else format
    spec = llama("toy" if bench.toy else "8B")
    kind = CUDA_IPC if bench.cuda else SHARED_MEMORY
    source = trainer_layout(spec, TrainerTopology(), DTYPE)
    destination = generator_layout(spec, GeneratorTopology(), DTYPE, "cuda", quantization)
    map = ReshardMap.build(source, destination)
    prove_exactly_once(map)
    copies = scheduled_writes(map, 0)
    torch.manual_seed(1)
    weights = {
        t.name: torch.randn(t.shape, device=bench.device, dtype=torch.bfloat16)
        for t in source.tensors(0)
    }
    size = sum(copy.bytes for copy in copies)
    read = sum(values.nbytes for values in weights.values())
    ceiling = bench.copy_bytes_per_s()
    transport = transport_class(kind)(0, TIMEOUT_S)
    amax = AmaxExchange(map, 0, TIMEOUT_S)
    with EngineProcess(str(bench.device), destination, TIMEOUT_S) as engine:
        endpoint = Endpoint.decode(engine.ask("open", kind))
        transport.connect([endpoint])
        shapes = shapes_of([endpoint])

        def write(audit: bool) -> Any:
            return send(transport, copies, weights, shapes, audit, amax.table(weights))

        written_ms = bench.median_ms(lambda: write(False))
        engine.ask("scramble")
        report = write(True)
        # raises AuditError
        compare([packed(engine.ask("hashes"))], [packed_shares(report.shares)], SentTensors(map))
        bench.row(f"audit of {len(endpoint.tensors)} tensors by {kind}", note="every byte as sent")
        differing_names = unlike(
            engine.ask("hashes"), expected(spec, destination, map, weights, quantization)
        )
        row = {"what": "gathered, then quantised by torch", "note": "the same bits"}
        if differing_names:
            names = ", ".join(differing_names[:5])
            row["note"] = "OTHER BITS"
            row["failed"] = f"not as gathered and then quantised by torch: {names}"
        bench.emit(row)
        moved = {"GB": size / 1e9, "writes": len(copies)}
        # the copy; a quantised weight is read and written before
        minimum = 2 * size + (read + size if quantization else 0)
        ideal_ms = minimum / ceiling * 1e3
        bench.emit(
            {"what": "copy of as many bytes", "ms": ideal_ms, "gb_per_s": size / ideal_ms / 1e6}
            | moved
        )
        for way, audit in (
            ("direct writes", False),
            ("direct writes, hashed at the sender", True),
        ):
            ms = bench.median_ms(lambda audit=audit: write(audit)) if audit else written_ms
            bench.emit(
                {"what": way, "ms": ms, "gb_per_s": size / ms / 1e6, "fraction": ideal_ms / ms}
                | moved
            )
        ms = bench.median_ms(lambda: engine.ask("hashes"))
        bench.emit(
            {"what": "hashes of the engine's memory", "ms": ms, "gb_per_s": size / ms / 1e6} | moved
        )
        transport.close()


def expected(
    spec,
    destination: Layout,
    map: ReshardMap,
    weights: dict[str, torch.Tensor],
    quantization: str | None,
) -> dict[str, torch.Tensor]:
    """The engine's tensors, made from whole logical tensors."""
    device = next(iter(weights.values())).device
    logical = {
        t.name: torch.empty(t.shape, dtype=torch.bfloat16, device=device)
        for t in hf_layout(spec, DTYPE).tensors(0)
    }
    for tensor in map.source.tensors(0):
        for piece in tensor.pieces:
            logical[piece.logical_name][piece.logical.slices()] = weights[tensor.name][
                piece.local.slices()
            ]
    tensors = {}
    for tensor in generator_layout(spec, GeneratorTopology(), DTYPE, "cuda").tensors(0):
        tensors[tensor.name] = torch.zeros(tensor.shape, dtype=torch.bfloat16, device=device)
        for piece in tensor.pieces:
            tensors[tensor.name][piece.local.slices()] = logical[piece.logical_name][
                piece.logical.slices()
            ]
    if not quantization:
        return tensors
    scales = {tensor.name for tensor in destination.tensors(0)} - tensors.keys()
    for name in scales:
        weight = name.removesuffix("_scale_inv")
        tensors[weight], tensors[name] = quantise(
            tensors[weight], QUANTISATIONS[quantization], weight
        )
    return tensors


def unlike(hashes: dict[str, int], tensors: dict[str, torch.Tensor]) -> list[str]:
    assert hashes.keys() == tensors.keys()
    current = hash_tensors(tensors)
    return [name for name in current if current[name] != hashes[name]]
