"""Megatron to SGLang: after an optimizer step, every live parameter of an engine has the very bits that SGLang itself loads
from the HF checkpoint which the trainer exports.

Real trainer ranks over gloo (weights_worker.py), real engines at TP1 and TP2, the real weights channels between them. The
engines' memory is filled with noise before each comparison: whatever is not written is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from run_tools import wait_until
from sglang_engine import Engine, free_port, hf_logprobs, hf_model, make_checkpoint, start_engine
from weights_worker import DEADLINE_S, Job

from megarl.messaging.link import Hub, RunKey
from megarl.messaging.messages import Message, WeightsGrant
from megarl.channels.weights_receiver import WeightsReceiver
from megarl.generator.client import Completion, EngineClient, Sampling
from megarl.generator.fleet import Fleet
from megarl.generator.update import Workers, connect, open_memory
from megarl.observe.status import StatusBoard
from megarl.observe.trace import TraceWriter
from megarl.plan.topology import TrainerTopology
from megarl.reshard.layout import trainer_layout
from megarl.trainer.norm_names import norm_names
from megarl.transports.base import SHARED_MEMORY, Endpoint
from megarl.transports.shared_memory import view_at

ENGINES = (1, 2)  # their tensor parallel sizes
MODELS = {"float32": False, "bfloat16": True}  # dtype → tied embeddings
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.06}  # of log-probs: two programs that round differently
TOPOLOGIES: dict[str, dict[str, int]] = {
    "tp1": {},
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "dp2_zero0": dict(dp=2, zero=0),
    "dp2_zero1": dict(dp=2, zero=1),
    "tp2_pp2": dict(tp=2, pp=2),
}
BY_GLOO = {("float32", "tp2_pp2"), ("bfloat16", "dp2_zero1")}  # all others by shared memory
WORKER = Path(__file__).with_name("weights_worker.py")
PROMPTS = [[1] + [3 + (37 * i + 11 * j) % 400 for j in range(7 + i)] for i in range(2)]
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)

Parameters = list[dict[str, torch.Tensor]]  # by generator rank and name


class Trainers:
    """Four processes that wait for jobs; a job takes as many of them as its topology has ranks."""

    def __init__(self, folder: Path):
        self._logs = [folder / f"trainer.{rank}.log" for rank in range(4)]
        self.start()

    def start(self) -> None:
        self._processes = [self._start(rank, log) for rank, log in enumerate(self._logs)]

    def _start(self, rank: int, log: Path) -> subprocess.Popen:
        with open(log, "wb") as output:
            return subprocess.Popen(
                [sys.executable, str(WORKER), str(rank)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def begin(self, job: Job) -> None:
        for process in self._processes[: TrainerTopology(**job.topology).world_size]:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()

    def await_export(self, job: Job) -> None:
        wait_until(job.export.exists, self._processes[0], "the export", DEADLINE_S)

    def finish(self) -> list[int]:
        """No more jobs: their exit statuses."""
        for process in self._processes:
            process.stdin.close()
        return [process.wait(DEADLINE_S) for process in self._processes]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(10)

    def errors(self) -> str:
        texts = {log.name: log.read_text(errors="replace") for log in self._logs}
        return "\n".join(f"{name}:\n{text[-3000:]}" for name, text in texts.items() if "Traceback" in text)


@pytest.fixture(scope="module")
def trainers(tmp_path_factory) -> Iterator[Trainers]:
    trainers = Trainers(tmp_path_factory.mktemp("trainers"))
    try:
        yield trainers
        assert trainers.finish() == [0, 0, 0, 0], trainers.errors()
    finally:
        trainers.kill()


@dataclass
class Generator:
    """As much of the generator executor as the weights channel asks for, around one live engine."""

    engine: Engine
    client: EngineClient
    runner: asyncio.Runner
    status: StatusBoard
    trace: TraceWriter
    live: Parameters = field(default_factory=list)  # the engine's memory
    started_with: Parameters = field(default_factory=list)
    version: int = -1

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    def get_model(self) -> Fleet:
        return Fleet([self.client])

    async def hold(self) -> None:
        """Nothing is running."""

    def release(self, version: int) -> None:
        self.version = version

    def scramble(self) -> None:
        for tensors in self.live:
            for values in tensors.values():
                values.view(torch.uint8).random_(0, 120)

    def memory(self) -> Parameters:
        return [{name: values.clone() for name, values in tensors.items()} for tensors in self.live]

    async def open(self, key_file: Path) -> None:
        """Keeps what SGLang loaded at its start, and maps the memory even for those who will not write into it."""
        await self.client.wait_ready(180, self.engine.log, self.engine.died)
        with contextlib.closing(Hub("generator.0", RunKey.load(key_file))) as hub:
            workers = Workers([self.client], self.engine.tp, hub, DEADLINE_S)
            await self.client.begin_update(DEADLINE_S)
            await connect(workers, str(key_file))
            endpoints = await open_memory(workers, SHARED_MEMORY, map=None)
            await self.client.end_update(DEADLINE_S)
        self.live = mapped(endpoints)
        self.started_with = self.memory()

    async def load(self, checkpoint: Path) -> None:
        """SGLang's own way."""
        await self.client.load_from_disk(str(checkpoint), DEADLINE_S)
        await self.client.begin_update(DEADLINE_S)  # its barrier: SGLang answers a load as soon as rank 0 is done
        await self.client.end_update(DEADLINE_S)

    async def greedy(self) -> list[Completion]:
        answers = await asyncio.gather(*(self.client.generate(prompt, GREEDY) for prompt in PROMPTS))
        return [completion for (completion,) in answers]


