"""The processes of the sync benchmark: trainer ranks with shards of a model, and one process that is the far end of a bare medium.

Each obeys commands from a pipe. They talk to each other and to the engine only by what is being measured.
"""

from __future__ import annotations

import multiprocessing
import operator
import statistics
import time
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megarl.bench.sync_gather import Gather
from megarl.bench.sync_media import BareMedia
from megarl.config.schema import WeightsConfig
from megarl.kernels.changes import bits_of
from megarl.models.registry import load_spec
from megarl.reshard.execute import Payloads
from megarl.reshard.kinds import Layout
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.schedule import scheduled_writes
from megarl.topology import GeneratorTopology, TrainerTopology
from megarl.weight_sync.deltas import Deltas, Found, send_changes
from megarl.weight_sync.transports.base import Endpoint, Transport
from megarl.weight_sync.transports.choice import transport_class
from megarl.weight_sync.writing import Sent, landing_first, send, shapes_of


def build_map(model: str, dtype: str, trainer_tp: int, engine_tp: int) -> ReshardMap:
    spec = load_spec(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = trainer_layout(spec, TrainerTopology(tp=trainer_tp), dtype)
    return ReshardMap.build(source, generator_layout(spec, GeneratorTopology(tp=engine_tp), dtype, device))


class Rank:
    """One process. `job`: model, dtype, trainer_tp, engine_tp. The rank after the last trainer rank only serves bare media."""

    def __init__(self, rank: int, job: tuple[str, str, int, int], timeout_s: float):
        torch.set_num_threads(1)
        self.rank, self.timeout_s = rank, timeout_s
        self.map = build_map(*job)
        layout = self.map.source
        self.transports: dict[str, Transport] = {}
        self.parts: dict[str, tuple[list[Copy], list[Copy]]] = {}  # by transport: the copies that land, all others
        self.payloads = Payloads()
        self.found: dict[tuple[str, float], Found] = {}  # by transport and share: what changes
        self.media = BareMedia(rank, layout.world_size, timeout_s)
        if rank < layout.world_size:
            self.sources = shards(layout, rank, Path(job[0]))
            self.gather = Gather(rank, layout, self.sources, timeout_s)
            self.writes = scheduled_writes(self.map, rank)

    def connect_and_write(self, kind: str, endpoints: Sequence[str]) -> None:
        decoded = [Endpoint.decode(text) for text in endpoints]
        self.transports[kind] = transport_class(kind)(self.rank, self.timeout_s)
        self.transports[kind].connect(decoded)
        self.shapes = shapes_of(decoded)
        self.parts = {**self.parts, kind: landing_first(self.writes, decoded)}
        for part, copies in enumerate(self.parts[kind]):
            if copies:
                self.write(kind, part, audit=False)

    def write(self, kind: str, part: int, audit: bool) -> Sent:
        """`part`: 0: the copies that land, 1: all others."""
        return send(self.transports[kind], self.parts[kind][part], self.sources, self.shapes, audit, payloads=self.payloads)

    def find_delta(self, kind: str, share: float) -> tuple[float, list[int], bool]:
        """Another version of the weights, in which this share of the elements has another lowest bit. Returns seconds to find that, the
        bytes to send and those of the elements, and whether they find room."""
        generator = torch.Generator().manual_seed(self.rank)
        other = {name: values.clone() for name, values in self.sources.items()}
        for values in other.values():
            bits_of(values).bitwise_xor_((torch.rand(values.shape, generator=generator) < share).to(bits_of(values).dtype))
        deltas = Deltas(WeightsConfig(delta="auto"))
        self.payloads.begin(self.sources)
        deltas.keep(0, self.writes, None, self.payloads, declined=False)
        self.payloads.begin(other)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            deltas.find(0, self.writes, self.shapes, False, None, self.payloads)
            times.append(time.perf_counter() - began)
        found = deltas.find(0, self.writes, self.shapes, True, None, self.payloads)  # for the check, with hashes
        assert found is not None
        self.found[kind, share] = found
        room = all(size <= self.transports[kind].room(rank) for rank, size in found.sizes.items())
        return statistics.median(times), [sum(found.sizes.values()), found.changed_bytes], room

    def write_delta(self, kind: str, share: float) -> Sent:
        return send_changes(self.transports[kind], self.found[kind, share], 0, self.sources)

    def shares(self, shapes: dict[int, dict[str, tuple[int, ...]]]) -> dict[int, dict[str, int]]:
        """Hashes of what this rank sends."""
        nowhere: Any = Nowhere()
        return send(nowhere, self.writes, self.sources, shapes, audit=True).shares


def shards(layout: Layout, rank: int, model: Path) -> dict[str, torch.Tensor]:
    """One rank's tensors, cut out of a checkpoint; padding is zero."""
    from safetensors.torch import load_file

    logical = load_file(model / "model.safetensors")
    result = {}
    for tensor in layout.tensors(rank):
        result[tensor.name] = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for piece in tensor.pieces:
            result[tensor.name][piece.local.slices()] = logical[piece.logical_name][piece.logical.slices()]
    return result


class Nowhere:
    """A transport that drops what is written."""

    kind = "nowhere"

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        pass

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        pass

    def fence(self) -> None:
        pass


class Ranks:
    """Several ranks as processes; `call` runs one method, such as `write` or `gather.collect`, on all of them at the same time."""

    def __init__(self, count: int, job: tuple[str, str, int, int], timeout_s: float):
        context = multiprocessing.get_context("spawn")
        self._timeout_s = timeout_s
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, job, timeout_s), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, method: str, *per_rank: Sequence[Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """`per_rank`: the arguments of each rank in `ranks` (default: all); none given: no arguments. Raises RuntimeError, TimeoutError."""
        chosen = list(range(len(self._pipes)) if ranks is None else ranks)
        for i, rank in enumerate(chosen):
            try:
                self._pipes[rank].send((method, per_rank[i] if per_rank else ()))
            except BrokenPipeError as error:  # the command line would take it for a closed stdout
                raise self._gone(rank, method) from error
        return [self._answer(rank, method) for rank in chosen]

    def _answer(self, rank: int, method: str) -> Any:
        if not self._pipes[rank].poll(self._timeout_s):
            raise TimeoutError(f"trainer rank {rank} did not finish {method} within {self._timeout_s:.0f} s")
        try:
            done, answer = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._gone(rank, method) from error
        if not done:
            raise RuntimeError(f"trainer rank {rank} failed at {method}:\n{answer}")
        return answer

    def _gone(self, rank: int, method: str) -> RuntimeError:
        self._processes[rank].join(10)
        return RuntimeError(f"trainer rank {rank} ended with {self._processes[rank].exitcode} before it could answer {method}")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)


def _serve(pipe: Connection, rank: int, job: tuple[str, str, int, int], timeout_s: float) -> None:
    obeying: Rank | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:  # the benchmark is gone
            return
        try:
            obeying = obeying or Rank(rank, job, timeout_s)
            pipe.send((True, operator.attrgetter(method)(obeying)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
