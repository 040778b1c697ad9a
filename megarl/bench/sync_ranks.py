"""Processes of the sync benchmark: trainer ranks with shards of a model, and one process that is
the far end of a bare medium.

Each obeys commands from a pipe. They communicate with each other and with the engine only by what
is being measured.
"""

from __future__ import annotations

import multiprocessing
import operator
import statistics
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megarl.base.geometry import GeneratorTopology, TrainerTopology
from megarl.base.processes import kill
from megarl.config.schema import WeightsConfig
from megarl.kernels.changes import bits_of
from megarl.messaging.process_groups import connect_store
from megarl.models.registry import load_spec
from megarl.reshard.execute import Payloads
from megarl.reshard.layout import Layout, generator_layout, trainer_layout
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.schedule import scheduled_writes
from megarl.weight_sync.transports import gloo, mooncake
from megarl.weight_sync.transports.base import Endpoint, Transport
from megarl.weight_sync.transports.choice import this_host, transport_class
from megarl.weight_sync.transports.two_sided import as_bytes
from megarl.weight_sync.writing import (
    Deltas,
    RankChanges,
    WrittenPart,
    landing_first,
    send,
    send_changes,
    shapes_of,
)

BLOCK_BYTES = 128 << 20  # larger than any cache
CHUNK_BYTES = 16 << 20  # per gloo send: longer ones cost less CPU time
RUN_BYTES = 1 << 20  # per write by Mooncake's TCP


class BareMedia:
    """One rank's end of a bare medium: the ceilings of `megarl bench sync`.

    Rank number `senders` is the far end. A block is sent again and again until the requested number
    of bytes is sent.
    """

    def __init__(self, rank: int, senders: int, timeout_s: float):
        self.rank = rank
        self.senders = senders
        self.timeout_s = timeout_s

    @cached_property
    def block(self) -> torch.Tensor:
        """The block to send from; at the far end, a block per trainer rank to receive into."""
        count = 1 if self.rank < self.senders else self.senders
        return torch.full((count * BLOCK_BYTES,), 1 + self.rank, dtype=torch.uint8)

    def map_file(self, path: str, size: int) -> None:
        file = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)
        assert isinstance(file, torch.UntypedStorage)
        self.mapped = torch.empty(0, dtype=torch.uint8).set_(
            file, self.rank * BLOCK_BYTES, (BLOCK_BYTES,), (1,)
        )

    def copy_blocks(self, size: int) -> None:
        for part in block_parts(size, BLOCK_BYTES):
            self.mapped[part].copy_(self.block[part])

    def join(self, address: str) -> None:
        self.bare = join_gloo(address, self.rank, self.senders + 1, self.timeout_s)

    def send_blocks(self, size: int) -> None:
        works = []
        for part in block_parts(size, CHUNK_BYTES):
            works.append(self.bare.send([self.block[part]], self.senders, 0))
        for work in works:
            work.wait()

    def receive_blocks(self, sizes: Sequence[int]) -> None:
        blocks = self.block.split(BLOCK_BYTES)
        works = []
        for rank, size in enumerate(sizes):
            for part in block_parts(size, CHUNK_BYTES):
                works.append(self.bare.recv([blocks[rank][part]], rank, 0))
        for work in works:
            work.wait()

    def open_block(self) -> str:
        """Registers the block with Mooncake for one-sided writes; returns its address."""
        protocol = mooncake.protocol_of([this_host()])
        self.mooncake = mooncake.open_engine("127.0.0.1", protocol)
        mooncake.register(self.mooncake, [(self.block.data_ptr(), self.block.numel())])
        return mooncake.address_of("127.0.0.1", self.mooncake, protocol, self.block.data_ptr())

    def write_blocks(self, address: str, size: int) -> None:
        _, peer, base = mooncake.address_parts(address)
        local_address = self.block.data_ptr()
        remote_address = base + self.rank * BLOCK_BYTES
        runs = []
        for part in block_parts(size, RUN_BYTES):
            length = part.stop - part.start
            runs.append((local_address + part.start, remote_address + part.start, length))
        if not mooncake.write_runs(self.mooncake, peer, runs, self.timeout_s):
            raise RuntimeError(f"Mooncake could not write to {peer}")


def block_parts(size: int, part_bytes: int) -> Iterator[slice]:
    """Slices of a block that cover `size` bytes, starting over at the block's end. part_bytes must
    divide BLOCK_BYTES.
    """
    for start in range(0, size, part_bytes):
        yield slice(start % BLOCK_BYTES, start % BLOCK_BYTES + min(part_bytes, size - start))


def join_gloo(address: str, rank: int, size: int, timeout_s: float) -> Any:
    """A gloo backend, typed Any: torch's annotations lack its `send` and `recv`."""
    return gloo.open_backend(connect_store(address, timeout_s), rank, size, address, timeout_s)