class NotingHub(Hub):
    """Remembers which memory the trainer ranks are told to write into."""

    endpoints: list[Endpoint] = []

    def send(self, peer: str, message: Message) -> None:
        if isinstance(message, WeightsGrant) and message.endpoints:
            self.endpoints = [Endpoint.decode(text) for text in message.endpoints]
        super().send(peer, message)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    RunKey.generate().save(path)
    return path


@dataclass
class Side:
    """Everything of one dtype: the checkpoint that all begin with, and an engine of each size."""

    dtype: str
    checkpoint: Path
    generators: dict[int, Generator]


@pytest.fixture(scope="module", params=MODELS)
def side(request, key_file, trainers, tmp_path_factory) -> Iterator[Side]:
    """After `trainers`, so that all start together."""
    dtype, folder = request.param, tmp_path_factory.mktemp(request.param)
    checkpoint = make_checkpoint(folder / "model", 1, getattr(torch, dtype), tied=MODELS[dtype])
    with contextlib.ExitStack() as stack:
        begin = contextlib.contextmanager(start_engine)
        engines = [stack.enter_context(begin(checkpoint, dtype, tp, folder / f"engine.tp{tp}.log")) for tp in ENGINES]
        runner = stack.enter_context(asyncio.Runner())
        generators = {}
        for engine in engines:
            client = runner.run(client_of(engine))
            stack.callback(lambda client=client: runner.run(client.close()))
            status, trace = StatusBoard(folder, "generator.0"), TraceWriter(folder, "generator.0")
            stack.callback(trace.close)
            stack.callback(status.close)
            generators[engine.tp] = Generator(engine, client, runner, status, trace)
            runner.run(generators[engine.tp].open(key_file))
        yield Side(dtype, checkpoint, generators)


