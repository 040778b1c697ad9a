"""Measures what weight updates cost the generator's event loop, by numbers of trainer ranks and
engine workers: CPU time, bytes, blocking.

Real: the hub with its keys and encryption, and the whole receiving end of the weights channel
(offers, sessions, opening, writes, audit), with plan, map and messages of Llama 3.1 405B in fp8.
Light: trainer ranks and engine workers. They are thousands of real connections from two processes,
and answer at once as real ones would; no weights are moved. Left out: calls to the engines' HTTP
servers, which `python tests/benchmarks driver` measures. Here a pipe carries the commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import zmq

from megarl.base.rollout_types import Version
from megarl.config.errors import ConfigError
from megarl.config.schema import (
    AsyncConfig,
    GeneratorConfig,
    ModelConfig,
    RunConfig,
    TimeoutConfig,
    TrainerConfig,
    WeightsConfig,
)
from megarl.generator.client import EngineUnreachable, Parallelism
from megarl.generator.fleet import Fleet
from megarl.launch.processes import raise_limits
from megarl.messaging.host import Host
from megarl.messaging.link import Hub, RunKey
from megarl.messaging.messages import (
    GroupReady,
    Hello,
    Message,
    WeightsApplied,
    WeightsGrant,
    WeightsOffer,
    WeightsWritten,
    WorkerReply,
    decode,
    encode,
)
from megarl.models import ModelSpec
from megarl.plan.resolve import RunPlan
from megarl.plan.topologies import generator_ranks, trainer_topology
from megarl.plan.weights import WeightsSource
from megarl.reshard.forwarding import ENGINES, SentTensors, planned_relays
from megarl.reshard.layout import Layout, trainer_layout
from megarl.reshard.map import ReshardMap
from megarl.weight_sync import commands
from megarl.weight_sync.audit import digest_of, pack_shares
from megarl.weight_sync.content import weights_map
from megarl.weight_sync.receiver import WeightsReceiver
from megarl.weight_sync.transports.base import MOONCAKE, Endpoint, PackedEndpoint

# trainer ranks, engine workers
SIZES = ((128, 64), (512, 64), (512, 512), (1024, 256), (2048, 512), (4096, 1024))
LLAMA_405B = ModelSpec("llama", 126, 16384, 53248, 128, 8, 128, 128256, 131072, False, 1e-5, 5e5)
TP = 8  # of both sides: one rank per GPU, one TP group per node
GPUS = 8  # GPUs of a host
UPDATES = 5  # updates; their median counts
GROUPS = 512  # groups of a batch, whose headers go to trainer rank 0
CLIENTS = 2  # processes that play all light members
TICK_S = 0.005  # shorter blocking of the event loop is not noticed
# deadline of all waits but the one that must expire; this machine may have other work
PATIENCE_S = 600.0
STOPPED_S = 5.0  # deadline of the wait for a stopped rank


def run(sizes: Sequence[tuple[int, int]], as_json: bool) -> None:
    with contextlib.redirect_stdout(io.StringIO()) if as_json else contextlib.nullcontext():
        rows = [measure(*size) for size in sizes]
    print(json.dumps({"sizes": rows}) if as_json else render(rows))


def parse_size(text: str) -> tuple[int, int]:
    """(trainer ranks, engine workers) of `text`, such as "512+64"."""
    ranks = [int(part) if part.isdecimal() else 0 for part in text.split("+")]
    # An engine is lost, so there must be two; and of more workers than trainer ranks all would pass
    # weights on, so all would be lost.
    if len(ranks) != 2 or any(count % TP for count in ranks) or not 2 * TP <= ranks[1] <= ranks[0]:
        limits = f"at least {2 * TP} workers, and no more of them than trainer ranks"
        raise ConfigError(
            f"{text}: must be TRAINERS+WORKERS, two multiples of {TP}, as in 512+64; {limits}"
        )
    return ranks[0], ranks[1]


def measure(trainers: int, workers: int, spec: ModelSpec = LLAMA_405B) -> dict[str, Any]:
    """One row of the result, with the keys of `python tests/benchmarks fleet --json`."""
    raise_limits()
    key = RunKey.generate()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(CountingHub("generator.0", key)) as hub,
    ):
        key.save(Path(folder, "key"))
        plan = plan_of(trainers, workers, spec, folder)
        with _members(plan, key, hub.address) as pipes:
            return asyncio.run(_Driver(plan, hub, pipes).measure())


def plan_of(trainers: int, workers: int, spec: ModelSpec, run_dir: str) -> RunPlan:
    pp = max(
        stages
        for stages in range(1, 17)
        if trainers % (TP * stages) == 0 and _share(spec.num_layers, stages)
    )
    ends = 7 if spec.num_layers % pp else None  # layers of the first and last stages
    config = RunConfig(
        model=ModelConfig(path="405b", dtype="bfloat16"),
        trainer=TrainerConfig(
            tp=TP, pp=pp, dp=trainers // (TP * pp), first_stage_layers=ends, last_stage_layers=ends
        ),
        generator=GeneratorConfig(engines=workers // TP, tp=TP, quantization="fp8_block"),
        async_=AsyncConfig(partial_rollout="in_flight"),
        weights=WeightsConfig(relay=ENGINES),
        timeouts=TimeoutConfig(weights_s=PATIENCE_S, rendezvous_s=PATIENCE_S),
        run_dir=run_dir,
    )
    return RunPlan(
        config, spec, trainer_topology(config.trainer), config.max_steps, 0, WeightsSource("405b")
    )


def _share(layers: int, stages: int) -> bool:
    return layers % stages == 0 or (layers, stages) == (LLAMA_405B.num_layers, 16)


def source_of(plan: RunPlan) -> Layout:
    return trainer_layout(plan.spec, plan.trainer_topology, plan.config.model.dtype, "te")


class CountingHub(Hub):
    """Counts the bytes of messages in both directions."""

    bytes = 0

    def _decoded(self, sender: str, *frames: bytes) -> Message:
        self.bytes += sum(map(len, frames))
        return super()._decoded(sender, *frames)

    def _send(self, peer: str, body: bytes) -> None:
        self.bytes += len(body)
        super()._send(peer, body)


@dataclass
class LightEngine:
    """What the weights channel needs of an EngineClient.

    `resumed_s`: the CPU time at the end of the pause.
    """

    number: int
    pipe: Connection  # the pipe to the process that plays its workers
    url: str = ""
    served_version: Version = -1
    dead: bool = False
    begun_s: float = 0.0  # CPU time of this process at the pause, and at the resumption
    resumed_s: float = 0.0

    def __hash__(self) -> int:
        return self.number

    async def version(self, timeout_s: float) -> Version:
        return self.served_version

    async def parallelism(self, timeout_s: float) -> Parallelism:
        return Parallelism(TP, 1, 1)

    async def begin_update(self, timeout_s: float) -> None:
        self.begun_s = time.process_time()

    async def command(
        self, encoded: bytes, tp: int, timeout_s: float, empty_cache: bool = False
    ) -> None:
        if self.dead:
            raise EngineUnreachable(self.url, f"engine {self.url} is not reachable: it is dead")
        self.pipe.send_bytes(self.number.to_bytes(4, "little") + encoded)

    async def set_version(self, version: Version, timeout_s: float) -> None:
        self.served_version = version

    async def resume(self, timeout_s: float) -> None:
        self.resumed_s = time.process_time()

    async def pause(self, timeout_s: float, mode: str) -> None:
        pass

    async def end_update(self, timeout_s: float) -> None:
        pass

    async def condemn(self, reason: str) -> None:
        pass


@dataclass
class BlockingWatch:
    """The longest time for which one task blocked the event loop, in CPU time, so that other work
    on the machine does not count.
    """

    longest_s: float = 0.0

    async def watch(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.thread_time()
            self.longest_s = max(self.longest_s, now - before)
            before = now

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        task = asyncio.ensure_future(self.watch())
        try:
            yield
        finally:
            task.cancel()


@dataclass
class _Executor:
    """The generator's executor, as far as an update needs it."""

    fleet: Fleet
    version: Version = -1
    held_s: float = 0.0  # CPU time when all offers had arrived
    trace: Any = field(
        default_factory=lambda: SimpleNamespace(
            span=lambda *_, **__: contextlib.nullcontext({}), add=lambda *_, **__: None
        )
    )

    async def hold(self) -> None:
        self.held_s = time.process_time()
        await self.fleet.hold(PATIENCE_S)

    def release(self, version: Version) -> None:
        self.version = version
        self.fleet.release(version)


