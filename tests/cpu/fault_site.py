"""A live engine for tests of faults, which is restored after each test; and checks around an
update.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from loops import has_ended
from sglang_engine import make_checkpoint, start_engine
from weights_rig import GIVEN_UP, Generator, receiver
from weights_worker import DEADLINE_S, Job, Sync

from megarl.base.rollout_types import Version
from megarl.generator.client import EngineClient
from megarl.generator.completions import EngineError, Sampling
from megarl.messaging.link import Hub, RunKey
from megarl.messaging.messages import WeightsApplied, WeightsGrant
from megarl.reshard.layout import trainer_layout
from megarl.weight_sync.transports.base import SHARED_MEMORY

TP = 2
TRAINER = {"tp": 2}
DTYPE = "float32"
PROMPT = [1, 5, 9, 200, 31, 77, 12]
LONG = Sampling(max_tokens=80, temperature=0.0, ignore_eos=True)
SHORT = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)


@dataclass
class Site:
    """A live engine, and the settings of a job for it."""

    folder: Path
    checkpoint: Path
    generator: Generator
    stack: contextlib.ExitStack
    key_file: Path
    started_with: list[list[float]]  # log-probs

    @functools.cached_property
    def other(self) -> Path:
        """Weights that differ from the initial ones."""
        return make_checkpoint(self.folder / "other", 2, getattr(torch, DTYPE), tied=False)

    @property
    def key(self) -> RunKey:
        return RunKey.load(self.key_file)

    def job(
        self,
        hub: Hub,
        transport: str = SHARED_MEMORY,
        versions: tuple[Version, ...] = (0,),
        **changes: Any,
    ) -> Job:
        syncs = [Sync(version, transport, hub.address) for version in versions]
        settings = dict(
            model=str(self.checkpoint),
            dtype=DTYPE,
            trainer=TRAINER,
            tp=TP,
            ep=1,
            key_file=str(self.key_file),
            port=0,
        )
        return Job(**{**settings, **changes}, syncs=syncs, folder=str(self.folder))

    def start(self) -> None:
        """Starts another engine in place of the previous one: the same port, keys and client."""
        log = self.folder / f"engine.{time.monotonic():.0f}.log"
        begin = contextlib.contextmanager(start_engine)
        engine = self.stack.enter_context(
            begin(self.checkpoint, DTYPE, TP, log, instead_of=self.generator.engine)
        )
        self.generator.engine = engine
        self.generator.run(self.generator.client.wait_ready(180, log, engine.died))
        self.generator.live = []

    def reopen(self) -> None:
        """Opens another client of the engine, which runs and has no open session."""
        generator = self.generator
        generator.run(generator.client.close())
        generator.use(generator.run(_client(generator)))
        if not generator.engine.process.is_running():
            self.start()
        with contextlib.suppress(EngineError):  # no session is open
            generator.run(generator.client.end_update(DEADLINE_S))

    def ready(self) -> Generator:
        """Restores the engine's initial state after a fault."""
        generator = self.generator
        self.reopen()
        generator.run(_idle(generator.client))
        generator.load(self.checkpoint)
        generator.set_version(-1)
        assert generator.score([PROMPT]) == self.started_with
        return generator


async def _idle(client: EngineClient) -> None:
    """Waits until the engine runs and all abandoned requests have ended."""
    await client.resume(DEADLINE_S)
    await client.abort_all(DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(EngineError):  # not yet
                return await client.flush(DEADLINE_S)
            await asyncio.sleep(0.05)


async def _client(generator: Generator) -> EngineClient:
    return generator.engine.client()


@contextlib.contextmanager
def threads(*ranks: Future, hub: Hub) -> Iterator[None]:
    """Runs trainer ranks as threads.

    Ranks that still wait when the test is over get a message that ends them.
    """
    try:
        yield
    finally:
        for rank in range(len(ranks)):
            with contextlib.suppress(RuntimeError):  # it has already ended
                for message in (WeightsGrant(GIVEN_UP), WeightsApplied(GIVEN_UP, True, 0.0, 0)):
                    hub.send(f"trainer.{rank}", message)
        for outcome in ranks:
            outcome.exception(DEADLINE_S)


def take(site: Site, job: Job, hub: Hub, generator: Generator | None = None) -> None:
    """Does the receiving end's part of the job's first update."""
    (generator or site.generator).take(
        receiver(job.plan(job.syncs[0].transport), hub, job.key_file)
    )


@contextlib.contextmanager
def beside(generator: Generator) -> Iterator[list[asyncio.Task]]:
    """Around an update: a request runs when the update begins."""
    requests: list[asyncio.Task] = []

    async def hold() -> None:
        requests.append(asyncio.create_task(generator.client.generate(PROMPT, LONG, version=-1)))
        await asyncio.sleep(0.01)
        # queued after that request, and sampled together with it
        await generator.client.generate(PROMPT, SHORT, version=-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "hold", hold)
        yield requests


@contextlib.contextmanager
def unusable_after(site: Site, paused: bool = True) -> Iterator[None]:
    """Around an update that fails: the next request is refused, and no client can make the engine
    continue.
    """
    generator = site.generator
    yield
    with pytest.raises(EngineError, match="must not be used any more"):
        generator.score([PROMPT])
    if paused:
        with pytest.raises(TimeoutError, match="gave no answer"):
            generator.run(_impatient(generator))


async def outcome_of(task: asyncio.Task) -> Any:
    return await asyncio.wait_for(task, DEADLINE_S)


async def _impatient(generator: Generator) -> None:
    """A request of another client."""
    engine = generator.engine
    client = EngineClient(engine.url, engine.keys.api, engine.keys.admin, request_s=0.5)
    try:
        await client.generate(PROMPT, LONG)
    finally:
        await client.close()


def kill_worker(processes: list[psutil.Process]) -> None:
    """Kills the worker of rank 1. A moment later the engine ends too."""
    (worker,) = (process for process in processes if "scheduler_TP1" in " ".join(process.cmdline()))
    worker.kill()
    while not has_ended(worker):
        time.sleep(0.01)


def source_layout(job: Job):
    plan = job.plan()
    return trainer_layout(plan.spec, plan.trainer_topology, job.dtype)
