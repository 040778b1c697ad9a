"""One-sided writes by Mooncake's transfer engine: over RDMA if there is CUDA, otherwise over TCP,
with the same calls.

The engine worker and the trainer rank each register their parameters once. Values that are
contiguous on both sides are sent directly from their memory. Values that must be cast, quantised or
packed are copied to a staging buffer. A separate thread sends one half of it while the other is
filled.

A box whose rows are short in the destination (a column slice) would need thousands of small writes.
Instead it is written in one piece to the worker's *landing* memory. Once all such boxes are
written, the worker spreads them (`commands.Spread`). Both sides get these boxes from
`schedule.landings`.

Each trainer rank writes its changes since the last update (weights.delta) in one piece to an
*inbox* of the worker. This is host memory, of a fixed size for each trainer rank. A larger delta
becomes a full update.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.base.geometry import Box
from megarl.config.errors import ConfigError
from megarl.messaging.host import Host, address_towards, with_port
from megarl.reshard.deltas import HEADER_BYTES, INBOX_SHARE, Changes, make_blob, spread_blob
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.schedule import landing_rows, landings
from megarl.reshard.template import TemplateRow
from megarl.weight_sync.transports.base import (
    Endpoint,
    Inbox,
    Incoming,
    Landing,
    LiveParameters,
    Memory,
    Offer,
    Opening,
    PeerUnreachable,
    RemoteTensor,
    Transport,
    describe,
)
from megarl.weight_sync.transports.shared_memory import aligned_offsets

SMALL_BYTES = 64  # in addition, for each copy, because a delta may be little more than its header
# of one write: the TCP transport sends several in parallel, and RDMA splits them anyway
LONGEST_RUN_BYTES = 1 << 20
HALF_BYTES = 32 << 20  # size of each half of the staging buffer
# collected before the thread gets it; a limit, so that the network is not idle
MOST_NOTED_BYTES = 64 << 20
# number of writes: the TCP transport refuses a few thousand, and does not recover
MOST_UNDER_WAY = 256
POLL_S = 0.0002
_DEVICES = Path("/sys/class/infiniband")
IMPORTS = "mooncake"
INFINIBAND = "infiniband"  # facts in Host.has
_REFUSED = (0, -1, (1 << 64) - 1)  # returned instead of a write, depending on Mooncake's version
Run = tuple[int, int, int]  # source address, destination address, bytes


def inboxes(map: ReshardMap | None, rank: int, trainers: Collection[int]) -> dict[str, Any]:
    """The fields of an Offer for changes: the boxes that may come as changes, and the sizes of
    inboxes; none without `map`.
    """
    sizes: dict[int, int] = {}
    incoming = []
    for copy in map.writes_to(rank) if map is not None else ():
        source = copy.source_rank
        if source in trainers:
            size = SMALL_BYTES + int(copy.bytes * INBOX_SHARE)
            sizes[source] = sizes.get(source, HEADER_BYTES) + size
            incoming.append(Incoming(source, copy.destination_tensor, copy.destination_box, 0))
    return {"incoming": incoming, "inboxes": list(sizes.items())}


def destination_runs(
    values: torch.Tensor, start: tuple[int, ...], tensor: RemoteTensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (offset in the endpoint's memory, values) for each contiguous run of the box of
    `tensor` that begins at `start`.
    """
    dim = len(tensor.shape)  # from here on the box is contiguous in the destination
    extent = 1
    while dim and tensor.strides[dim - 1] == extent:
        dim -= 1
        extent *= tensor.shape[dim]
        if values.shape[dim] != tensor.shape[dim]:
            break
    item = values.element_size()
    first = tensor.offset_bytes + item * sum(s * stride for s, stride in zip(start, tensor.strides))
    for index in _indices(values.shape[:dim]):
        yield (
            first + item * sum(i * stride for i, stride in zip(index, tensor.strides)),
            values[index],
        )


