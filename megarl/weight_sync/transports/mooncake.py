"""One-sided writes by Mooncake's transfer engine: over RDMA where there is CUDA, else over TCP, with the same calls.

The engine worker registers its parameters, once; the trainer rank its own, once. What is contiguous on both sides leaves from where
it lies. What has to be cast, quantised or packed goes through a staging buffer: a thread of its own writes one half of it out while
the other half is being filled.

A box whose rows are short in the destination (a column slice) would be thousands of small writes. It is written in one piece into
the worker's *landing* memory instead, and the worker spreads it when all is written (`commands.Spread`). Which boxes those are,
`schedule.landings` says, to both sides alike.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.box import Box
from megarl.config.errors import ConfigError
from megarl.messaging.host import Host, address_towards
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.schedule import landings
from megarl.weight_sync.transports.base import Endpoint, Landing, Live, Memory, Offer, Opening, PeerUnreachable, Transport, describe
from megarl.weight_sync.transports.runs import destination_runs, pieces
from megarl.weight_sync.transports.shared_memory import aligned_offsets

LONGEST_RUN_BYTES = 1 << 20  # of one write: the TCP transport sends several at a time, and RDMA cuts them up anyway
HALF_BYTES = 32 << 20  # of the staging buffer
MOST_NOTED_BYTES = 64 << 20  # before what is noted is handed over: the wire is busy while we go on
MOST_UNDER_WAY = 256  # writes: the TCP transport refuses a few thousand, and then works no more
POLL_S = 0.0002
_DEVICES = Path("/sys/class/infiniband")
IMPORTS, INFINIBAND = "mooncake", "infiniband"  # what a Host may have
_REFUSED = (0, -1, (1 << 64) - 1)  # instead of a write: versions differ

Run = tuple[int, int, int]  # source address, destination address, bytes


class MooncakeMemory(Memory):
    """Parameters that can be written where they lie, and landing memory for boxes of short rows."""

    def open(self, live: Live, offer: Offer) -> Endpoint:
        self._tensors, self._landing = live.tensors(), offer.landing
        engine = open_engine(live.address, offer.protocol)
        self._offsets, total = aligned_offsets(box.numel * self._tensors[name].itemsize for name, box in self._landing)
        self._memory = landing_memory(max(1, total), next(iter(self._tensors.values())).device)
        storages = [tensor.untyped_storage() for tensor in self._tensors.values()] + [self._memory.untyped_storage()]
        blocks = {storage.data_ptr(): storage.nbytes() for storage in storages}
        register(engine, list(blocks.items()))
        self._engine = engine  # takes the place of one that was opened before, for others
        base = min(blocks)
        tensors = [describe(name, values, values.data_ptr() - base) for name, values in self._tensors.items()]
        begins = [self._memory.data_ptr() + offset - base for offset in self._offsets]
        landings = [Landing(name, box.start, begin) for (name, box), begin in zip(self._landing, begins)]
        address = address_of(live.address, engine, offer.protocol, base)
        return Endpoint(live.rank, live.kind, address, sum(blocks.values()), tensors, landings, host=live.host)

    def spread(self) -> None:
        """Puts what lies in landing memory into the tensors."""
        for (name, box), offset in zip(self._landing, self._offsets):
            tensor = self._tensors[name]
            landed = self._memory[offset : offset + box.numel * tensor.itemsize]
            tensor[box.slices()].copy_(landed.view(tensor.dtype).view(box.shape))


class MooncakeTransport(Transport):
    memory = MooncakeMemory
    lands = True

    @staticmethod
    def found_here() -> tuple[str, ...]:
        return tuple(name for name, there in ((IMPORTS, imports()), (INFINIBAND, has_infiniband())) if there)

    @staticmethod
    def hindrance(trainer: Host, generator: Host) -> str:
        missing = [side for side, host in (("the trainer's", trainer), ("the generator's", generator)) if IMPORTS not in host.has]
        return f"do not both have Mooncake: its transfer engine does not import on {' and '.join(missing)} host" if missing else ""

    @classmethod
    def offers(cls, opening: Opening) -> dict[int, Offer]:
        protocol = protocol_of(opening.hosts)
        return {rank: Offer(protocol, _landing(opening.map, rank, trainers)) for rank, trainers in opening.writers.items()}

    def __init__(self, rank: int, timeout_s: float):
        super().__init__(rank, timeout_s)
        self._staging: torch.Tensor | None = None  # [2, HALF_BYTES], on the device of what is written
        self._half, self._filled, self._noted = 0, 0, 0  # the half in use, bytes in it, bytes noted since the last flush
        self._on_gpu = False  # what is written comes from there
        self._sources: dict[int, torch.UntypedStorage] = {}  # registered, by address; kept, so that no address is used again
        self._runs: dict[int, list[Run]] = {}  # generator rank → what lies in the current half for it
        self._jobs: queue.Queue = queue.Queue()  # (half, runs), or None: the end
        self._free = [threading.Semaphore(1), threading.Semaphore(1)]  # of the halves
        self._failures: dict[int, str] = {}  # by generator rank: nothing more is sent there

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        self._peers = {endpoint.rank: address_parts(endpoint.address) for endpoint in endpoints}
        self._tensors = {endpoint.rank: {tensor.name: tensor for tensor in endpoint.tensors} for endpoint in endpoints}
        self._landings = {e.rank: {(landing.tensor, landing.start): landing.offset_bytes for landing in e.landings} for e in endpoints}
        protocol, peer, _ = self._peers[endpoints[0].rank]
        self._engine = open_engine(address_towards(peer), protocol)
        self._free[self._half].acquire()
        threading.Thread(target=self._send_jobs, name=f"mooncake trainer {self._rank}", daemon=True).start()

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        storages = {storage.data_ptr(): storage for storage in (source.untyped_storage() for source in sources)}
        self._on_gpu = any(storage.is_cuda for storage in storages.values())
        if gone := self._sources.keys() - storages.keys():
            self._engine.batch_unregister_memory(list(gone))
        if new := storages.keys() - self._sources.keys():
            register(self._engine, [(address, storages[address].nbytes()) for address in new])
        self._sources = storages

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        rank, start = copy.destination_rank, copy.destination_box.start
        base = self._peers[rank][2]
        if (landing := self._landings[rank].get((copy.destination_tensor, start))) is not None:
            self._put(rank, base + landing, values)
            return
        for offset, run in destination_runs(values, start, self._tensors[rank][copy.destination_tensor]):
            self._put(rank, base + offset, run)

    def fence(self) -> None:
        self._flush()
        deadline = time.monotonic() + self._timeout_s
        other = self._free[1 - self._half]  # the thread works in order: when it has given this back, all is through
        if not other.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._late()
        other.release()
        if self._failures:
            raise PeerUnreachable("; ".join(f"weights from {failure}" for failure in self._failures.values()), self._failures)

    def close(self) -> None:
        self._jobs.put(None)  # (after a failure it may still be sending from the staging buffer, which stays as long as the thread)

    def _put(self, rank: int, address: int, values: torch.Tensor) -> None:
        """Values of any strides to contiguous memory at `address`: from where they lie if that is registered, else packed."""
        in_place = values.is_contiguous() and values.untyped_storage().data_ptr() in self._sources
        for part in pieces(values, LONGEST_RUN_BYTES):
            self._note(rank, part.data_ptr() if in_place else self._staged(part), address, part.nbytes)
            address += part.nbytes

    def _staged(self, part: torch.Tensor) -> int:
        """Copies at most LONGEST_RUN_BYTES into the staging buffer; the address there."""
        if self._staging is None:
            self._staging = torch.empty(2, HALF_BYTES, dtype=torch.uint8, device=part.device)
            register(self._engine, [(self._staging.data_ptr(), 2 * HALF_BYTES)])
        start = -(-self._filled // part.itemsize) * part.itemsize
        if start + part.nbytes > HALF_BYTES:
            self._flush()
            start = 0
        place = self._staging[self._half, start : start + part.nbytes].view(part.dtype).view(part.shape)
        place.copy_(part)
        self._filled = start + part.nbytes
        return place.data_ptr()

    def _note(self, rank: int, source: int, destination: int, size: int) -> None:
        runs = self._runs.setdefault(rank, [])
        follows = bool(runs) and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (source, destination)
        if follows and runs[-1][2] + size <= LONGEST_RUN_BYTES:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + size)
        else:
            runs.append((source, destination, size))
        self._noted += size
        if self._noted >= MOST_NOTED_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Hands the current half to the thread and takes over the other."""
        if self._on_gpu:  # the engine reads memory, whatever kernels have still to write there: ours, and the optimizer's step
            torch.cuda.current_stream().synchronize()
        self._jobs.put((self._half, self._runs))
        self._half, self._filled, self._noted, self._runs = 1 - self._half, 0, 0, {}
        if not self._free[self._half].acquire(timeout=self._timeout_s):
            raise self._late()

    def _send_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            half, runs_of = job
            for rank, runs in runs_of.items():
                if rank not in self._failures and (failure := self._send_runs(rank, runs)):
                    self._failures[rank] = failure
            self._free[half].release()

    def _send_runs(self, rank: int, runs: list[Run]) -> str:
        """What went wrong; empty if nothing did."""
        peer = self._peers[rank][1]
        failure = f"trainer rank {self._rank} could not write to generator rank {rank} at {peer} by Mooncake"
        try:
            written = write_runs(self._engine, peer, runs, self._timeout_s)
        except Exception as error:  # else the thread would end, and a deadline be the first to tell
            return f"{failure}: {error!r}"
        return "" if written else f"{failure}: is its engine alive? see the log on stderr"

    def _late(self) -> TimeoutError:
        ranks = ", ".join(f"{rank} at {peer}" for rank, (_, peer, _) in self._peers.items())
        return TimeoutError(f"weights from trainer rank {self._rank} to generator rank {ranks}: not through within {self._timeout_s:.0f} s")