class _Driver:
    def __init__(self, plan: RunPlan, hub: CountingHub, pipes: Sequence[Connection]):
        self.plan = plan
        self.hub = hub
        self.pipes = pipes
        self.loop = BlockingWatch()
        self.receiver = WeightsReceiver(
            plan, source_of(plan), hub, str(Path(plan.config.run_dir, "key"))
        )
        engines = range(plan.engines)
        self.engines = [
            LightEngine(number, pipes[number % len(pipes)], f"light://{number}")
            for number in engines
        ]
        clients: Any = self.engines
        self.executor = _Executor(Fleet(clients, "in_flight", elastic=True))

    async def measure(self) -> dict[str, Any]:
        began_s = time.process_time()
        executor = self.executor
        for pipe in self.pipes:
            pipe.send(None)  # tells them to connect
        with self.loop.watched():
            opening_s, _, opening_bytes = await self.take()
        opening_s = time.process_time() - executor.held_s
        connecting_s = executor.held_s - began_s
        opening_block_s = self.loop.longest_s
        self.loop.longest_s = 0.0
        updates = [await self.take() for _ in range(UPDATES)]
        update_s, paused_s, update_bytes = (float(np.median(values)) for values in zip(*updates))
        with self.loop.watched():
            await self.take()
        batch_s = await self.send_batch()
        lost_s = await self.lose_engine()
        await self.miss_trainer()
        return {
            "trainer_ranks": self.plan.trainer_topology.world_size,
            "generator_ranks": generator_ranks(self.plan.groups),
            "update_cpu_s": update_s,
            "paused_cpu_s": paused_s,
            "opening_cpu_s": opening_s - update_s,
            "opening_bytes": int(opening_bytes - update_bytes),
            "longest_block_s": max(opening_block_s, self.loop.longest_s),
            "longest_block_of_update_s": self.loop.longest_s,
            "connecting_cpu_s": connecting_s,
            "update_bytes": int(update_bytes),
            "batch_cpu_s": batch_s,
            "lost_engine_cpu_s": lost_s,
        }

    async def take(self) -> tuple[float, float, int]:
        """One update, from the offers to WeightsApplied.

        Returns CPU seconds, CPU seconds while engines were paused, and bytes.
        """
        before_s = time.process_time()
        before_bytes = self.hub.bytes
        await self.receiver.take(self.executor)  # type: ignore[arg-type]
        now_s = time.process_time()
        living = [engine for engine in self.engines if not engine.dead]
        paused_s = max(engine.resumed_s for engine in living) - min(
            engine.begun_s for engine in living
        )
        return now_s - before_s, paused_s, self.hub.bytes - before_bytes

    async def send_batch(self) -> float:
        """CPU seconds to send the headers of a batch's groups to trainer rank 0."""
        began_s = time.process_time()
        raw = msgspec.Raw(msgspec.msgpack.encode("x" * 1024))
        await self.hub.send_each(
            ("trainer.0", GroupReady(n, 0, 0.0, 0.0, 0.0, raw, raw, [])) for n in range(GROUPS)
        )
        return time.process_time() - began_s

    async def lose_engine(self) -> float:
        """An engine dies, and the run continues without it.

        Returns CPU seconds of the update that opens the others' memory anew.
        """
        dead = self.engines[0]
        dead.dead = True
        await self.take()
        down = self.executor.fleet.down
        assert [engine.number for engine in down] == [dead.number], down
        self.executor.fleet.version = self.executor.version
        return (await self.take())[0]

    async def miss_trainer(self) -> None:
        """A trainer rank stops. Checks that the wait for it expires and names it."""
        self.pipes[0].send_bytes(b"stop")
        self.plan.config.timeouts.weights_s = STOPPED_S
        try:
            await self.take()
        except TimeoutError as error:
            assert "for trainer.0 to write weights version" in str(error), error
        else:
            raise AssertionError("a trainer rank that is stopped was not missed")


