"""Shared by the tests of weight updates: trainer ranks that wait for jobs, and the part of the
generator that the channel needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from nursery import ForkedRun, script
from sglang_engine import Engine, start_engine
from weights_worker import DEADLINE_S, Job, Sync

from megarl.config.errors import ConfigError
from megarl.generator.client import EngineClient, EngineError, EngineUnreachable
from megarl.generator.fleet import Fleet
from megarl.messaging.link import Hub, RunKey
from megarl.messaging.messages import WeightsGrant, decode
from megarl.observe.status import StatusBoard, TraceWriter
from megarl.plan.resolve import RunPlan
from megarl.reshard.layout import trainer_layout
from megarl.trainer.cpu_support import layer_spec
from megarl.weight_sync.content import sent_layout
from megarl.weight_sync.opening import open_memory
from megarl.weight_sync.receiver import WeightsReceiver
from megarl.weight_sync.transports.base import GLOO, MOONCAKE, SHARED_MEMORY, Endpoint
from megarl.weight_sync.transports.mooncake import open_engine
from megarl.weight_sync.transports.shared_memory import view_at
from megarl.weight_sync.workers import Workers, connect

RANKS = 4  # of the largest trainer
GIVEN_UP = 99  # a version that ends ranks which still wait
# to score
SEQUENCES = [
    [1] + [3 + (37 * i + 11 * j) % 400 for j in range(n)] for i, n in enumerate((7, 12, 30))
]


try:
    open_engine("127.0.0.1", "tcp")
    TRANSPORTS = (SHARED_MEMORY, GLOO, MOONCAKE)
except ConfigError:  # test_transports_mooncake.py is skipped with the reason
    TRANSPORTS = (SHARED_MEMORY, GLOO)

Parameters = list[dict[str, torch.Tensor]]  # by generator rank and name
# the engine's parameters, and the log-probs of SEQUENCES
Result = tuple[Parameters, list[list[float]]]


class Trainers:
    """Processes that wait for jobs. A job takes as many as its topology has ranks."""

    def __init__(self, folder: Path):
        self._logs = [folder / f"trainer.{rank}.log" for rank in range(RANKS)]
        self.start()

    def start(self) -> None:
        self.processes = [self._start(rank, log) for rank, log in enumerate(self._logs)]

    def _start(self, rank: int, log: Path) -> subprocess.Popen:
        with open(log, "wb") as output:
            return ForkedRun(
                **script("weights_worker", str(rank)),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def begin(self, job: Job) -> None:
        for process in self.processes[: job.plan().trainer_topology.world_size]:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Around a job: if it fails, its processes may be anywhere in it, so the next job gets new
        ones.
        """
        try:
            yield
        except BaseException as error:
            error.add_note(self.errors())
            self.restart()
            raise

    def restart(self) -> None:
        self.kill()
        self.start()

    def finish(self) -> list[int]:
        """Ends the processes, and returns their exit statuses."""
        for process in self.processes:
            process.stdin.close()
        return [process.wait(DEADLINE_S) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)

    def errors(self) -> str:
        texts = {log.name: log.read_text(errors="replace") for log in self._logs}
        return "\n".join(
            f"{name}:\n{text[-3000:]}" for name, text in texts.items() if "Traceback" in text
        )


@contextlib.contextmanager
def open_trainers(folder: Path) -> Iterator[Trainers]:
    trainers = Trainers(folder)
    try:
        yield trainers
        assert trainers.finish() == [0] * RANKS, trainers.errors()
    finally:
        trainers.kill()


