"""`megarl bench sync`: how long new weights take to get into a live SGLang engine, by direct writes
and by the methods of other stacks.

Two trainer ranks (processes with shards in the trainer's layout at TP2) and one engine run on this
host. The engine is paused, with its update session open. Time is measured from the start until
every byte is in the engine's parameters:

    direct …             each rank writes its boxes into the live parameters, by the named transport
    gather + broadcast   gather onto rank 0, then SGLang's update_weights_from_distributed: as
                         slime, verl and OpenRLHF do
    … flattened          the same, with all tensors as one message (load_format flattened_bucket)
    gather + bucket      gather onto rank 0, then SGLang's update_weights_from_tensor: a flattened
                         bucket in shared memory
    … % changed          each rank writes what has changed since the last update, if that is this
                         share of the elements (weights.delta); the changes are found before the
                         engine is paused, and that time is shown separately
    … audited            a direct way that also hashes both sides and compares the hashes
                         (weights.audit=on)
    … recalled           an audited way that also hashes, before writing, the memory that will be
                         overwritten (strict)
    ceiling …            as many bytes, from the same processes, over the bare medium: long
                         memcpys, sends, or writes

Each way is run once to warm up, then checked: the engine's memory is scrambled, and afterwards must
hash to what was sent. Then the ways take turns, so that other load on the machine affects all of
them equally. Times are medians, shown with quartiles. Ratios are medians of ratios within a round,
between runs that are close in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.base.cores import usable_cores
from megarl.base.files import log_tail
from megarl.base.results import aligned
from megarl.bench.sync_ranks import BLOCK_BYTES, CHUNK_BYTES, RUN_BYTES, Ranks, build_map
from megarl.config.errors import ConfigError
from megarl.generator.client import EngineClient
from megarl.generator.server import EngineKeys, EngineSettings, server_command
from megarl.generator.sglang_updates import FLATTENED, GROUP
from megarl.messaging.link import Hub, RunKey
from megarl.messaging.process_groups import open_store
from megarl.models.registry import load_spec
from megarl.reshard.forwarding import SentTensors
from megarl.reshard.layout import ITEM_BYTES, hf_layout
from megarl.weight_sync import workers
from megarl.weight_sync.audit import packed_shares
from megarl.weight_sync.opening import open_memory
from megarl.weight_sync.transports import mooncake
from megarl.weight_sync.transports.base import GLOO, MOONCAKE, SHARED_MEMORY, Endpoint
from megarl.weight_sync.transports.choice import this_host
from megarl.weight_sync.transports.shared_memory import view_at
from megarl.weight_sync.updates import DeltaUpdate, WeightUpdate
from megarl.weight_sync.writing import shapes_of, shares_of

TIMEOUT_S = 300.0
AUDITED = " audited"  # suffix of a direct way that hashes both sides
CHANGED = " % changed"  # suffix of a direct way that writes only what has changed
SHARES = (0.001, 0.01, 0.1)  # changed shares of the elements
RECALLED = " recalled"  # suffix of a way that also hashes what will be overwritten
BARE = {
    SHARED_MEMORY: "ceiling memcpy",
    GLOO: "ceiling gloo send",
    MOONCAKE: "ceiling mooncake write",
}


@dataclass(frozen=True)
class Way:
    """One way to get new weights into the live engine."""

    run: Callable[[], Awaitable[Any]]
    bytes_moved: int
    messages: int
    ceiling: str = ""  # name of the way that is this one's limit
    compare_s: float | None = None  # time to find the changes


class SyncBench:
    """The processes of the benchmark.

    `job`: model, dtype, trainer_tp, engine_tp. They end when `stack` is closed.
    """

    def __init__(self, job: tuple[str, str, int, int], folder: Path, stack: ExitStack):
        self.job = job
        self.folder = folder
        self.stack = stack
        self.map = build_map(*job)
        self.trainers = list(range(job[2]))
        self.everyone = [*self.trainers, job[2]]  # the last rank is the far end of a bare medium
        self.tensors = SentTensors(self.map)
        self.rank_bytes = self.map.rank_bytes()[0].tolist()
        self.writes = sum(len(self.map.writes_from(rank)) for rank in self.trainers)
        self.bytes = sum(self.rank_bytes)
        self.ranks = Ranks(len(self.everyone), job, TIMEOUT_S)
        stack.callback(self.ranks.close)

    async def measure(
        self, transports: Sequence[str], repeats: int
    ) -> tuple[dict[str, Way], dict[str, list[float]]]:
        """The ways, and the seconds of the runs of each."""
        await self.start_engine()
        self.live = await open_memory(self.workers, SHARED_MEMORY, self.map)  # also for the checks
        ways: dict[str, Way] = {}
        # ways to compare are neighbours, so that they run at nearly the same time
        for kind in transports:
            name = f"direct {kind}"
            ways[BARE[kind]] = await getattr(self, f"bare_{kind}")()
            ways[name] = await self.direct(kind)
            ways[name + AUDITED] = replace(ways[name], run=partial(self.audited, kind))
            ways[name + RECALLED] = replace(ways[name], run=partial(self.recalled, kind))
            for share in SHARES:
                ways |= await self.delta(kind, share)
        ways |= await self.gather_ways()
        # Not the recalled ways: they would rightly report that this check has scrambled the memory.
        checked = {}
        for name, way in ways.items():
            if name not in BARE.values() and not name.endswith((RECALLED, CHANGED)):
                checked[name] = way
        await self.check(checked)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for name, way in [*ways.items()] * (repeats + 1):
            started_s = time.perf_counter()
            await way.run()
            times[name].append(time.perf_counter() - started_s)
        await self.client.end_update(TIMEOUT_S)
        await self.client.close()
        # the first round warms up
        return ways, {name: seconds[1:] for name, seconds in times.items()}

    async def start_engine(self) -> None:
        port = free_port()
        keys = EngineKeys.generate()
        log = self.folder / "engine.log"
        model, dtype, _, tp = self.job
        argv, environment = server_command(
            EngineSettings(model, dtype, port, context_length=64, max_running_requests=4, tp=tp),
            keys,
        )
        with open(log, "wb") as output:
            process = subprocess.Popen(
                argv, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
            )
        self.stack.callback(process.wait, 10)
        self.stack.callback(process.kill)
        key = RunKey.generate()
        key.save(self.folder / "key")
        hub = Hub("generator.0", key)
        self.stack.callback(hub.close)
        self.client = EngineClient(f"http://127.0.0.1:{port}", keys.api, keys.admin)
        await self.client.wait_ready(
            TIMEOUT_S,
            log,
            lambda: None if process.poll() is None else f"exited with {process.returncode}",
        )
        self.workers = workers.Workers([self.client], [tp], hub, TIMEOUT_S)
        self.session = WeightUpdate(self.workers, version=0)
        self.changes = DeltaUpdate(self.workers, version=0)
        await self.session.open()
        await workers.connect(self.workers, str(self.folder / "key"))
        await workers.watch(self.workers, strict=True)
        workers.check_layout(await workers.describe(self.workers), self.map.destination)

    # Ours

    async def direct(self, kind: str) -> Way:
        """Sets up a transport; its first update connects it."""
        endpoints = (
            self.live
            if kind == SHARED_MEMORY
            else await open_memory(self.workers, kind, self.map, deltas=True)
        )
        encoded = [endpoint.encode() for endpoint in endpoints]
        if kind == GLOO:  # the process group forms while the workers receive
            await asyncio.gather(
                self.on_trainers("connect_and_write", kind, encoded), self.session.receive()
            )
        else:
            await self.on_trainers("connect_and_write", kind, encoded)
        return Way(partial(self.write, kind, False), self.bytes, self.writes, BARE[kind])

    async def write(self, kind: str, audit: bool) -> list[Any]:
        landed = await self.on_trainers("write", kind, 0, audit) if kind == MOONCAKE else []
        other_copies = self.on_trainers("write", kind, 1, audit)
        if kind == SHARED_MEMORY:
            return await other_copies
        taking_in = self.session.spread() if kind == MOONCAKE else self.session.receive()
        written, _ = await asyncio.gather(other_copies, taking_in)
        return landed + written

    async def delta(self, kind: str, share: float) -> dict[str, Way]:
        """A way that writes the changes to weights that differ in `share` of the elements; none if
        that would be a full update. It is checked here, since after it the engine has other
        weights.
        """
        deltas = await self.on_trainers("find_delta", kind, share)
        if not all(room for _, _, room in deltas):
            return {}
        await self.write(kind, False)
        parts = await self.write_delta(kind, share)
        await self.audit(parts)
        moved = sum(sizes[0] for _, sizes, _ in deltas)
        way = Way(
            partial(self.write_delta, kind, share),
            moved,
            len(parts),
            compare_s=max(seconds for seconds, _, _ in deltas),
        )
        return {f"direct {kind}, {share:.1%}".removesuffix("%") + CHANGED: way}

    async def write_delta(self, kind: str, share: float) -> list[Any]:
        writing = self.on_trainers("write_delta", kind, share)
        if kind == GLOO:
            parts, _ = await asyncio.gather(writing, self.changes.receive())
            return parts
        parts = await writing
        if kind == MOONCAKE:
            await self.changes.spread()
        return parts

    async def audited(self, kind: str) -> None:
        await self.audit(await self.write(kind, True))

    async def audit(self, parts: Sequence[Any]) -> None:
        """Compares hashes. `parts`: the reports of each trainer rank, part by part."""
        count = len(self.trainers)
        await self.session.audit(
            [packed_shares(shares_of(parts[rank::count])) for rank in range(count)], self.tensors
        )

    async def recalled(self, kind: str) -> None:
        await self.session.recall()
        await self.audited(kind)

    # SGLang's

    async def gather_ways(self) -> dict[str, Way]:
        _store, address = open_store("127.0.0.1")
        await self.on_trainers("gather.join_trainers", address)
        logical = (await self.on_trainers("gather.logical"))[0]
        size = 1 + self.job[3]
        group = {
            "master_address": "127.0.0.1",
            "master_port": free_port(),
            "rank_offset": 1,
            "world_size": size,
        }
        group |= {"group_name": GROUP, "backend": "gloo"}
        joining = self.on_ranks([0], "gather.join_engines", group["master_port"], size)
        await asyncio.gather(
            joining, self.client.call("/init_weights_update_group", group, TIMEOUT_S)
        )
        names = {
            "names": [name for name, _, _ in logical],
            "shapes": [list(shape) for _, shape, _ in logical],
        }
        body = {
            **names,
            "dtypes": [self.job[1]] * len(logical),
            "group_name": GROUP,
            "flush_cache": False,
        }
        gathered = list(chain.from_iterable(map(self.map.source.owned_pieces, self.trainers[1:])))
        moved = (
            sum(piece.local.numel * ITEM_BYTES[tensor.dtype] for tensor, piece in gathered)
            + self.bytes * self.job[3]
        )
        messages = len(gathered) + 1
        return {
            "gather + broadcast": Way(
                partial(self.broadcast, body, False), moved, len(gathered) + len(logical)
            ),
            "gather + broadcast flattened": Way(
                partial(self.broadcast, {**body, "load_format": FLATTENED}, True), moved, messages
            ),
            "gather + bucket": Way(self.bucket, moved, messages),
        }

    async def broadcast(self, body: dict[str, Any], flattened: bool) -> None:
        await self.on_trainers("gather.collect")
        receiving = self.client.call("/update_weights_from_distributed", body, TIMEOUT_S)
        await asyncio.gather(receiving, self.on_ranks([0], "gather.broadcast", flattened))

    async def bucket(self) -> None:
        await self.on_trainers("gather.collect")
        payloads = (await self.on_ranks([0], "gather.buckets", self.job[3]))[0]
        body = {
            "serialized_named_tensors": payloads,
            "load_format": FLATTENED,
            "flush_cache": False,
        }
        await self.client.call("/update_weights_from_tensor", body, TIMEOUT_S)

    # The bare media

    async def bare_shared_memory(self) -> Way:
        descriptor = os.memfd_create("megarl-bench")
        self.stack.callback(os.close, descriptor)
        size = BLOCK_BYTES * len(self.trainers)
        os.posix_fallocate(descriptor, 0, size)
        await self.on_trainers("media.map_file", f"/proc/{os.getpid()}/fd/{descriptor}", size)
        return Way(
            partial(self.on_trainers, "media.copy_blocks", per_rank=self.rank_bytes),
            self.bytes,
            self.parts(BLOCK_BYTES),
        )

    async def bare_gloo(self) -> Way:
        self.bare_store, address = open_store("127.0.0.1")
        await self.on_ranks(self.everyone, "media.join", address)

        async def run() -> None:
            far = self.on_ranks([self.everyone[-1]], "media.receive_blocks", self.rank_bytes)
            await asyncio.gather(
                self.on_trainers("media.send_blocks", per_rank=self.rank_bytes), far
            )

        return Way(run, self.bytes, self.parts(CHUNK_BYTES))

    async def bare_mooncake(self) -> Way:
        addresses = await self.on_ranks(self.everyone, "media.open_block")
        run = partial(
            self.on_trainers, "media.write_blocks", addresses[-1], per_rank=self.rank_bytes
        )
        return Way(run, self.bytes, self.parts(RUN_BYTES))

    def parts(self, part_bytes: int) -> int:
        return sum(-(-size // part_bytes) for size in self.rank_bytes)

    # Checks

    async def check(self, ways: dict[str, Way]) -> None:
        """Checks that every way gets the trainer ranks' weights into the engine.

        Raises AuditError.
        """
        live = [tensor for endpoint in self.live for tensor in parameters(endpoint)]
        shares_of_ranks = await self.on_trainers("shares", shapes_of(self.live))
        for _name, way in ways.items():
            for tensor in live:
                tensor.view(-1).view(torch.uint8).fill_(1)
            await way.run()
            await self.session.audit(list(map(packed_shares, shares_of_ranks)), self.tensors)

    async def on_trainers(
        self, method: str, *arguments: Any, per_rank: Sequence[Any] = ()
    ) -> list[Any]:
        return await self.on_ranks(self.trainers, method, *arguments, per_rank=per_rank)

    async def on_ranks(
        self, ranks: Sequence[int], method: str, *arguments: Any, per_rank: Sequence[Any] = ()
    ) -> list[Any]:
        """Calls `method` on all `ranks` with `arguments`.

        Each rank also gets its entry of `per_rank` as the last argument.
        """
        arguments_of_ranks = [(*arguments, *per_rank[i : i + 1]) for i in range(len(ranks))]
        return await asyncio.to_thread(self.ranks.call, method, *arguments_of_ranks, ranks=ranks)


def parameters(endpoint: Endpoint) -> list[torch.Tensor]:
    storage = torch.UntypedStorage.from_file(
        endpoint.address, shared=True, nbytes=endpoint.size_bytes
    )
    assert isinstance(storage, torch.UntypedStorage)
    return [view_at(storage, tensor) for tensor in endpoint.tensors]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# first word of a way's name -> colour
COLOURS = {"direct": "#2f6fab", "gather": "#c26a2d", "ceiling": "#9a9a9a"}


def title(facts: dict[str, Any]) -> str:
    return (
        f"{facts['model']}, {facts['bytes'] / 1e6:.1f} MB; trainer TP{facts['trainer_tp']} -> "
        f"engine TP{facts['engine_tp']}; "
        f"{facts['hardware']}; median of {facts['repeats']}"
    )


def draw(facts: dict[str, Any], path: str) -> None:
    """Writes `path`: the median of each way with its quartiles.

    The darker part is what an audit adds.
    """
    from matplotlib.figure import Figure

    ways = facts["ways"]
    names = [way["name"] for way in ways]
    median = [way["median_s"] * 1e3 for way in ways]
    quartiles_ms = np.array([way["quartiles_s"] for way in ways]).T * 1e3  # [2, ways]
    figure = Figure(figsize=(9, 0.6 + 0.36 * len(ways)), layout="constrained")
    axes = figure.subplots()
    axes.barh(
        names,
        median,
        xerr=abs(quartiles_ms - median),
        color=[COLOURS[name.split()[0]] for name in names],
        error_kw={"lw": 1, "capsize": 2},
    )
    audit = [max(0.0, way["audit_s"] or 0.0) * 1e3 for way in ways]
    axes.barh(names, audit, left=median, color="#1d4469", label="audit")
    axes.invert_yaxis()
    axes.set_xlabel("ms until every byte is in the live engine")
    axes.set_title(title(facts), fontsize=8)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


TRAINER_TP = 2
ENGINE_TP = 1
MODELS = {  # a random Llama: hidden, ffn, layers, heads, kv heads, vocabulary
    "tiny": (256, 704, 2, 4, 2, 1024),
    "small": (1024, 2816, 8, 16, 8, 8192),
    "medium": (2048, 5632, 8, 32, 8, 16384),
    "1b": (2048, 5632, 22, 32, 4, 32000),
}
TRANSPORTS = (SHARED_MEMORY, GLOO, MOONCAKE)


@dataclass(frozen=True)
class Timing:
    name: str
    median_s: float
    quartiles_s: tuple[float, float]
    best_s: float
    gb_per_s: float  # bytes of the model / median
    bytes_moved: int  # bytes moved between processes
    messages: int
    of_ceiling: float | None  # the ceiling's time / this way's
    times_faster: float | None  # the fastest gather way's time / this way's
    times_fewer_bytes: float | None  # the bytes of that gather way / this way's
    audit_s: float | None  # time that hashing on both sides adds
    recall_s: float | None  # further time that hashing the engine's memory before the update adds
    compare_s: float | None  # time to find the changes before the update


def run(
    model_size: str,
    dtype: str,
    transports: Sequence[str],
    repeats: int,
    as_json: bool,
    picture: str | None,
) -> None:
    """Prints a table, or one JSON object.

    Raises ConfigError for a wrong name, RuntimeError if a way gives wrong weights.
    """
    problems = []
    for name in transports:
        if name not in TRANSPORTS:
            problems.append(f"--transport {name}: choose from {', '.join(TRANSPORTS)}")
    if repeats < 1:
        problems.append(f"--repeats {repeats}: must be at least 1")
    if problems:
        raise ConfigError(problems)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder, ExitStack() as stack:
        stack.enter_context(errors_into(Path(folder) / "errors.log"))
        if MOONCAKE in transports:
            # If it is missing, fails now and not after a minute.
            mooncake.open_engine("127.0.0.1", mooncake.protocol_of([this_host()]))
        model = make_model(Path(folder) / "model", dtype, *MODELS[model_size])
        bench = SyncBench((str(model), dtype, TRAINER_TP, ENGINE_TP), Path(folder), stack)
        ways, times = asyncio.run(bench.measure(transports, repeats))
    facts = {
        "hardware": f"{usable_cores()} CPU cores, "
        f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}",
        "model": f"{model_size}: random Llama, {dtype}",
        "bytes": bench.bytes,
        "trainer_tp": TRAINER_TP,
        "engine_tp": ENGINE_TP,
        "repeats": repeats,
        "ways": list(map(asdict, timings(ways, times, bench.bytes))),
    }
    if picture is not None:
        draw(facts, picture)
    print(json.dumps(facts) if as_json else render(facts))


@contextlib.contextmanager
def errors_into(log: Path) -> Iterator[None]:
    """Redirects file descriptor 2, also of child processes, to `log`: libraries such as Mooncake
    write more than errors there.

    If the body fails, the end of the log is shown.
    """
    terminal = os.dup(2)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    except Exception:
        last_words = log_tail(log)
        if last_words:
            os.write(terminal, f"{last_words}\n".encode())
        raise
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def make_model(
    folder: Path,
    dtype: str,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
) -> Path:
    """A random Llama as an HF checkpoint."""
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(1)
    tensors = hf_layout(load_spec(config), dtype).tensors(0)
    values = {}
    for tensor in tensors:
        weights = 0.02 * torch.randn(tensor.shape, generator=generator)
        values[tensor.name] = weights.to(getattr(torch, dtype))
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def timings(
    ways: Mapping[str, Way], times: Mapping[str, Sequence[float]], size: int
) -> list[Timing]:
    """The results. `times`: way -> seconds of each round; `size`: bytes of the model."""
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    gathers = [name for name in ways if name.startswith("gather")]
    gather = min(gathers, key=lambda name: median[name], default=None)
    shown = [name for name in ways if not name.endswith((AUDITED, RECALLED))]
    return [timing_of(name, ways, times, gather, size) for name in shown]


def timing_of(
    name: str,
    ways: Mapping[str, Way],
    times: Mapping[str, Sequence[float]],
    gather: str | None,
    size: int,
) -> Timing:
    def ratio(other_way: str) -> float:
        ratios = (b / a for a, b in zip(times[name], times[other_way]))
        return statistics.median(ratios)

    way = ways[name]
    median = statistics.median(times[name])
    compared = gather if name.startswith("direct") else None
    audited = times.get(name + AUDITED)
    recalled = times.get(name + RECALLED)
    return Timing(
        name,
        median,
        quartiles(times[name]),
        min(times[name]),
        size / median / 1e9,
        way.bytes_moved,
        way.messages,
        ratio(way.ceiling) if way.ceiling else None,
        ratio(compared) if compared else None,
        ways[compared].bytes_moved / way.bytes_moved if compared else None,
        statistics.median(a - b for a, b in zip(audited, times[name])) if audited else None,
        statistics.median(a - b for a, b in zip(recalled, audited))
        if recalled and audited
        else None,
        way.compare_s,
    )


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high


def render(facts: dict[str, Any]) -> str:
    def text(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    def milliseconds(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1e3:.1f}"

    def row(way: dict[str, Any]) -> list[str]:
        return [
            way["name"],
            milliseconds(way["median_s"]),
            "–".join(map(milliseconds, way["quartiles_s"])),
            f"{way['gb_per_s']:.2f}",
            f"{way['bytes_moved'] / 1e6:.1f}",
            f"{way['messages']}",
            text(way["of_ceiling"], "{:.0%}"),
            text(way["times_faster"], "{:.1f}x"),
            text(way["times_fewer_bytes"], "{:.1f}x"),
            milliseconds(way["audit_s"]),
            milliseconds(way["recall_s"]),
            milliseconds(way["compare_s"]),
        ]

    header = [
        "",
        "median ms",
        "quartiles",
        "GB/s",
        "MB moved",
        "messages",
        "of ceiling",
        "vs gather",
        "fewer bytes",
        "audit ms",
        "strict ms",
        "compare ms",
    ]
    rows = [header, *map(row, facts["ways"])]
    return "\n".join([title(facts), *aligned(rows)])
