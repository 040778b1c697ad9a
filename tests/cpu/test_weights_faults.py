"""What goes wrong in a weight update is found before anything half-written can generate, and named: who, whom, which tensor.

One live engine at TP2, as long as the faults leave it alive; trainer ranks are the real sending ends around held weights
(held_weights.py), threads of the test, or processes where they are to die. After each fault the engine stands still, and
requests are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import faulty_transports
import psutil
import pytest
import torch
from faulty_transports import HOOKED
from held_weights import as_process, as_thread
from pokes import FLIP, REPLACE, poke
from sglang_engine import make_checkpoint, start_engine
from weights_rig import Generator, open_generator, receiver, unequal
from weights_worker import DEADLINE_S, Job, Sync

from megarl.config.errors import ConfigError
from megarl.generator.client import EngineClient, EngineUnreachable
from megarl.generator.completions import EngineError, Sampling
from megarl.generator.fleet import Fleet
from megarl.messaging.link import Hub, Peer, RunKey
from megarl.messaging.messages import Hello, WeightsApplied, WeightsGrant, WeightsOffer, WeightsWritten
from megarl.reshard.kinds import LayoutError
from megarl.reshard.layout import trainer_layout
from megarl.types import Version
from megarl.weight_sync.audit import AuditError
from megarl.weight_sync.common import weights_map
from megarl.weight_sync.sender import check_held
from megarl.weight_sync.transports.base import GLOO, MOONCAKE, SHARED_MEMORY
from megarl.weight_sync.transports.choice import this_host
from megarl.weight_sync.transports.mooncake import open_engine
from megarl.weight_sync.update import VersionError

try:
    open_engine("127.0.0.1", "tcp")
    NO_MOONCAKE = ""
except ConfigError as missing:
    NO_MOONCAKE = str(missing)

ROTARY = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
TP = 2
TRAINER = {"tp": 2}
DTYPE = "float32"
WRITE_S = 8.0  # deadline of an update in which a trainer rank falls silent
PROMPT = [1, 5, 9, 200, 31, 77, 12]
LONG = Sampling(max_tokens=80, temperature=0.0, ignore_eos=True)
SHORT = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
WITH_MOONCAKE = pytest.mark.skipif(bool(NO_MOONCAKE), reason=NO_MOONCAKE)
KINDS = [SHARED_MEMORY, GLOO, pytest.param(MOONCAKE, marks=WITH_MOONCAKE)]
REST_IN_MATRIX = [  # seconds of waiting, or an engine, each
    SHARED_MEMORY,
    pytest.param(GLOO, marks=pytest.mark.matrix),
    pytest.param(MOONCAKE, marks=[WITH_MOONCAKE, pytest.mark.matrix]),
]


@dataclass
class Site:
    """A live engine, and what a job for it needs."""

    folder: Path
    checkpoint: Path
    generator: Generator
    stack: contextlib.ExitStack
    key_file: Path
    started_with: list[list[float]]  # log-probs

    @functools.cached_property
    def other(self) -> Path:
        """Weights unlike those that it started with."""
        return make_checkpoint(self.folder / "other", 2, getattr(torch, DTYPE), tied=False)

    @property
    def key(self) -> RunKey:
        return RunKey.load(self.key_file)

    def job(self, hub: Hub, transport: str = SHARED_MEMORY, versions: tuple[Version, ...] = (0,), **changes: Any) -> Job:
        syncs = [Sync(version, transport, hub.address) for version in versions]
        settings = dict(model=str(self.checkpoint), dtype=DTYPE, trainer=TRAINER, tp=TP, ep=1, key_file=str(self.key_file), port=0)
        return Job(**{**settings, **changes}, syncs=syncs, folder=str(self.folder))

    def start(self) -> None:
        """Another engine, where the one before was: the same port and keys, and the same client of it."""
        log = self.folder / f"engine.{time.monotonic():.0f}.log"
        begin = contextlib.contextmanager(start_engine)
        engine = self.stack.enter_context(begin(self.checkpoint, DTYPE, TP, log, instead_of=self.generator.engine))
        self.generator.engine = engine
        self.generator.run(self.generator.client.wait_ready(180, log, engine.died))
        self.generator.live = []

    def reopen(self) -> None:
        """Another client of the engine, which runs and has no session open."""
        generator = self.generator
        generator.run(generator.client.close())
        generator.use(generator.run(_client(generator)))
        if not generator.engine.process.is_running():
            self.start()
        with contextlib.suppress(EngineError):  # no session is open
            generator.run(generator.client.end_update(DEADLINE_S))

    def ready(self) -> Generator:
        """The engine as it was at its start: it goes on from whatever a fault has left."""
        generator = self.generator
        self.reopen()
        generator.run(_idle(generator.client))
        generator.load(self.checkpoint)
        generator.set_version(-1)
        assert generator.score([PROMPT]) == self.started_with
        return generator


async def _idle(client: EngineClient) -> None:
    """It runs; requests that nobody waits for any more have come to their end."""
    await client.resume(DEADLINE_S)
    await client.abort_all(DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(EngineError):  # not yet
                return await client.flush(DEADLINE_S)
            await asyncio.sleep(0.05)


async def _client(generator: Generator) -> EngineClient:
    return generator.engine.client()


@pytest.fixture(scope="module")
def whole_site(tmp_path_factory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("faults")
    key_file = folder / "key"
    RunKey.generate().save(key_file)
    checkpoint = make_checkpoint(folder / "model", 1, getattr(torch, DTYPE), tied=False)
    with contextlib.ExitStack() as stack:
        generator = stack.enter_context(open_generator(checkpoint, DTYPE, TP, 1, folder))
        yield Site(folder, checkpoint, generator, stack, key_file, generator.score([PROMPT]))


@pytest.fixture
def site(whole_site: Site) -> Site:
    whole_site.ready()
    return whole_site


@pytest.fixture
def hub(whole_site: Site) -> Iterator[Hub]:
    with contextlib.closing(Hub("generator.0", whole_site.key)) as hub:
        yield hub


@contextlib.contextmanager
def threads(*ranks: Future, hub: Hub) -> Iterator[None]:
    """Trainer ranks that still wait when the test is over are told something that ends them."""
    try:
        yield
    finally:
        for rank in range(len(ranks)):
            with contextlib.suppress(RuntimeError):  # it has gone already
                for message in (WeightsGrant(99, []), WeightsApplied(99, True, 0.0, 0)):
                    hub.send(f"trainer.{rank}", message)
        for outcome in ranks:
            outcome.exception(DEADLINE_S)


def take(site: Site, job: Job, hub: Hub, generator: Generator | None = None) -> None:
    """The receiving end's part of the job's first update."""
    (generator or site.generator).take(receiver(job.plan(job.syncs[0].transport), hub, job.key_file))


@contextlib.contextmanager
def beside(generator: Generator) -> Iterator[list[asyncio.Task]]:
    """Around an update: a request is on its way when it begins."""
    requests: list[asyncio.Task] = []

    async def hold() -> None:
        requests.append(asyncio.create_task(generator.client.generate(PROMPT, LONG, version=-1)))
        await asyncio.sleep(0.01)
        await generator.client.generate(PROMPT, SHORT, version=-1)  # queued behind it, sampled together with it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "hold", hold)
        yield requests


@contextlib.contextmanager
def unusable_after(site: Site, paused: bool = True) -> Iterator[None]:
    """Around an update that fails: the next request is refused, and the engine does not go on for anybody."""
    generator = site.generator
    yield
    with pytest.raises(EngineError, match="must not be used any more"):
        generator.score([PROMPT])
    if paused:
        with pytest.raises(TimeoutError, match="gave no answer"):
            generator.run(_impatient(generator))


async def _outcome(task: asyncio.Task) -> Any:
    return await asyncio.wait_for(task, DEADLINE_S)


async def _impatient(generator: Generator) -> None:
    """Some other client asks."""
    engine = generator.engine
    client = EngineClient(engine.url, engine.keys.api, engine.keys.admin, request_s=0.5)
    try:
        await client.generate(PROMPT, LONG)
    finally:
        await client.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit(site, hub, kind, monkeypatch):
    monkeypatch.setattr(faulty_transports, "before_write", faulty_transports.flip_one_bit)
    generator, job = site.generator, site.job(hub, HOOKED[kind])
    writers = threads(as_thread(0, job), as_thread(1, job), hub=hub)
    with writers, unusable_after(site), beside(generator) as requests, pytest.raises(AuditError) as failure:
        take(site, job, hub)
    with pytest.raises(EngineError, match="must not be used any more: its weights may be old or half-written"):
        generator.run(_outcome(requests[0]))
    assert str(failure.value).splitlines()[1:] == [f"{faulty_transports.FLIPPED} on generator rank 1 is not what trainer rank 1 sent"]


CHANGES = {  # TP rank 1's tensor, how, at which byte, weights.audit
    "a parameter between updates": (faulty_transports.FLIPPED, FLIP, 5, "strict"),
    "rows that pad the vocabulary": ("lm_head.weight", FLIP, 256 * 64 * 4 - 5, "strict"),
    "a rotary cache": (ROTARY, FLIP, 70, "on"),
    "a rotary cache, replaced by another": (ROTARY, REPLACE, 70, "on"),
}


@pytest.mark.parametrize("name, how, at, audit", CHANGES.values(), ids=CHANGES)
def test_memory_of_a_live_engine_that_something_else_has_written_to(site, hub, name, how, at, audit):
    """Between two updates, while the engine serves."""
    generator, first, now = site.generator, site.job(hub, audit="on"), Event()
    now.set()
    with threads(*(as_thread(rank, first) for rank in range(2)), hub=hub):
        take(site, first, hub)
    poke(generator, site.folder, name, 1, how, at)
    with contextlib.closing(Hub("generator.0", site.key)) as again:
        job = site.job(again, versions=(1,), audit=audit)
        ranks = threads(*(as_thread(rank, job, now) for rank in range(2)), hub=again)
        with ranks, unusable_after(site), pytest.raises(AuditError) as failure:
            take(site, job, again)
    told = f"{name} on generator rank 1 of engine {generator.client.url} has changed since the audit of version 0"
    assert str(failure.value).splitlines()[1:] == [told]
    site.reopen()
    poke(generator, site.folder, name, 1, how, at)  # nothing else would mend it


def test_trainer_and_generator_with_different_maps(site, hub):
    job, other = site.job(hub), site.job(hub, trainer={"pp": 2})
    with threads(as_thread(0, job), as_thread(1, job), hub=hub), pytest.raises(RuntimeError) as failure:
        take(site, other, hub)
    ours, theirs = (weights_map(each.plan(), _source(each)).plan_hash for each in (other, job))
    assert f"trainer.0 computed {theirs}, trainer.1 computed {theirs}; generator.0 computed {ours}" in str(failure.value)
    assert site.generator.score([PROMPT]) == site.started_with  # nobody has touched the engine


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": "bfloat16"}, "generator rank 1, model.layers.0.self_attn.qkv_proj.weight: .*float32.*in the layout .*bfloat16"),
        ({"model": "qwen2"}, "generator rank 0 has no model.layers.0.self_attn.qkv_proj.bias"),
        ({"tp": 1}, "engine http://127.0.0.1:.* runs with tp=2, ep=1, dp_attention=1, the reshard map is for tp=1, ep=1, dp_attention=1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_engine_that_is_not_the_one_of_the_map(site, hub, changes, message, tmp_path):
    if "model" in changes:
        changes = {"model": str(make_checkpoint(tmp_path / "other", 1, getattr(torch, DTYPE), False, changes["model"]))}
    site.generator.map_memory(site.key_file)
    before = site.generator.memory()
    job = site.job(hub, **changes)
    with threads(as_thread(0, job), as_thread(1, job), hub=hub), unusable_after(site), pytest.raises(LayoutError, match=message):
        take(site, job, hub)
    assert unequal(site.generator.memory(), before) == []


def test_a_trainer_rank_whose_weights_are_not_those_of_the_map(site, hub):
    layout = _source(site.job(hub))
    held = {tensor.name: torch.zeros(tensor.shape) for tensor in layout.tensors(1)}
    check_held(held, layout, 1)
    for name, wrong in (("decoder.layers.1.mlp.linear_fc2.weight", torch.zeros(64, 192)), ("output_layer.weight", None)):
        changed = {**held, name: wrong} if wrong is not None else {key: value for key, value in held.items() if key != name}
        with pytest.raises(LayoutError, match=rf"trainer rank 1, {re.escape(name)}: shape, dtype .*, in the layout \("):
            check_held(changed, layout, 1)


@pytest.mark.parametrize("kind", REST_IN_MATRIX)
def test_a_trainer_rank_dies_in_mid_transfer(site, hub, kind):
    job = site.job(hub, HOOKED[kind], weights_s=WRITE_S)
    message = {GLOO: r"(?s)generator rank \d failed at Receive.*weights from trainer rank 1 to generator rank \d, "}
    expected = message.get(kind, "generator.0 waited 8 s for trainer.1 to write weights version 0")
    dying = as_process(1, job, "die")
    assert hub.wait(DEADLINE_S)  # it has started: the other rank's offer waits for its no longer than WRITE_S
    with threads(as_thread(0, job), hub=hub), unusable_after(site), pytest.raises((RuntimeError, TimeoutError), match=expected):
        take(site, job, hub)
    assert dying.wait(10) == -signal.SIGKILL


def test_a_rank_that_has_written_another_version(site, hub):
    job = site.job(hub)
    peers = [Peer(f"trainer.{rank}", site.key, hub.address) for rank in range(2)]
    for peer in peers:
        peer.send(Hello(weights_map(job.plan(), _source(job)).plan_hash, this_host()))
        peer.send(WeightsOffer(0))
        peer.send(WeightsWritten(1, 0, 0.0, {}))
    message = r"generator.0 waited for trainer.0, trainer.1 to write weights version 0, but trainer.\d has written version 1"
    with unusable_after(site), pytest.raises(RuntimeError, match=message):
        take(site, job, hub)
    for peer in peers:
        peer.close()


def test_a_grant_and_an_end_of_another_version(site, hub):
    job = site.job(hub)
    outcome = as_thread(0, job)
    hub.receive(WeightsOffer, DEADLINE_S, "the offer")
    hub.send("trainer.0", WeightsGrant(3, []))
    with pytest.raises(RuntimeError, match="trainer.0 offered weights version 0, generator.0 granted version 3"):
        outcome.result(DEADLINE_S)


def test_an_update_that_is_confirmed_as_a_newer_one(site, hub, monkeypatch):
    """The message in which the generator says what the engines serve."""
    job = site.job(hub)
    send = hub.send
    monkeypatch.setattr(hub, "send", lambda peer, m: send(peer, WeightsApplied(1, True, 0.0, 0) if isinstance(m, WeightsApplied) else m))
    outcomes = [as_thread(rank, job) for rank in range(2)]
    take(site, job, hub)
    for outcome in outcomes:
        with pytest.raises(RuntimeError, match="weights version 0 was written last, generator.0 applied version 1"):
            outcome.result(DEADLINE_S)


def test_an_engine_that_goes_by_another_version_after_the_update(site, hub, monkeypatch):
    client, job = site.generator.client, site.job(hub)
    set_version = client.set_version
    monkeypatch.setattr(client, "set_version", lambda version, timeout_s: set_version(version + 4, timeout_s))
    with threads(as_thread(0, job), as_thread(1, job), hub=hub), unusable_after(site), pytest.raises(VersionError) as failure:
        take(site, job, hub)
    assert f"engine {client.url} holds weights version 4, not 0" in str(failure.value)


def test_an_engine_that_no_longer_holds_what_it_was_given(site, hub):
    """As one that was restarted (see below): by shared memory its old memory would still be there to be written to, as long as a trainer
    rank has it mapped."""
    job, client, go = site.job(hub, versions=(0, 1)), site.generator.client, Event()
    ends = receiver(job.plan(SHARED_MEMORY), hub, job.key_file)
    with threads(*(as_thread(rank, job, go) for rank in range(2)), hub=hub):
        site.generator.take(ends)
        go.set()
        site.generator.run(client.set_version(-1, DEADLINE_S))
        with pytest.raises(VersionError, match="holds weights version -1, not 0: was it restarted since the last update?"):
            site.generator.take(ends)
        with pytest.raises(EngineError, match="must not be used any more"):
            site.generator.score([PROMPT])


def test_an_engine_dies_when_it_has_been_written_to_and_comes_back(site, hub, monkeypatch):
    """Where a run goes on without a lost engine: the update ends without it. Started again, it is given the next before it serves."""
    generator, client, new, go = site.generator, site.generator.client, site.other, Event()
    generator.fleet = Fleet([client], elastic=True)
    processes, end_update = generator.engine.processes(), client.end_update

    async def kill_before(timeout_s: float) -> None:
        """The real engine's worker really dies; the real call follows."""
        kill_worker(processes)
        await end_update(timeout_s)

    monkeypatch.setattr(client, "end_update", kill_before)
    job = site.job(hub, SHARED_MEMORY, versions=(0, 1), model=str(new))
    ends = receiver(job.plan(SHARED_MEMORY), hub, job.key_file)
    with threads(*(as_thread(rank, job, go) for rank in range(2)), hub=hub):
        with beside(generator) as requests:
            generator.take(ends)
        with pytest.raises(EngineUnreachable):
            generator.run(_outcome(requests[0]))  # the fleet's to finish elsewhere
        assert generator.fleet.serving == set() and generator.fleet.lost.keys() == {0}
        assert psutil.wait_procs(processes, timeout=15)[1] == []
        monkeypatch.undo()
        site.start()
        assert generator.run(client.version(DEADLINE_S)) == -1
        generator.fleet.come_back(0)
        go.set()
        generator.take(ends)
    assert generator.fleet.serving == {0} and generator.run(client.version(DEADLINE_S)) == 1
    generator.map_memory(site.key_file)
    written, scored = generator.memory(), generator.score([PROMPT])
    generator.scramble()
    generator.load(new)
    assert unequal(written, generator.memory()) == [] and generator.score([PROMPT]) == scored != site.started_with


