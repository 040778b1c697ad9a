"""The ways that `megarl bench sync` compares on one live engine; `sync` says what they are."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.bench.sync_media import BLOCK_BYTES, CHUNK_BYTES, RUN_BYTES
from megarl.bench.sync_ranks import Ranks, build_map
from megarl.generator.client import EngineClient
from megarl.generator.server import EngineKeys, EngineSettings, server_command
from megarl.generator.sglang_updates import FLATTENED, GROUP
from megarl.messaging.link import Hub, RunKey
from megarl.messaging.stores import open_store
from megarl.reshard.kinds import ITEM_BYTES
from megarl.reshard.tensors import SentTensors
from megarl.weight_sync import workers
from megarl.weight_sync.audit import packed_shares
from megarl.weight_sync.opening import open_memory
from megarl.weight_sync.transports.base import GLOO, MOONCAKE, SHARED_MEMORY, Endpoint
from megarl.weight_sync.transports.shared_memory import view_at
from megarl.weight_sync.update import WeightUpdate
from megarl.weight_sync.writing import shapes_of, shares_of

TIMEOUT_S = 300.0
AUDITED = " audited"  # suffix of a direct way that hashes both sides
CHANGED = " % changed"  # suffix of a direct way that brings only what has changed
SHARES = (0.001, 0.01, 0.1)  # of the elements
RECALLED = " recalled"  # suffix of one that also hashes what is about to be overwritten
BARE = {SHARED_MEMORY: "ceiling memcpy", GLOO: "ceiling gloo send", MOONCAKE: "ceiling mooncake write"}


@dataclass(frozen=True)
class Way:
    run: Callable[[], Awaitable[Any]]
    bytes_moved: int
    messages: int
    ceiling: str = ""  # name of the way that is this one's limit
    compare_s: float | None = None  # what it took to find the changes


class Bench:
    """`job`: model, dtype, trainer_tp, engine_tp. Its processes end when `stack` is closed."""

    def __init__(self, job: tuple[str, str, int, int], folder: Path, stack: ExitStack):
        self.job, self.folder, self.stack = job, folder, stack
        self.map = build_map(*job)
        self.trainers = list(range(job[2]))
        self.everyone = [*self.trainers, job[2]]  # the last one is the far end of a bare medium
        self.tensors = SentTensors(self.map)
        self.sent = [sum(copy.bytes for copy in self.map.copies_from(rank)) for rank in self.trainers]
        self.writes = sum(len(self.map.writes_from(rank)) for rank in self.trainers)
        self.bytes = sum(self.sent)
        self.ranks = Ranks(len(self.everyone), job, TIMEOUT_S)
        stack.callback(self.ranks.close)

    async def measure(self, transports: Sequence[str], repeats: int) -> tuple[dict[str, Way], dict[str, list[float]]]:
        """The ways, and the seconds of each way's runs."""
        await self.start_engine()
        self.live = await open_memory(self.workers, SHARED_MEMORY, self.map)  # also for the checks
        ways: dict[str, Way] = {}
        for kind in transports:  # ways that are compared stand side by side, so that they run at nearly the same time
            name = f"direct {kind}"
            ways[BARE[kind]] = await getattr(self, f"bare_{kind}")()
            ways[name] = await self.direct(kind)
            ways[name + AUDITED] = replace(ways[name], run=partial(self.audited, kind))
            ways[name + RECALLED] = replace(ways[name], run=partial(self.recalled, kind))
            for share in SHARES:
                ways |= await self.delta(kind, share)
        ways |= await self.gather_ways()
        # Not the recalled ways: they would report, rightly, that the check itself has scrambled the memory.
        await self.check({name: way for name, way in ways.items() if name not in BARE.values() and not name.endswith((RECALLED, CHANGED))})
        times: dict[str, list[float]] = {name: [] for name in ways}
        for name, way in [*ways.items()] * (repeats + 1):
            began = time.perf_counter()
            await way.run()
            times[name].append(time.perf_counter() - began)
        await self.client.end_update(TIMEOUT_S)
        await self.client.close()
        return ways, {name: seconds[1:] for name, seconds in times.items()}  # the first round warms up

    async def start_engine(self) -> None:
        port, keys, log = free_port(), EngineKeys.generate(), self.folder / "engine.log"
        model, dtype, _, tp = self.job
        argv, environment = server_command(EngineSettings(model, dtype, port, context_length=64, max_running_requests=4, tp=tp), keys)
        with open(log, "wb") as output:
            process = subprocess.Popen(argv, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT)
        self.stack.callback(process.wait, 10)
        self.stack.callback(process.kill)
        key = RunKey.generate()
        key.save(self.folder / "key")
        hub = Hub("generator.0", key)
        self.stack.callback(hub.close)
        self.client = EngineClient(f"http://127.0.0.1:{port}", keys.api, keys.admin)
        await self.client.wait_ready(TIMEOUT_S, log, lambda: None if process.poll() is None else f"exited with {process.returncode}")
        self.workers = workers.Workers([self.client], tp, hub, TIMEOUT_S)
        self.session = WeightUpdate(self.workers, version=0)
        await self.session.open()
        await workers.connect(self.workers, str(self.folder / "key"))
        await workers.watch(self.workers, strict=True)
        workers.check_layout(await workers.describe(self.workers), self.map.destination)

    # Ours

    async def direct(self, kind: str) -> Way:
        """Sets up a transport; its first update connects it."""
        endpoints = self.live if kind == SHARED_MEMORY else await open_memory(self.workers, kind, self.map, deltas=True)
        encoded = [endpoint.encode() for endpoint in endpoints]
        if kind == GLOO:  # the group meets while the workers receive
            await asyncio.gather(self.on_trainers("connect_and_write", kind, encoded), self.session.receive())
        else:
            await self.on_trainers("connect_and_write", kind, encoded)
        return Way(partial(self.write, kind, False), self.bytes, self.writes, BARE[kind])

    async def write(self, kind: str, audit: bool) -> list[Any]:
        landed = await self.on_trainers("write", kind, 0, audit) if kind == MOONCAKE else []
        others = self.on_trainers("write", kind, 1, audit)
        if kind == SHARED_MEMORY:
            return await others
        taking_in = self.session.spread() if kind == MOONCAKE else self.session.receive()
        sent, _ = await asyncio.gather(others, taking_in)
        return landed + sent

    async def delta(self, kind: str, share: float) -> dict[str, Way]:
        """A way that brings the changes to weights that differ in `share` of the elements; none where that would be a full update. It is
        checked here: once it is run, the engine has the other weights."""
        found = await self.on_trainers("find_delta", kind, share)
        if not all(room for _, _, room in found):
            return {}
        await self.write(kind, False)
        sent = await self.write_delta(kind, share)
        await self.audit(sent)
        moved = sum(sizes[0] for _, sizes, _ in found)
        way = Way(partial(self.write_delta, kind, share), moved, len(sent), compare_s=max(seconds for seconds, _, _ in found))
        return {f"direct {kind}, {share:.1%}".removesuffix("%") + CHANGED: way}

    async def write_delta(self, kind: str, share: float) -> list[Any]:
        writing = self.on_trainers("write_delta", kind, share)
        if kind == GLOO:
            sent, _ = await asyncio.gather(writing, self.session.receive(changes=True))
            return sent
        sent = await writing
        if kind == MOONCAKE:
            await self.session.spread(changes=True)
        return sent

    async def audited(self, kind: str) -> None:
        await self.audit(await self.write(kind, True))

    async def audit(self, sent: Sequence[Any]) -> None:
        """`sent`: what each trainer rank says, of one part after the other."""
        count = len(self.trainers)
        await self.session.audit([packed_shares(shares_of(sent[rank::count])) for rank in range(count)], self.tensors)

    async def recalled(self, kind: str) -> None:
        await self.session.recall()
        await self.audited(kind)

    # SGLang's

    async def gather_ways(self) -> dict[str, Way]:
        _store, address = open_store("127.0.0.1")
        await self.on_trainers("gather.join_trainers", address)
        logical = (await self.on_trainers("gather.logical"))[0]
        size = 1 + self.job[3]
        group = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": size}
        group |= {"group_name": GROUP, "backend": "gloo"}
        joining = self.on_ranks([0], "gather.join_engines", group["master_port"], size)
        await asyncio.gather(joining, self.client.call("/init_weights_update_group", group, TIMEOUT_S))
        names = {"names": [name for name, _, _ in logical], "shapes": [list(shape) for _, shape, _ in logical]}
        body = {**names, "dtypes": [self.job[1]] * len(logical), "group_name": GROUP, "flush_cache": False}
        gathered = [owned for rank in self.trainers[1:] for owned in self.map.source.owned_pieces(rank)]
        moved = sum(piece.local.numel * ITEM_BYTES[tensor.dtype] for tensor, piece in gathered) + self.bytes * self.job[3]
        messages = len(gathered) + 1
        return {
            "gather + broadcast": Way(partial(self.broadcast, body, False), moved, len(gathered) + len(logical)),
            "gather + broadcast flattened": Way(partial(self.broadcast, {**body, "load_format": FLATTENED}, True), moved, messages),
            "gather + bucket": Way(self.bucket, moved, messages),
        }

    async def broadcast(self, body: dict[str, Any], flattened: bool) -> None:
        await self.on_trainers("gather.collect")
        receiving = self.client.call("/update_weights_from_distributed", body, TIMEOUT_S)
        await asyncio.gather(receiving, self.on_ranks([0], "gather.broadcast", flattened))

    async def bucket(self) -> None:
        await self.on_trainers("gather.collect")
        payloads = (await self.on_ranks([0], "gather.buckets", self.job[3]))[0]
        body = {"serialized_named_tensors": payloads, "load_format": FLATTENED, "flush_cache": False}
        await self.client.call("/update_weights_from_tensor", body, TIMEOUT_S)

    # The bare media

    async def bare_shared_memory(self) -> Way:
        descriptor = os.memfd_create("megarl-bench")
        self.stack.callback(os.close, descriptor)
        size = BLOCK_BYTES * len(self.trainers)
        os.posix_fallocate(descriptor, 0, size)
        await self.on_trainers("media.map_file", f"/proc/{os.getpid()}/fd/{descriptor}", size)
        return Way(partial(self.on_trainers, "media.copy_blocks", each=self.sent), self.bytes, self.parts(BLOCK_BYTES))

    async def bare_gloo(self) -> Way:
        self.bare_store, address = open_store("127.0.0.1")
        await self.on_ranks(self.everyone, "media.join", address)

        async def run() -> None:
            far = self.on_ranks([self.everyone[-1]], "media.receive_blocks", self.sent)
            await asyncio.gather(self.on_trainers("media.send_blocks", each=self.sent), far)

        return Way(run, self.bytes, self.parts(CHUNK_BYTES))

    async def bare_mooncake(self) -> Way:
        addresses = await self.on_ranks(self.everyone, "media.open_block")
        run = partial(self.on_trainers, "media.write_blocks", addresses[-1], each=self.sent)
        return Way(run, self.bytes, self.parts(RUN_BYTES))

    def parts(self, part_bytes: int) -> int:
        return sum(-(-size // part_bytes) for size in self.sent)

    # Checks

    async def check(self, ways: dict[str, Way]) -> None:
        """Checks that every way brings the trainer ranks' weights into the engine. Raises AuditError."""
        live = [tensor for endpoint in self.live for tensor in parameters(endpoint)]
        sent = await self.on_trainers("shares", shapes_of(self.live))
        for _name, way in ways.items():
            for tensor in live:
                tensor.view(-1).view(torch.uint8).fill_(1)
            await way.run()
            await self.session.audit([packed_shares(shares) for shares in sent], self.tensors)

    async def on_trainers(self, method: str, *arguments: Any, each: Sequence[Any] = ()) -> list[Any]:
        return await self.on_ranks(self.trainers, method, *arguments, each=each)

    async def on_ranks(self, ranks: Sequence[int], method: str, *arguments: Any, each: Sequence[Any] = ()) -> list[Any]:
        """All ranks get `arguments`; each also gets its entry of `each` as the last argument."""
        own = [(*arguments, *each[i : i + 1]) for i in range(len(ranks))]
        return await asyncio.to_thread(self.ranks.call, method, *own, ranks=ranks)


def parameters(endpoint: Endpoint) -> list[torch.Tensor]:
    storage = torch.UntypedStorage.from_file(endpoint.address, shared=True, nbytes=endpoint.size_bytes)
    assert isinstance(storage, torch.UntypedStorage)
    return [view_at(storage, tensor) for tensor in endpoint.tensors]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