@contextlib.contextmanager
def _members(plan: RunPlan, key: RunKey, hub: str) -> Iterator[list[Connection]]:
    """Starts the processes that play trainer ranks and engine workers.

    Yields pipes to them once they are ready.
    """
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        pipes = []
        for number in range(CLIENTS):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_play, args=(child_end, number, plan, key, hub), daemon=True
            )
            process.start()
            stack.callback(process.join, 10)
            stack.callback(process.kill)
            pipes.append(parent_end)
        for pipe in pipes:
            if not pipe.poll(PATIENCE_S):
                raise TimeoutError(
                    f"a process of the benchmark did not answer within {PATIENCE_S:.0f} s"
                )
            pipe.recv()
        yield pipes


def _play(pipe: Connection, number: int, plan: RunPlan, key: RunKey, hub: str) -> None:
    raise_limits()
    Members(pipe, number, plan, key, hub).play()


class Members:
    """Every second trainer rank and the workers of every second engine, with a connection each."""

    def __init__(self, pipe: Connection, number: int, plan: RunPlan, key: RunKey, hub: str):
        self.pipe = pipe
        self.plan = plan
        self.key = key
        self.hub = hub
        self.context = zmq.Context()
        self.poller = zmq.Poller()
        self.context.set(zmq.MAX_SOCKETS, 65_535)
        self.source = source_of(plan)
        self.trainers = range(number, plan.trainer_topology.world_size, CLIENTS)
        self.engines_of_map: tuple[int, ...] = (plan.engines,)  # engines of each group in the map
        self.rank_of: dict[zmq.Socket, int] = {}  # connection of a trainer rank -> the rank
        # engine -> generator rank -> connection of its worker
        self.workers: dict[int, dict[int, zmq.Socket]] = {}
        self.stopped = -1  # a trainer rank that does nothing after its offer
        self.sent_tensors(self.engines_of_map)
        pipe.send(None)

    @cache  # noqa: B019  one object per process
    def map(self, engines: tuple[int, ...]) -> tuple[ReshardMap, SentTensors]:
        unrelayed = weights_map(self.plan.with_engines(engines), self.source)
        relayed, forwarding = planned_relays(unrelayed, ENGINES, TP)
        return unrelayed, SentTensors(relayed, forwarding.relays if forwarding else ())

    def sent_tensors(self, engines: tuple[int, ...]) -> SentTensors:
        return self.map(engines)[1]

    @cache  # noqa: B019
    def shares(self, engines: tuple[int, ...], rank: int) -> bytes:
        """The packed shares of a rank: one for each name, equal for all replicas."""
        names = self.sent_tensors(engines).names_of(self.sent_tensors(engines).sent_by(rank))
        return pack_shares(names.astype(np.uint64))

    @cache  # noqa: B019
    def hashes(self, engines: tuple[int, ...]) -> np.ndarray:
        """Hashes of all places, which agree with the senders' shares."""
        tensors = self.sent_tensors(engines)
        counts = np.bincount(tensors.place_of, minlength=tensors.places[-1]).astype(np.uint64)
        counts *= tensors.names_of(np.arange(tensors.places[-1])).astype(np.uint64)
        leading, relayed = tensors.relayed
        counts[relayed] = counts[leading]
        return counts

    def play(self) -> None:
        self.pipe.recv()
        self.poller.register(self.pipe.fileno(), zmq.POLLIN)
        for rank in self.trainers:
            socket = self.connect(f"trainer.{rank}")
            self.rank_of[socket] = rank
            socket.send(
                encode(Hello(self.map(self.engines_of_map)[0].plan_hash, host("trainer", rank)))
            )
            socket.send(encode(WeightsOffer(0)))
        with contextlib.suppress(EOFError):  # raised when the driver has closed its end
            while True:
                for source, _ in self.poller.poll():
                    if isinstance(source, int):
                        self.command(self.pipe.recv_bytes())
                    else:
                        with contextlib.suppress(zmq.Again):
                            while True:
                                self.answer(source, decode(source.recv(zmq.NOBLOCK)))
        self.context.destroy(linger=0)

    def connect(self, name: str) -> zmq.Socket:
        socket = self.context.socket(zmq.DEALER)
        key = self.key
        socket.identity = name.encode()
        socket.curve_serverkey = key.hub_public.encode()
        socket.curve_publickey = key.peer_public.encode()
        socket.curve_secretkey = key.peer_secret.encode()
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(self.hub)
        self.poller.register(socket, zmq.POLLIN)
        return socket

    def answer(self, socket: zmq.Socket, message: Message) -> None:
        """Answers as a trainer rank does."""
        rank = self.rank_of.get(socket, -1)
        if isinstance(message, WeightsGrant) and not message.is_empty and rank != self.stopped:
            self.engines_of_map = message.engines
            socket.send(
                encode(
                    WeightsWritten(
                        message.version, 1 << 30, 1.0, self.shares(message.engines, rank)
                    )
                )
            )
        elif isinstance(message, WeightsApplied):
            socket.send(encode(WeightsOffer(message.version + 1)))

    def command(self, body: bytes) -> None:
        """Answers a command as an engine's workers do."""
        if body == b"stop":
            self.stopped = self.trainers[0]
            return
        engine = int.from_bytes(body[:4], "little")
        command = commands.decode(body[4:])
        if isinstance(command, commands.Connect):
            for earlier in self.workers.get(engine, {}).values():
                self.poller.unregister(earlier)
                earlier.close()
            ranks = range(command.first_rank, command.first_rank + TP)
            self.workers[engine] = {
                rank: self.connect(f"engine.{rank}.{command.connection}") for rank in ranks
            }
        for rank, socket in self.workers[engine].items():
            payload = msgspec.msgpack.encode(self.worker_answers(rank, command))
            socket.send(encode(WorkerReply(rank, type(command).__name__, "", payload)))

    def worker_answers(self, rank: int, command: commands.Command) -> Any:
        tensors = self.sent_tensors(self.engines_of_map)
        count = int(np.diff(tensors.places)[0])
        if isinstance(command, commands.Connect):
            return host("engine", rank)
        if isinstance(command, commands.Watch):
            return commands.WatchedMemory(b"of all alike", 300, 1 << 20)
        if isinstance(command, commands.Inventory):
            names = [tensors.name(place)[1] for place in range(count)]
            return [
                commands.MemoryEntry(
                    name, (16384, 6656), "float8_e4m3fn", 1 << 26, commands.WRITTEN, ""
                )
                for name in names * (rank in command.ranks)
            ]
        if isinstance(command, commands.Open):
            address = f"10.0.{rank // 250}.{rank % 250}:17813 rdma {140_000_000_000_000 + rank}"
            endpoint = Endpoint(rank, MOONCAKE, address, 1 << 36, [], host=host("engine", rank))
            offsets = (np.arange(count, dtype=np.int64) << 26) + rank
            return PackedEndpoint(endpoint, command.known[rank], [], offsets.tobytes(), b"")
        if isinstance(command, commands.Recall):
            return commands.Changes([], 1)
        if isinstance(command, commands.Audit):
            return commands.AuditResult(
                digest_of(
                    self.hashes(self.engines_of_map)[
                        slice(*tensors.places[rank : rank + 2])
                    ].tobytes()
                )
            )
        if isinstance(command, commands.PassOn):
            return []
        return None