async def client_of(engine: Engine) -> EngineClient:
    return engine.client()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_weights_after_a_step_equal_what_sglang_loads_from_the_export(side, trainers, key_file, topology, tmp_path):
    gloo = (side.dtype, topology) in BY_GLOO
    with contextlib.ExitStack() as stack:
        key = RunKey.load(key_file)
        hubs = {tp: stack.enter_context(contextlib.closing(NotingHub("generator.0", key))) for tp in ENGINES}
        job = Job(
            model=str(side.checkpoint),
            dtype=side.dtype,
            topology=TOPOLOGIES[topology],
            transport="gloo" if gloo else "shared_memory",
            hubs={tp: hub.address for tp, hub in hubs.items()},
            key_file=str(key_file),
            port=free_port(),
            folder=str(tmp_path),
        )
        try:
            trainers.begin(job)
            receive_and_compare(side, job, hubs, trainers)
        except Exception as error:
            error.add_note(trainers.errors())
            trainers.kill()  # they may stand anywhere in the job; the next case gets others
            trainers.start()
            raise


def receive_and_compare(side: Side, job: Job, hubs: dict[int, NotingHub], trainers: Trainers) -> None:
    receivers = {tp: receiver(job, tp, hub) for tp, hub in hubs.items()}
    for tp, generator in side.generators.items():
        generator.version = -1
        generator.scramble()
        generator.run(receivers[tp].take(generator))
        if hubs[tp].endpoints[0].kind == SHARED_MEMORY:
            generator.live = mapped(hubs[tp].endpoints)
        assert unequal(generator.memory(), generator.started_with) == []  # what the trainer loaded, before any step

    for tp, generator in side.generators.items():
        generator.scramble()
        generator.run(receivers[tp].take(generator))
    trainers.await_export(job)
    synced = {tp: generator.memory() for tp, generator in side.generators.items()}
    before, after = (hf_model(folder, getattr(torch, side.dtype)) for folder in (side.checkpoint, job.export))
    for tp, generator in side.generators.items():
        names = [(rank, name) for rank, tensors in enumerate(synced[tp]) for name in tensors]
        assert unequal(synced[tp], generator.started_with) == names  # the step changed every parameter
        for prompt, completion in zip(PROMPTS, generator.run(generator.greedy())):
            assert completion.versions == [1] * GREEDY.max_tokens
            assert max(differences(after, prompt, completion)) < TOLERANCE[side.dtype]
            assert min(differences(before, prompt, completion)) > TOLERANCE[side.dtype]

        generator.scramble()
        assert unequal(generator.memory(), synced[tp]) == names
        generator.run(generator.load(job.export))
        assert unequal(generator.memory(), synced[tp]) == []


def receiver(job: Job, tp: int, hub: Hub) -> WeightsReceiver:
    plan = job.plan(tp)
    source = trainer_layout(plan.spec, plan.trainer_topology, job.dtype, norm_names())
    return WeightsReceiver(plan, source, hub, job.key_file)


def mapped(endpoints: list[Endpoint]) -> Parameters:
    """The engine's memory through a mapping of the test's own."""
    storages = [torch.UntypedStorage.from_file(e.address, shared=True, nbytes=e.size_bytes) for e in endpoints]
    return [{t.name: view_at(storage, t) for t in endpoint.tensors} for storage, endpoint in zip(storages, endpoints)]


def unequal(a: Parameters, b: Parameters) -> list[tuple[int, str]]:
    """(generator rank, name) of all tensors that differ in any bit."""
    assert [tensors.keys() for tensors in a] == [tensors.keys() for tensors in b]
    return [
        (rank, name)
        for rank, tensors in enumerate(a)
        for name, values in tensors.items()
        if not torch.equal(values.view(torch.uint8), b[rank][name].view(torch.uint8))
    ]


def differences(model: torch.nn.Module, prompt: list[int], completion: Completion) -> tuple[float, float]:
    """What HF holds against a greedy completion, given the tokens before each: the largest difference between its log-prob of a
    token and the engine's, and the most by which HF's own choice is likelier than the engine's (0: they are the same)."""
    reference = hf_logprobs(model, prompt + completion.token_ids)[len(prompt) - 1 :]
    chosen = reference.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return (torch.tensor(completion.logprobs) - chosen).abs().max().item(), (reference.max(-1).values - chosen).max().item()