@dataclass
class Generator:
    """The part of the generator executor that the weights channel needs, with one live engine."""

    engine: Engine
    client: EngineClient
    runner: asyncio.Runner
    status: StatusBoard
    trace: TraceWriter
    live: Parameters = field(default_factory=list)  # the engine's memory
    version: int = -1

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    def __post_init__(self) -> None:
        self.use(self.client)

    def use(self, client: EngineClient) -> None:
        self.client = client
        self.fleet = Fleet([client])

    def get_model(self) -> Fleet:
        return self.fleet

    async def hold(self) -> None:
        """Nothing is running."""

    def release(self, version: int) -> None:
        self.version = version

    def take(self, receiver: WeightsReceiver) -> None:
        """Takes the next update that is offered."""
        self.run(receiver.take(self))

    def set_version(self, version: int) -> None:
        """Sets the version of the engine, and of this object."""
        self.run(self.client.set_version(version, DEADLINE_S))
        self.version = version

    def scramble(self) -> None:
        for tensors in self.live:
            for values in tensors.values():
                bits(values).random_(0, 120)

    def memory(self) -> Parameters:
        return [{name: values.clone() for name, values in tensors.items()} for tensors in self.live]

    def map_memory(self, key_file: Path) -> None:
        """Maps the engine's memory for the test itself, whichever transport writes to it."""
        endpoints = self.in_update(
            key_file, lambda workers: open_memory(workers, SHARED_MEMORY, map=None)
        )
        self.live = mapped(endpoints)

    def in_update[T](self, key_file: Path, body: Callable[[Workers], Coroutine[Any, Any, T]]) -> T:
        """Awaits `body`, which gets the engine's workers, between the begin and the end of an
        update.
        """

        async def session() -> T:
            with contextlib.closing(Hub("generator.0", RunKey.load(key_file))) as hub:
                workers = Workers([self.client], [self.engine.tp], hub, DEADLINE_S)
                await self.client.begin_update(DEADLINE_S)
                try:
                    await connect(workers, str(key_file))
                    return await body(workers)
                finally:
                    await self.client.end_update(DEADLINE_S)

        return self.run(session())

    def load(self, checkpoint: Path) -> None:
        """Loads weights SGLang's own way.

        SGLang refuses it while it still has a request that it has just answered.
        """

        async def load() -> None:
            deadline = time.monotonic() + DEADLINE_S
            while True:
                try:
                    await self.client.flush(DEADLINE_S)
                    break
                except EngineUnreachable:
                    raise
                except EngineError:
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(0.1)
            await self.client.call(
                "/update_weights_from_disk", {"model_path": str(checkpoint)}, DEADLINE_S
            )
            # a barrier, because SGLang answers a load as soon as rank 0 is done
            await self.client.begin_update(DEADLINE_S)
            await self.client.end_update(DEADLINE_S)
            await self.client.flush(DEADLINE_S)

        self.run(load())

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of each token except the first.

        Requests run one after the other, so that timing has no effect.
        """

        async def score() -> list[list[float]]:
            return [(await self.client.score([sequence]))[0] for sequence in sequences]

        return self.run(score())


@contextlib.contextmanager
def open_generator(
    model: Path, dtype: str, tp: int, ep: int, folder: Path, **extra: Any
) -> Iterator[Generator]:
    """A live engine that takes requests."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(
            contextlib.contextmanager(start_engine)(
                model, dtype, tp, folder / "engine.log", ep, **extra
            )
        )
        runner = stack.enter_context(asyncio.Runner())
        status = stack.enter_context(contextlib.closing(StatusBoard(folder, "generator.0")))
        trace = stack.enter_context(contextlib.closing(TraceWriter(folder, "generator.0")))
        generator = Generator(engine, runner.run(_client_of(engine)), runner, status, trace)
        stack.callback(lambda: runner.run(generator.client.close()))  # it may have changed by then
        runner.run(generator.client.wait_ready(180, engine.log, engine.died))
        yield generator


class OneAtATime[K, V]:
    """Opens something by key, and keeps it until another key is requested.

    For tests with further parameters besides the key: pytest would set up a fixture with parameters
    again for each of them.
    """

    def __init__(self, open: Callable[[K], AbstractContextManager[V]]):
        self._open = open
        self._stack = contextlib.ExitStack()
        self._current: tuple[K, V] | None = None

    def of(self, key: K) -> V:
        if self._current is None or self._current[0] != key:
            self.close()
            self._current = (key, self._stack.enter_context(self._open(key)))
        return self._current[1]

    def close(self) -> None:
        self._current = None
        self._stack.close()


async def _client_of(engine: Engine) -> EngineClient:
    return engine.client()


def receiver(plan: RunPlan, hub: Hub, key_file: str | Path) -> WeightsReceiver:
    base = trainer_layout(plan.spec, plan.trainer_topology, plan.config.model.dtype, layer_spec())
    source = sent_layout(plan, base, layer_spec())
    return WeightsReceiver(plan, source, hub, str(key_file))


def noted_grants(hub: Hub) -> list[str]:
    """What trainer rank 0 may send, noted as the hub grants it: "d" only changes (or only
    adapters), "F" everything.
    """
    grants = []
    send = hub._send

    def note(peer: str, body: bytes) -> None:
        message = decode(body)
        is_grant = isinstance(message, WeightsGrant) and message.version < GIVEN_UP
        if is_grant and peer == "trainer.0":
            grants.append("d" if message.delta else "F")
        send(peer, body)

    hub._send = note
    return grants


def receive(generator: Generator, job: Job, sync: Sync, hub: Hub) -> Result:
    """Receives one update into noise, and audits it."""
    generator.set_version(sync.version - 1)
    generator.scramble()
    generator.take(receiver(job.plan(sync.transport), hub, job.key_file))
    return generator.memory(), generator.score(SEQUENCES)


def mapped(endpoints: list[Endpoint]) -> Parameters:
    """The engine's memory, through the test's own mapping."""
    storages = [
        torch.UntypedStorage.from_file(e.address, shared=True, nbytes=e.size_bytes)
        for e in endpoints
    ]
    return [
        {t.name: view_at(storage, t) for t in endpoint.tensors}
        for storage, endpoint in zip(storages, endpoints)
    ]


def names(parameters: Parameters) -> list[tuple[int, str]]:
    """(generator rank, name) of all tensors."""
    return [(rank, name) for rank, tensors in enumerate(parameters) for name in tensors]


def unequal(a: Parameters, b: Parameters) -> list[tuple[int, str]]:
    """(generator rank, name) of all tensors that differ in any bit."""
    assert sorted(names(a)) == sorted(names(b))
    return [
        (rank, name)
        for rank, name in names(a)
        if not torch.equal(bits(a[rank][name]), bits(b[rank][name]))
    ]


def bits(values: torch.Tensor) -> torch.Tensor:
    return torch.atleast_1d(values).view(torch.uint8)