def host(side: str, rank: int) -> Host:
    """A host of GPUS ranks, on one InfiniBand network. Encoded, it is as long as a real one."""
    boot = f"{side:0>26}{rank // GPUS:010d}"
    return Host(
        f"{boot} pid:[4026531836] shm:[25]",
        f"{boot} net:[4026531840]",
        f"{side}-{rank // GPUS}",
        True,
        ("mooncake", "infiniband"),
    )


def render(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each size, and how costs grow from each size to the next."""
    lines = [
        f"{'ranks':>14}  {'update':>9} {'paused':>9} {'opening':>9} {'opening':>10} "
        f"{'longest block':>14}"
    ]
    lines.append(f"{'':>14}  {'CPU ms':>9} {'CPU ms':>9} {'CPU s':>9} {'MB':>10} {'CPU ms':>14}")
    for row in rows:
        ranks = f"{row['trainer_ranks']} + {row['generator_ranks']}"
        times = (
            f"{row['update_cpu_s'] * 1e3:>9.1f} {row['paused_cpu_s'] * 1e3:>9.1f} "
            f"{row['opening_cpu_s']:>9.2f}"
        )
        lines.append(
            f"{ranks:>14}  {times} {row['opening_bytes'] / 1e6:>10.1f} "
            f"{row['longest_block_s'] * 1e3:>14.0f}"
        )
    for before, after in pairwise(rows):
        rank_ratio = (after["trainer_ranks"] + after["generator_ranks"]) / (
            before["trainer_ranks"] + before["generator_ranks"]
        )
        cost_ratios = ", ".join(
            f"{cost} x{after[key] / before[key]:.1f}"
            for cost, key in (("update", "update_cpu_s"), ("opening", "opening_cpu_s"))
        )
        lines.append(
            f"  {after['trainer_ranks']} + {after['generator_ranks']}: x{rank_ratio:.1f} the "
            f"ranks; {cost_ratios}"
        )
    return "\n".join(lines)