class Gather:
    """A trainer rank's part in the methods of other stacks: a gather onto rank 0, then SGLang's
    own update paths. `sources`: its shards of the layout's tensors.
    """

    def __init__(
        self, rank: int, layout: Layout, sources: Mapping[str, torch.Tensor], timeout_s: float
    ):
        self.rank = rank
        self.layout = layout
        self.sources = sources
        self.timeout_s = timeout_s

    def join_trainers(self, address: str) -> None:
        self.group = join_gloo(address, self.rank, self.layout.world_size, self.timeout_s)

    def collect(self) -> None:
        """Gathers every whole tensor onto rank 0, under its Hugging Face name."""
        if self.rank:
            works = []
            for tensor, piece in self.layout.owned_pieces(self.rank):
                part = self.sources[tensor.name][piece.local.slices()]
                works.append(self.group.send([as_bytes(part.contiguous())], 0, 0))
            for work in works:
                work.wait()
            return
        self.full: dict[str, torch.Tensor] = {}  # frees the tensors of the last round first
        self.full = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in self.logical()}
        arriving = []
        for rank in range(self.layout.world_size):
            for tensor, piece in self.layout.owned_pieces(rank):
                target = self.full[piece.logical_name][piece.logical.slices()]
                if rank == 0:
                    target.copy_(self.sources[tensor.name][piece.local.slices()])
                else:
                    buffer = (
                        target
                        if target.is_contiguous()
                        else torch.empty_like(target, memory_format=torch.contiguous_format)
                    )
                    arriving.append((target, self.group.recv([as_bytes(buffer)], rank, 0), buffer))
        for target, work, buffer in arriving:
            work.wait()
            if buffer is not target:
                target.copy_(buffer)

    def logical(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        ends: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for rank in range(self.layout.world_size):
            for tensor, piece in self.layout.owned_pieces(rank):
                before = ends.get(piece.logical_name, ((0,) * len(piece.logical.end), None))[0]
                ends[piece.logical_name] = (
                    tuple(map(max, before, piece.logical.end)),
                    getattr(torch, tensor.dtype),
                )
        return [(name, shape, dtype) for name, (shape, dtype) in ends.items()]

    def join_engines(self, port: int, size: int) -> None:
        from megarl.generator.sglang_updates import join_update_group

        self.engines = join_update_group(port, size)

    def broadcast(self, flattened: bool) -> None:
        tensors = list(self.full.values())
        if flattened:
            tensors = [torch.cat(list(map(as_bytes, tensors)))]
        works = []
        for tensor in tensors:
            work = torch.distributed.broadcast(tensor, src=0, group=self.engines, async_op=True)
            works.append(work)
        for work in works:
            assert work is not None  # not None, since it is asynchronous
            work.wait()

    def buckets(self, count: int) -> list[str]:
        """One bucket per worker of the engine."""
        from megarl.generator.sglang_updates import bucket_payload

        return [bucket_payload(list(self.full.items())) for _ in range(count)]


def build_map(model: str, dtype: str, trainer_tp: int, engine_tp: int) -> ReshardMap:
    spec = load_spec(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = trainer_layout(spec, TrainerTopology(tp=trainer_tp), dtype)
    return ReshardMap.build(
        source, generator_layout(spec, GeneratorTopology(tp=engine_tp), dtype, device)
    )


class Rank:
    """One process.

    `job`: model, dtype, trainer_tp, engine_tp. The rank after the last trainer rank only serves
    bare media.
    """

    def __init__(self, rank: int, job: tuple[str, str, int, int], timeout_s: float):
        torch.set_num_threads(1)
        self.rank = rank
        self.timeout_s = timeout_s
        self.map = build_map(*job)
        layout = self.map.source
        self.transports: dict[str, Transport] = {}
        # transport -> copies to landing buffers, all other copies
        self.parts: dict[str, tuple[list[Copy], list[Copy]]] = {}
        self.payloads = Payloads()
        # (transport, share) -> the changes
        self.changes: dict[tuple[str, float], RankChanges] = {}
        self.media = BareMedia(rank, layout.world_size, timeout_s)
        if rank < layout.world_size:
            self.sources = shards(layout, rank, Path(job[0]))
            self.gather = Gather(rank, layout, self.sources, timeout_s)
            self.writes = scheduled_writes(self.map, rank)

    def connect_and_write(self, kind: str, endpoints: Sequence[str]) -> None:
        decoded = list(map(Endpoint.decode, endpoints))
        self.transports[kind] = transport_class(kind)(self.rank, self.timeout_s)
        self.transports[kind].connect(decoded)
        self.shapes = shapes_of(decoded)
        self.parts = {**self.parts, kind: landing_first(self.writes, decoded)}
        for part, copies in enumerate(self.parts[kind]):
            if copies:
                self.write(kind, part, audit=False)

    def write(self, kind: str, part: int, audit: bool) -> WrittenPart:
        """Writes a part. `part` 0: the copies to landing buffers; 1: all other copies."""
        return send(
            self.transports[kind],
            self.parts[kind][part],
            self.sources,
            self.shapes,
            audit,
            payloads=self.payloads,
        )

    def find_delta(self, kind: str, share: float) -> tuple[float, list[int], bool]:
        """Changes the lowest bit of this share of the elements.

        Returns the seconds to find these changes, the numbers of bytes to send and of bytes of the
        elements, and whether the changes fit the buffers.
        """
        generator = torch.Generator().manual_seed(self.rank)
        changed_sources = {name: values.clone() for name, values in self.sources.items()}
        for values in changed_sources.values():
            bits_of(values).bitwise_xor_(
                (torch.rand(values.shape, generator=generator) < share).to(bits_of(values).dtype)
            )
        deltas = Deltas(WeightsConfig(delta="auto"))
        self.payloads.begin(self.sources)
        deltas.keep(0, self.writes, None, self.payloads, declined=False)
        self.payloads.begin(changed_sources)
        times = []
        for _ in range(3):
            started_s = time.perf_counter()
            deltas.find(0, self.writes, self.shapes, False, None, self.payloads)
            times.append(time.perf_counter() - started_s)
        # a second time with hashes, for the check
        changes = deltas.find(0, self.writes, self.shapes, True, None, self.payloads)
        assert changes is not None
        self.changes[kind, share] = changes
        room = all(size <= self.transports[kind].room(rank) for rank, size in changes.sizes.items())
        return statistics.median(times), [sum(changes.sizes.values()), changes.changed_bytes], room

    def write_delta(self, kind: str, share: float) -> WrittenPart:
        return send_changes(self.transports[kind], self.changes[kind, share], 0, self.sources)

    def shares(self, shapes: dict[int, dict[str, tuple[int, ...]]]) -> dict[int, dict[str, int]]:
        """Hashes of everything that this rank sends."""
        nowhere: Any = DiscardingTransport()
        return send(nowhere, self.writes, self.sources, shapes, audit=True).shares


def shards(layout: Layout, rank: int, model: Path) -> dict[str, torch.Tensor]:
    """One rank's tensors, cut from a checkpoint. Padding is zero."""
    from safetensors.torch import load_file

    logical = load_file(model / "model.safetensors")
    result = {}
    for tensor in layout.tensors(rank):
        result[tensor.name] = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for piece in tensor.pieces:
            result[tensor.name][piece.local.slices()] = logical[piece.logical_name][
                piece.logical.slices()
            ]
    return result


class DiscardingTransport:
    """A transport that discards what is written."""

    kind = "nowhere"

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        pass

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        pass

    def fence(self) -> None:
        pass


class Ranks:
    """Several ranks as processes; `call` runs one method, such as `write` or `gather.collect`, on
    all of them at the same time.
    """

    def __init__(self, count: int, job: tuple[str, str, int, int], timeout_s: float):
        context = multiprocessing.get_context("spawn")
        self._timeout_s = timeout_s
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(child_end, rank, job, timeout_s), daemon=True
            )
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)

    def call(
        self, method: str, *per_rank: Sequence[Any], ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Calls `method` on `ranks` (default: all).

        `per_rank`: the arguments of each rank, if any. Raises RuntimeError, TimeoutError.
        """
        called_ranks = list(range(len(self._pipes)) if ranks is None else ranks)
        for i, rank in enumerate(called_ranks):
            try:
                self._pipes[rank].send((method, per_rank[i] if per_rank else ()))
            except BrokenPipeError as error:
                # otherwise the command line would take it for a closed stdout
                raise self._ended(rank, method) from error
        return [self._answer(rank, method) for rank in called_ranks]

    def _answer(self, rank: int, method: str) -> Any:
        if not self._pipes[rank].poll(self._timeout_s):
            raise TimeoutError(
                f"trainer rank {rank} did not finish {method} within {self._timeout_s:.0f} s"
            )
        try:
            is_ok, answer = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._ended(rank, method) from error
        if not is_ok:
            raise RuntimeError(f"trainer rank {rank} failed at {method}:\n{answer}")
        return answer

    def _ended(self, rank: int, method: str) -> RuntimeError:
        self._processes[rank].join(10)
        return RuntimeError(
            f"trainer rank {rank} ended with {self._processes[rank].exitcode} before it could "
            f"answer {method}"
        )

    def close(self) -> None:
        kill(self._processes)


def _serve(pipe: Connection, rank: int, job: tuple[str, str, int, int], timeout_s: float) -> None:
    target: Rank | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:  # the benchmark is gone
            return
        try:
            target = target or Rank(rank, job, timeout_s)
            pipe.send((True, operator.attrgetter(method)(target)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