def _landing(map: ReshardMap | None, rank: int, trainers: Collection[int]) -> list[tuple[str, Box]]:
    copies = landings(map, rank) if map is not None else []
    return [(copy.destination_tensor, copy.destination_box) for copy in copies if copy.source_rank in trainers]


def landing_memory(size: int, device: torch.device) -> torch.Tensor:
    """[size] bytes, out of what SGLang has left. Raises RuntimeError that says what to lower where that is too little."""
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # on a GPU torch.OutOfMemoryError, which is one
        needed = f"{size / 2**30:.2f} GiB for boxes of short rows to land in"
        raise RuntimeError(f"Mooncake needs {needed}, beside what SGLang holds: lower generator.mem_fraction ({error})") from error


def protocol_of(hosts: Iterable[Host]) -> str:
    """One for all ranks of a run: rdma where every one of them has a GPU and an InfiniBand (or RoCE) device, else tcp."""
    return "rdma" if all(host.cuda and INFINIBAND in host.has for host in hosts) else "tcp"


def write_runs(engine: Any, peer: str, runs: Sequence[Run], timeout_s: float) -> bool:
    """Writes into the memory of the engine at `peer`, and waits; whether all of it is there.

    Looks every now and then how far it is. The engine's own waiting calls look without a pause, and on a host with few cores take
    one of them from those that copy.
    """
    deadline = time.monotonic() + timeout_s
    under_way: deque[int] = deque()
    for run in runs:
        if len(under_way) == MOST_UNDER_WAY and not _finished(engine, under_way.popleft(), deadline):
            return False
        under_way.append(engine.transfer_submit_write(peer, *run))
        if under_way[-1] in _REFUSED:  # (to ask how far such a write is would end this process)
            return False
    return all(_finished(engine, write, deadline) for write in under_way)