def pieces(values: torch.Tensor, most_bytes: int) -> Iterator[torch.Tensor]:
    """Splits `values` into views of at most `most_bytes`, in the order of its elements."""
    if values.nbytes <= most_bytes:
        yield values
        return
    row_bytes = values.nbytes // len(values)
    if row_bytes > most_bytes:
        for row in values:
            yield from pieces(row, most_bytes)
    else:
        yield from values.split(most_bytes // row_bytes)


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if shape:
        return map(
            tuple, torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist()
        )
    return iter([()])


class MooncakeMemory(Memory):
    """Parameters that are written in place, and landing memory for boxes of short rows."""

    def open(self, live: LiveParameters, offer: Offer) -> Endpoint:
        # of earlier writers: their memory is needed, and is still registered
        for earlier in ("_engine", "_memory", "_changes"):
            vars(self).pop(earlier, None)
        self._tensors = live.tensors()
        self._landing = offer.landing
        engine = open_engine(live.address, offer.protocol)
        self._offsets, total = aligned_offsets(
            box.numel * self._tensors[name].itemsize for name, box in self._landing
        )
        self._memory = landing_memory(max(1, total), next(iter(self._tensors.values())).device)
        starts, total = aligned_offsets(size for _, size in offer.inboxes)
        self._inboxes = dict(zip((trainer for trainer, _ in offer.inboxes), starts))
        self._incoming = offer.incoming
        self._changes = torch.empty(
            max(1, total), dtype=torch.uint8, pin_memory=self._memory.is_cuda
        )
        blocks = {}
        for tensor in [*self._tensors.values(), self._memory, self._changes]:
            storage = tensor.untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
        register(engine, list(blocks.items()))
        self._engine = engine
        base = min(blocks)
        tensors = []
        for name, values in self._tensors.items():
            tensors.append(describe(name, values, values.data_ptr() - base))
        landings = []
        for (name, box), offset in zip(self._landing, self._offsets):
            landings.append(Landing(name, box.start, self._memory.data_ptr() + offset - base))
        first = self._changes.data_ptr() - base
        inboxes = []
        for (trainer, size), start in zip(offer.inboxes, starts):
            inboxes.append(Inbox(trainer, first + start, size))
        address = address_of(live.address, engine, offer.protocol, base)
        return Endpoint(
            live.rank,
            live.kind,
            address,
            sum(blocks.values()),
            tensors,
            landings,
            inboxes,
            host=live.host,
        )

    def spread(self, selects: Callable[[str], bool] | None = None) -> None:
        """Copies the boxes in landing memory to the tensors."""
        for (name, box), offset in zip(self._landing, self._offsets):
            if selects is not None and not selects(name):
                continue
            tensor = self._tensors[name]
            landed = self._memory[offset : offset + box.numel * tensor.itemsize]
            tensor[box.slices()].copy_(landed.view(tensor.dtype).view(box.shape))

    def spread_changes(self, version: int) -> None:
        for trainer, start in self._inboxes.items():
            boxes = []
            for incoming in self._incoming:
                if incoming.source_rank == trainer:
                    boxes.append(self._tensors[incoming.tensor][incoming.box.slices()])
            spread_blob(self._changes[start:], version, boxes, f"trainer rank {trainer}")


class MooncakeTransport(Transport):
    memory = MooncakeMemory
    lands = True

    @classmethod
    def lands_at(cls, endpoint: Endpoint) -> bool:
        return bool(endpoint.landings)

    @staticmethod
    def found_here() -> tuple[str, ...]:
        facts = []
        if imports():
            facts.append(IMPORTS)
        if has_infiniband():
            facts.append(INFINIBAND)
        return tuple(facts)

    @staticmethod
    def hindrance(trainer: Host, generator: Host) -> str:
        missing = []
        for side, host in (("the trainer's", trainer), ("the generator's", generator)):
            if IMPORTS not in host.has:
                missing.append(side)
        if missing:
            return (
                "do not both have Mooncake: its transfer engine does not import on "
                f"{' and '.join(missing)} host"
            )
        return ""

    @classmethod
    def offers(cls, opening: Opening) -> dict[int, Offer]:
        protocol = protocol_of(opening.hosts)
        map = opening.map if opening.deltas else None
        rows = landing_rows(opening.map) if opening.map else ()
        result: dict[int, Offer] = {}
        for rank, trainers in opening.writers.items():
            result[rank] = Offer(
                protocol,
                _landing(opening.map, rank, rows, trainers),
                **inboxes(map, rank, trainers),
            )
        return result

    def __init__(self, rank: int, timeout_s: float):
        super().__init__(rank, timeout_s)
        self._staging: torch.Tensor | None = None  # [2, HALF_BYTES], on the device of the values
        self._half = 0
        self._filled = 0
        self._noted = 0  # the half in use, bytes in it, bytes noted since the last flush
        # what has been staged in this half: memory, shape, strides -> (its address, the values,
        # which are kept so that no address is reused)
        self._staged_values: dict[tuple, tuple[int, torch.Tensor]] = {}
        self._on_gpu = False  # whether the values come from a GPU
        # address -> registered memory; kept so that no address is reused
        self._sources: dict[int, torch.UntypedStorage] = {}
        self._runs: dict[int, list[Run]] = {}  # generator rank -> its writes from the current half
        self._jobs: queue.Queue = queue.Queue()  # (half, runs), or None at the end
        self._free = [threading.Semaphore(1), threading.Semaphore(1)]  # one for each half
        self._failures: dict[int, str] = {}  # generator rank -> failure; nothing more is sent there

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        self._peers: dict[int, tuple[str, str, int]] = {}
        self._tensors: dict[int, dict[str, RemoteTensor]] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._landings: dict[int, dict[tuple[str, tuple[int, ...]], int]] = {}
        for endpoint in endpoints:
            rank = endpoint.rank
            self._peers[rank] = address_parts(endpoint.address)
            self._tensors[rank] = {tensor.name: tensor for tensor in endpoint.tensors}
            for inbox in endpoint.inboxes:
                if inbox.trainer == self._rank:
                    self._inboxes[rank] = inbox
            self._landings[rank] = {}
            for landing in endpoint.landings:
                self._landings[rank][landing.tensor, landing.start] = landing.offset_bytes
        protocol, peer, _ = self._peers[endpoints[0].rank]
        self._engine = open_engine(address_towards(peer), protocol)
        self._free[self._half].acquire()
        threading.Thread(
            target=self._send_jobs, name=f"mooncake trainer {self._rank}", daemon=True
        ).start()

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        storages = {}
        for source in sources:
            storage = source.untyped_storage()
            storages[storage.data_ptr()] = storage
        self._on_gpu = any(storage.is_cuda for storage in storages.values())
        old_addresses = self._sources.keys() - storages.keys()
        if old_addresses:
            self._engine.batch_unregister_memory(list(old_addresses))
        new_addresses = storages.keys() - self._sources.keys()
        if new_addresses:
            register(
                self._engine, [(address, storages[address].nbytes()) for address in new_addresses]
            )
        self._sources = storages
        self._empty_half()  # an interrupted update may have left writes

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        rank = copy.destination_rank
        start = copy.destination_box.start
        base = self._peers[rank][2]
        landing = self._landings[rank].get((copy.destination_tensor, start))
        if landing is not None:
            self._put(rank, base + landing, values)
            return
        for offset, run in destination_runs(
            values, start, self._tensors[rank][copy.destination_tensor]
        ):
            self._put(rank, base + offset, run)

    def room(self, rank: int) -> float:
        if rank in self._inboxes:
            return self._inboxes[rank].size_bytes
        return 0.0

    def write_changes(self, rank: int, changes: Changes, version: int) -> None:
        blob = make_blob([delta for _, delta in changes], version)
        assert len(blob) <= self.room(rank)
        self._put(rank, self._peers[rank][2] + self._inboxes[rank].offset_bytes, blob)

    def fence(self) -> None:
        self._flush()
        deadline = time.monotonic() + self._timeout_s
        # the thread works in order, so once it releases this half, everything is sent
        other_half = self._free[1 - self._half]
        if not other_half.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._late()
        other_half.release()
        if self._failures:
            raise PeerUnreachable(
                "; ".join(f"weights from {failure}" for failure in self._failures.values()),
                self._failures,
            )

    def close(self) -> None:
        # (after a failure the thread may still be sending; it keeps the staging buffer alive)
        self._jobs.put(None)

    def _put(self, rank: int, address: int, values: torch.Tensor) -> None:
        """Writes values of any strides to contiguous memory at `address`: directly from registered
        memory, otherwise packed.
        """
        in_place = values.is_contiguous() and values.untyped_storage().data_ptr() in self._sources
        for part in pieces(values, LONGEST_RUN_BYTES):
            self._note(
                rank, part.data_ptr() if in_place else self._staged(part), address, part.nbytes
            )
            address += part.nbytes

    def _staged(self, part: torch.Tensor) -> int:
        """Copies at most LONGEST_RUN_BYTES to the staging buffer, once for all engines that get
        them from this half. Returns their address there.
        """
        key = (part.data_ptr(), part.shape, part.stride(), part.dtype)
        if key in self._staged_values:
            address, _ = self._staged_values[key]
            return address
        if self._staging is None:
            self._staging = torch.empty(2, HALF_BYTES, dtype=torch.uint8, device=part.device)
            register(self._engine, [(self._staging.data_ptr(), 2 * HALF_BYTES)])
        start = -(-self._filled // part.itemsize) * part.itemsize
        if start + part.nbytes > HALF_BYTES:
            self._flush()
            start = 0
        place = (
            self._staging[self._half, start : start + part.nbytes].view(part.dtype).view(part.shape)
        )
        place.copy_(part)
        self._filled = start + part.nbytes
        self._staged_values[key] = (place.data_ptr(), part)
        return place.data_ptr()

    def _note(self, rank: int, source: int, destination: int, size: int) -> None:
        runs = self._runs.setdefault(rank, [])
        follows = bool(runs) and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (
            source,
            destination,
        )
        if follows and runs[-1][2] + size <= LONGEST_RUN_BYTES:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + size)
        else:
            runs.append((source, destination, size))
        self._noted += size
        if self._noted >= MOST_NOTED_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Gives the current half to the thread, and waits for the other."""
        # Mooncake does not wait for kernels that still write to the memory: ours, and the
        # optimizer's step
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        self._jobs.put((self._half, self._runs))
        self._half = 1 - self._half
        self._empty_half()
        if not self._free[self._half].acquire(timeout=self._timeout_s):
            raise self._late()

    def _empty_half(self) -> None:
        self._filled = 0
        self._noted = 0
        self._runs = {}
        self._staged_values = {}

    def _send_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            half, runs_of = job
            for rank, runs in runs_of.items():
                if rank not in self._failures and (failure := self._send_runs(rank, runs)):
                    self._failures[rank] = failure
            self._free[half].release()

    def _send_runs(self, rank: int, runs: list[Run]) -> str:
        """Returns a description of the failure; empty without one."""
        peer = self._peers[rank][1]
        failure = (
            f"trainer rank {self._rank} could not write to generator rank {rank} at {peer} by "
            "Mooncake"
        )
        try:
            written = write_runs(self._engine, peer, runs, self._timeout_s)
        except Exception as error:
            # otherwise the thread would end, and only a deadline would reveal it
            return f"{failure}: {error!r}"
        if written:
            return ""
        return f"{failure}: is its engine alive? see the log on stderr"

    def _late(self) -> TimeoutError:
        ranks = ", ".join(f"{rank} at {peer}" for rank, (_, peer, _) in self._peers.items())
        return TimeoutError(
            f"weights from trainer rank {self._rank} to generator rank {ranks}: not through "
            f"within {self._timeout_s:.0f} s"
        )


def _landing(
    map: ReshardMap | None, rank: int, rows: tuple[TemplateRow, ...], trainers: Collection[int]
) -> list[tuple[str, Box]]:
    copies = landings(map, rank, rows) if map is not None and rows else []
    result: list[tuple[str, Box]] = []
    for copy in copies:
        if copy.source_rank in trainers:
            result.append((copy.destination_tensor, copy.destination_box))
    return result


def landing_memory(size: int, device: torch.device) -> torch.Tensor:
    """Allocates [size] bytes of the memory that SGLang has left free.

    Raises RuntimeError with the setting to lower if that is too little.
    """
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # on a GPU its subclass torch.OutOfMemoryError
        demand = f"{size / 2**30:.2f} GiB for boxes of short rows to land in"
        raise RuntimeError(
            f"Mooncake needs {demand}, beside what SGLang holds: lower generator.mem_fraction "
            f"({error})"
        ) from error


def protocol_of(hosts: Iterable[Host]) -> str:
    """The protocol for all ranks of a run: rdma if every host has a GPU and an InfiniBand (or RoCE)
    device, otherwise tcp.
    """
    if all(host.cuda and INFINIBAND in host.has for host in hosts):
        return "rdma"
    return "tcp"


def write_runs(engine: Any, peer: str, runs: Sequence[Run], timeout_s: float) -> bool:
    """Writes to the memory of the engine at `peer`.

    Waits, and returns whether everything has arrived.

    It polls with pauses. The engine's own waiting calls poll without pauses, and on a host with few
    cores they slow the threads that copy.
    """
    deadline = time.monotonic() + timeout_s
    under_way: deque[int] = deque()
    for run in runs:
        if len(under_way) == MOST_UNDER_WAY and not _finished(
            engine, under_way.popleft(), deadline
        ):
            return False
        under_way.append(engine.transfer_submit_write(peer, *run))
        # (asking for the status of such a write would end this process)
        if under_way[-1] in _REFUSED:
            return False
    return all(_finished(engine, write, deadline) for write in under_way)


def _finished(engine: Any, write: int, deadline: float) -> bool:
    """Waits for a write. Returns whether it succeeded in time."""
    while (status := engine.transfer_check_status(write)) == 0:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return status == 1


def open_engine(host: str, protocol: str) -> Any:
    """Starts a transfer engine of this process that listens on `host`.

    `protocol` is "tcp" or "rdma".

    Raises ConfigError if Mooncake or its system libraries are missing, and RuntimeError if it
    cannot start.
    """
    if protocol == "tcp" and has_infiniband():
        # Mooncake ignores the protocol, and would use RDMA if there is a device for it
        os.environ["MC_FORCE_TCP"] = "1"
    try:
        engine = _engine_class()()
    except ImportError as error:
        raise ConfigError(
            f"weights.transport=mooncake: {error}. It needs the package "
            "mooncake-transfer-engine-cuda13 (without CUDA: "
            "mooncake-transfer-engine-non-cuda), and of Debian or Ubuntu: apt-get install "
            "libibverbs1 libcurl4 libnuma1"
        ) from error
    if engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
        raise RuntimeError(
            f"Mooncake's transfer engine does not start on {host} by {protocol}; see the log on "
            "stderr"
        )
    return engine


def has_infiniband() -> bool:
    """Whether this host has an InfiniBand or RoCE device."""
    return _DEVICES.is_dir() and any(_DEVICES.iterdir())


def imports() -> bool:
    """Whether Mooncake and its system libraries are installed.

    If not, the error of `open_engine` lists what is missing.
    """
    try:
        _engine_class()
    except ImportError:
        return False
    return True


def _engine_class() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "2")
    from mooncake.engine import TransferEngine

    return TransferEngine


def register(engine: Any, blocks: Sequence[tuple[int, int]]) -> None:
    """Registers blocks of memory, (address, bytes) each, with the engine. They must not move."""
    if engine.batch_register_memory(
        [address for address, _ in blocks], [size for _, size in blocks]
    ):
        raise RuntimeError(
            f"Mooncake could not register {sum(size for _, size in blocks)} bytes of memory in "
            f"{len(blocks)} blocks"
        )


def address_of(host: str, engine: Any, protocol: str, base: int) -> str:
    """The address of an Endpoint: the protocol, the address at which the engine listens, and the
    memory address to which offsets are added.
    """
    return f"{protocol}://{with_port(host, engine.get_rpc_port())}/{base}"


def address_parts(address: str) -> tuple[str, str, int]:
    """(protocol, host:port, base)"""
    protocol, _, path = address.partition("://")
    peer, _, base = path.partition("/")
    return protocol, peer, int(base)
