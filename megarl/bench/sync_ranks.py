"""The processes of the sync benchmark: trainer ranks that hold shards of a model, and one that plays the far end of a bare medium.

Each obeys commands that come through a pipe. They talk to each other, and to the engine, only by what is being measured.
"""

from __future__ import annotations

import multiprocessing
import traceback
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from megarl.models.registry import load_spec
from megarl.plan.topology import GeneratorTopology, TrainerTopology
from megarl.reshard.kinds import Layout
from megarl.reshard.layout import generator_layout, trainer_layout
from megarl.reshard.execute import Payloads
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.schedule import batches_from
from megarl.transports import gloo, mooncake
from megarl.transports.base import Endpoint, Sent, Transport, send, shapes_of
from megarl.transports.choice import mooncake_protocol, this_host, transport_class
from megarl.transports.two_sided import as_bytes

BLOCK_BYTES = 128 << 20  # larger than any cache
CHUNK_BYTES = 16 << 20  # of gloo: the longer, the less time of a core
RUN_BYTES = 1 << 20  # of Mooncake's TCP


def build_map(model: str, dtype: str, trainer_tp: int, engine_tp: int) -> ReshardMap:
    spec = load_spec(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = trainer_layout(spec, TrainerTopology(tp=trainer_tp), dtype)
    return ReshardMap.build(source, generator_layout(spec, GeneratorTopology(tp=engine_tp), dtype, device))


def join_gloo(address: str, rank: int, size: int, timeout_s: float) -> dist.ProcessGroupGloo:
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    return gloo.open_backend(store, rank, size, address, timeout_s)


class Rank:
    """One process. `job`: model, dtype, trainer_tp, engine_tp."""

    def __init__(self, rank: int, job: tuple[str, str, int, int], timeout_s: float):
        torch.set_num_threads(1)
        self.rank, self.timeout_s = rank, timeout_s
        self.map = build_map(*job)
        self.layout: Layout = self.map.source
        self.transports: dict[str, Transport] = {}
        self.payloads = Payloads()
        if rank < self.layout.world_size:
            self.sources = shards(self.layout, rank, Path(job[0]))
            self.writes = [write for batch in batches_from(self.map, rank) for write in batch.writes]

    def connect_and_write(self, kind: str, endpoints: Sequence[str]) -> None:
        decoded = [Endpoint.decode(text) for text in endpoints]
        self.transports[kind] = transport_class(kind)(self.rank, self.timeout_s)
        self.transports[kind].connect(decoded)
        self.shapes = shapes_of(decoded)
        self.write(kind, audit=False)

    def write(self, kind: str, audit: bool) -> Sent:
        return send(self.transports[kind], self.writes, self.sources, self.shapes, audit, payloads=self.payloads)

    def shares(self, shapes: dict[int, dict[str, tuple[int, ...]]]) -> dict[int, dict[str, int]]:
        """Hashes of what this rank sends."""
        return send(Nowhere(), self.writes, self.sources, shapes, audit=True).shares

    # Gather onto rank 0, then SGLang's own ways.

    def join_trainers(self, address: str) -> None:
        self.trainers = join_gloo(address, self.rank, self.layout.world_size, self.timeout_s)

    def gather(self) -> None:
        """Rank 0 ends up with every tensor, whole, under its Hugging Face name."""
        if self.rank:
            parts = [self.sources[tensor.name][piece.local.slices()] for tensor, piece in self.layout.owned_pieces(self.rank)]
            works = [self.trainers.send([as_bytes(part.contiguous())], 0, 0) for part in parts]
            for work in works:
                work.wait()
            return
        self.full: dict[str, torch.Tensor] = {}  # the last round's go first
        self.full = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in self.logical()}
        arriving = []
        for rank in range(self.layout.world_size):
            for tensor, piece in self.layout.owned_pieces(rank):
                target = self.full[piece.logical_name][piece.logical.slices()]
                if rank == 0:
                    target.copy_(self.sources[tensor.name][piece.local.slices()])
                else:
                    buffer = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
                    arriving.append((target, self.trainers.recv([as_bytes(buffer)], rank, 0), buffer))
        for target, work, buffer in arriving:
            work.wait()
            if buffer is not target:
                target.copy_(buffer)

    def logical(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        ends: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for rank in range(self.layout.world_size):
            for tensor, piece in self.layout.owned_pieces(rank):
                before = ends.get(piece.logical_name, ((0,) * len(piece.logical.end), None))[0]
                ends[piece.logical_name] = (tuple(map(max, before, piece.logical.end)), getattr(torch, tensor.dtype))
        return [(name, shape, dtype) for name, (shape, dtype) in ends.items()]

    def join_engines(self, port: int, size: int) -> None:
        from megarl.generator.sglang_updates import join_update_group

        self.engines = join_update_group(port, size, "gloo")

    def broadcast(self, flattened: bool) -> None:
        tensors = list(self.full.values())
        if flattened:
            tensors = [torch.cat([as_bytes(tensor) for tensor in tensors])]
        works = [torch.distributed.broadcast(tensor, src=0, group=self.engines, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    def buckets(self, count: int) -> list[str]:
        """One for each worker of the engine."""
        from megarl.generator.sglang_updates import bucket_payload

        return [bucket_payload(list(self.full.items())) for _ in range(count)]

    # The bare media. The far end is the rank behind the trainer ranks. Blocks are sent again and again, up to as many bytes as asked.

    @cached_property
    def block(self) -> torch.Tensor:
        """To send from, or at the far end one for each trainer rank to receive into."""
        count = 1 if self.rank < self.layout.world_size else self.layout.world_size
        return torch.full((count * BLOCK_BYTES,), 1 + self.rank, dtype=torch.uint8)

    def map_file(self, path: str, size: int) -> None:
        file = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)
        self.mapped = torch.empty(0, dtype=torch.uint8).set_(file, self.rank * BLOCK_BYTES, (BLOCK_BYTES,))

    def copy_blocks(self, size: int) -> None:
        for part in block_parts(size, BLOCK_BYTES):
            self.mapped[part].copy_(self.block[part])

    def join_bare(self, address: str) -> None:
        self.bare = join_gloo(address, self.rank, self.layout.world_size + 1, self.timeout_s)

    def send_blocks(self, size: int) -> None:
        for work in [self.bare.send([self.block[part]], self.layout.world_size, 0) for part in block_parts(size, CHUNK_BYTES)]:
            work.wait()

    def receive_blocks(self, sizes: Sequence[int]) -> None:
        blocks = self.block.split(BLOCK_BYTES)
        parts = [(rank, blocks[rank][part]) for rank, size in enumerate(sizes) for part in block_parts(size, CHUNK_BYTES)]
        for work in [self.bare.recv([part], rank, 0) for rank, part in parts]:
            work.wait()

    def open_block(self) -> str:
        """To Mooncake, for one-sided writes."""
        protocol = mooncake_protocol([this_host()])
        self.mooncake = mooncake.open_engine("127.0.0.1", protocol)
        mooncake.register(self.mooncake, [(self.block.data_ptr(), self.block.numel())])
        return mooncake.address_of("127.0.0.1", self.mooncake, protocol, self.block.data_ptr())

    def write_blocks(self, address: str, size: int) -> None:
        _, peer, base = mooncake.address_parts(address)
        own, there = self.block.data_ptr(), base + self.rank * BLOCK_BYTES
        runs = [(own + part.start, there + part.start, part.stop - part.start) for part in block_parts(size, RUN_BYTES)]
        if not mooncake.write_runs(self.mooncake, peer, runs, self.timeout_s):
            raise RuntimeError(f"Mooncake could not write to {peer}")


def block_parts(size: int, part_bytes: int) -> Iterator[slice]:
    """`size` bytes in parts of a block that is used again from its start when it is through. part_bytes divides BLOCK_BYTES."""
    for start in range(0, size, part_bytes):
        yield slice(start % BLOCK_BYTES, start % BLOCK_BYTES + min(part_bytes, size - start))


def shards(layout: Layout, rank: int, model: Path) -> dict[str, torch.Tensor]:
    """The tensors of one rank, cut out of a checkpoint; padding is zero."""
    from safetensors.torch import load_file

    logical = load_file(model / "model.safetensors")
    result = {}
    for tensor in layout.tensors(rank):
        result[tensor.name] = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for piece in tensor.pieces:
            result[tensor.name][piece.local.slices()] = logical[piece.logical_name][piece.logical.slices()]
    return result


class Nowhere:
    """A transport whose writes are lost."""

    kind = "nowhere"

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        pass

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        pass

    def fence(self) -> None:
        pass


class Ranks:
    """Several ranks as processes: `call` runs one method on each of them at the same time."""

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
        """`per_rank`: for each rank in `ranks` (default: all) its arguments; none: no arguments. Raises RuntimeError, TimeoutError."""
        chosen = list(range(len(self._pipes)) if ranks is None else ranks)
        for i, rank in enumerate(chosen):
            try:
                self._pipes[rank].send((method, per_rank[i] if per_rank else ()))
            except BrokenPipeError as error:  # not to be taken for a reader of our output that has seen enough
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
            pipe.send((True, getattr(obeying, method)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