def _finished(engine: Any, write: int, deadline: float) -> bool:
    """Waits; whether a write is through."""
    while (status := engine.transfer_check_status(write)) == 0:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return status == 1


def open_engine(host: str, protocol: str) -> Any:
    """A transfer engine of this process that listens on `host`. protocol: "tcp" | "rdma".

    Raises ConfigError when Mooncake or its system libraries are missing, RuntimeError when it cannot start.
    """
    if protocol == "tcp" and has_infiniband():
        os.environ["MC_FORCE_TCP"] = "1"  # it does not look at the protocol, and would take RDMA where there is a device for it
    try:
        engine = _engine_class()()
    except ImportError as error:
        raise ConfigError(
            f"weights.transport=mooncake: {error}. It needs the package mooncake-transfer-engine-cuda13 (without CUDA: "
            "mooncake-transfer-engine-non-cuda), and of Debian or Ubuntu: apt-get install libibverbs1 libcurl4 libnuma1"
        ) from error
    if engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
        raise RuntimeError(f"Mooncake's transfer engine does not start on {host} by {protocol}; see the log on stderr")
    return engine


def has_infiniband() -> bool:
    """Whether this host has an InfiniBand or RoCE device."""
    return _DEVICES.is_dir() and any(_DEVICES.iterdir())


def imports() -> bool:
    """Whether Mooncake and its system libraries are there; `open_engine` says what is missing."""
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
    """Makes memory, (address, bytes) each, known to the engine; it must stay where it is."""
    if engine.batch_register_memory([address for address, _ in blocks], [size for _, size in blocks]):
        raise RuntimeError(f"Mooncake could not register {sum(size for _, size in blocks)} bytes of memory in {len(blocks)} blocks")


def address_of(host: str, engine: Any, protocol: str, base: int) -> str:
    """Address of an Endpoint: protocol, where the engine listens, and the address in its memory from which offsets count."""
    return f"{protocol}://{host}:{engine.get_rpc_port()}/{base}"


def address_parts(address: str) -> tuple[str, str, int]:
    """(protocol, host:port, base)"""
    protocol, _, rest = address.partition("://")
    peer, _, base = rest.partition("/")
    return protocol, peer, int(base)