def test_an_engine_whose_connection_broke_is_updated_and_serves_again_though_it_never_ended(site, hub):
    generator, client, go = site.generator, site.generator.client, Event()
    generator.fleet = Fleet([client], elastic=True)
    job = site.job(hub, versions=(0, 1), model=str(site.other))
    ends = receiver(job.plan(SHARED_MEMORY), hub, job.key_file)
    with threads(*(as_thread(rank, job, go) for rank in range(2)), hub=hub):
        generator.take(ends)
        generator.fleet.lose(EngineUnreachable(client.url, "reset by peer"))
        assert generator.fleet.intact == {0} and generator.run(client.answers()) and not generator.run(client.fresh())
        generator.fleet.come_back(0)
        go.set()
        generator.take(ends)
    assert generator.fleet.serving == {0} and generator.run(client.version(DEADLINE_S)) == 1
    scored = generator.score([PROMPT])
    generator.load(site.other)
    assert generator.score([PROMPT]) == scored != site.started_with


@pytest.mark.parametrize("kind", REST_IN_MATRIX)
def test_an_engine_worker_dies_in_mid_transfer(site, hub, kind, monkeypatch):
    """It takes the engine with it. (One that dies before it is connected to: tests/unit/test_transports_dead_owner.py.)"""
    processes = site.generator.engine.processes()
    connected = Event()  # trainer rank 1

    def kill(rank: int, writes: int, copy: Any, values: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            connected.set()
        elif writes == faulty_transports.FIRST_WRITES:
            assert connected.wait(DEADLINE_S)
            kill_worker(processes)
        return values

    monkeypatch.setattr(faulty_transports, "before_write", kill)
    job = site.job(hub, HOOKED[kind], weights_s=30.0)
    lost = f"engine {site.generator.client.url}/update_weights_from_tensor is not reachable"  # writers go on without it
    writers = threads(as_thread(0, job), as_thread(1, job), hub=hub)
    with writers, unusable_after(site, paused=False), pytest.raises(RuntimeError, match=lost):
        take(site, job, hub)
    assert psutil.wait_procs(processes, timeout=15)[1] == []


def kill_worker(processes: list[psutil.Process]) -> None:
    """That of rank 1. It takes the engine with it, a moment later."""
    (worker,) = (process for process in processes if "scheduler_TP1" in " ".join(process.cmdline()))
    worker.kill()
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def _source(job: Job):
    plan = job.plan()
    return trainer_layout(plan.spec, plan.trainer_topology, job.dtype)
