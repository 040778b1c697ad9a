"""A fault in a weight update is detected before a half-written engine can generate.

The message names sender, receiver and tensor.

There is one live engine at TP2, as long as the faults leave it alive. Trainer ranks are the real
sending ends with held weights (held_weights.py): threads of the test, or processes if they are to
die. After each fault the engine is paused, and requests are refused.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from threading import Event
from typing import Any

import faulty_transports
import psutil
import pytest
import torch
from fault_site import (
    DTYPE,
    PROMPT,
    TP,
    Site,
    beside,
    kill_worker,
    outcome_of,
    source_layout,
    take,
    threads,
    unusable_after,
)
from faulty_transports import HOOKED
from held_weights import as_process, as_thread
from pokes import FLIP, REPLACE, poke
from sglang_engine import make_checkpoint
from weights_rig import open_generator, receiver, unequal
from weights_worker import DEADLINE_S

from megarl.config.errors import ConfigError
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import EngineError
from megarl.generator.fleet import Fleet
from megarl.messaging.link import Hub, Peer, RunKey
from megarl.messaging.messages import (
    Hello,
    WeightsApplied,
    WeightsGrant,
    WeightsOffer,
    WeightsWritten,
    decode,
    encode,
)
from megarl.reshard.layout import LayoutError
from megarl.weight_sync.audit import AuditError
from megarl.weight_sync.content import weights_map
from megarl.weight_sync.sender import check_parameters
from megarl.weight_sync.transports.base import GLOO, MOONCAKE, SHARED_MEMORY
from megarl.weight_sync.transports.choice import this_host
from megarl.weight_sync.transports.mooncake import open_engine
from megarl.weight_sync.updates import VersionError

try:
    open_engine("127.0.0.1", "tcp")
    NO_MOONCAKE = ""
except ConfigError as missing:
    NO_MOONCAKE = str(missing)

ROTARY = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
WRITE_S = 8.0  # deadline of an update in which a trainer rank goes silent
WITH_MOONCAKE = pytest.mark.skipif(bool(NO_MOONCAKE), reason=NO_MOONCAKE)
KINDS = [SHARED_MEMORY, GLOO, pytest.param(MOONCAKE, marks=WITH_MOONCAKE)]
REST_IN_LONG = [
    SHARED_MEMORY,
    pytest.param(GLOO, marks=pytest.mark.long),
    pytest.param(MOONCAKE, marks=[WITH_MOONCAKE, pytest.mark.long]),
]
REST_IN_MATRIX = [  # each takes seconds of waiting, or an engine
    SHARED_MEMORY,
    pytest.param(GLOO, marks=pytest.mark.matrix),
    pytest.param(MOONCAKE, marks=[WITH_MOONCAKE, pytest.mark.matrix]),
]


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit(site, hub, kind, monkeypatch):
    monkeypatch.setattr(faulty_transports, "before_write", faulty_transports.flip_one_bit)
    generator = site.generator
    job = site.job(hub, HOOKED[kind])
    writers = threads(as_thread(0, job), as_thread(1, job), hub=hub)
    with (
        writers,
        unusable_after(site),
        beside(generator) as requests,
        pytest.raises(AuditError) as failure,
    ):
        take(site, job, hub)
    with pytest.raises(
        EngineError, match="must not be used any more: its weights may be old or half-written"
    ):
        generator.run(outcome_of(requests[0]))
    assert str(failure.value).splitlines()[1:] == [
        f"{faulty_transports.FLIPPED} on generator rank 1 is not what trainer rank 1 sent"
    ]


CHANGES = {  # TP rank 1's tensor, how, at which byte, weights.audit
    "a parameter between updates": (faulty_transports.FLIPPED, FLIP, 5, "strict"),
    "rows that pad the vocabulary": ("lm_head.weight", FLIP, 256 * 64 * 4 - 5, "strict"),
    "a rotary cache": (ROTARY, FLIP, 70, "on"),
    "a rotary cache, replaced by another": (ROTARY, REPLACE, 70, "on"),
}


@pytest.mark.parametrize("name, action, offset, audit", CHANGES.values(), ids=CHANGES)
def test_update_names_memory_that_something_else_wrote(site, hub, name, action, offset, audit):
    """Between two updates, while the engine serves."""
    generator = site.generator
    first = site.job(hub, audit="on")
    now = Event()
    now.set()
    with threads(*(as_thread(rank, first) for rank in range(2)), hub=hub):
        take(site, first, hub)
    poke(generator, site.folder, name, 1, action, offset)
    with contextlib.closing(Hub("generator.0", site.key)) as again:
        job = site.job(again, versions=(1,), audit=audit)
        ranks = threads(*(as_thread(rank, job, now) for rank in range(2)), hub=again)
        with ranks, unusable_after(site), pytest.raises(AuditError) as failure:
            take(site, job, again)
    message = (
        f"{name} on generator rank 1 of engine {generator.client.url} has changed since the "
        "audit of version 0"
    )
    assert str(failure.value).splitlines()[1:] == [message]
    site.reopen()
    poke(generator, site.folder, name, 1, action, offset)  # flips the bit back; nothing else would


def test_trainer_and_generator_with_different_maps(site, hub):
    job = site.job(hub)
    pipelined_job = site.job(hub, trainer={"pp": 2})
    with (
        threads(as_thread(0, job), as_thread(1, job), hub=hub),
        pytest.raises(RuntimeError) as failure,
    ):
        take(site, pipelined_job, hub)
    generator_hash, trainer_hash = (
        weights_map(side.plan(), source_layout(side)).plan_hash for side in (pipelined_job, job)
    )
    assert (
        f"trainer.0 computed {trainer_hash}, trainer.1 computed {trainer_hash}; "
        f"generator.0 computed {generator_hash}" in str(failure.value)
    )
    assert site.generator.score([PROMPT]) == site.started_with  # the engine is unchanged


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"dtype": "bfloat16"},
            "generator rank 1, model.layers.0.self_attn.qkv_proj.weight: .*float32.*in the layout "
            ".*bfloat16",
        ),
        ({"model": "qwen2"}, "generator rank 0 has no model.layers.0.self_attn.qkv_proj.bias"),
        (
            {"tp": 1},
            "engine http://127.0.0.1:.* runs with tp=2, ep=1, dp_attention=1, the reshard map is "
            "for tp=1, ep=1, dp_attention=1",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_engine_that_is_not_the_one_of_the_map(site, hub, changes, message, tmp_path):
    if "model" in changes:
        changes = {
            "model": str(
                make_checkpoint(
                    tmp_path / "other", 1, getattr(torch, DTYPE), False, changes["model"]
                )
            )
        }
    site.generator.map_memory(site.key_file)
    before = site.generator.memory()
    job = site.job(hub, **changes)
    with (
        threads(as_thread(0, job), as_thread(1, job), hub=hub),
        unusable_after(site),
        pytest.raises(LayoutError, match=message),
    ):
        take(site, job, hub)
    assert unequal(site.generator.memory(), before) == []


def test_a_trainer_rank_whose_weights_are_not_those_of_the_map(site, hub):
    layout = source_layout(site.job(hub))
    weights = {tensor.name: torch.zeros(tensor.shape) for tensor in layout.tensors(1)}
    check_parameters(weights, layout, 1)
    for name, wrong in (
        ("decoder.layers.1.mlp.linear_fc2.weight", torch.zeros(64, 192)),
        ("output_layer.weight", None),
    ):
        changed = (
            {**weights, name: wrong}
            if wrong is not None
            else {key: value for key, value in weights.items() if key != name}
        )
        with pytest.raises(
            LayoutError,
            match=rf"trainer rank 1, {re.escape(name)}: shape, dtype .*, in the layout \(",
        ):
            check_parameters(changed, layout, 1)


@pytest.mark.parametrize("kind", REST_IN_MATRIX)
def test_a_trainer_rank_dies_in_mid_transfer(site, hub, kind):
    job = site.job(hub, HOOKED[kind], weights_s=WRITE_S)
    message = {
        GLOO: r"(?s)generator rank \d failed at Receive.*weights from trainer rank 1 to generator "
        r"rank \d, "
    }
    expected = message.get(kind, "generator.0 waited 8 s for trainer.1 to write weights version 0")
    dying = as_process(1, job, "die")
    # this rank has started: the other rank's offer waits for its offer at most WRITE_S
    assert hub.wait(DEADLINE_S)
    with (
        threads(as_thread(0, job), hub=hub),
        unusable_after(site),
        pytest.raises((RuntimeError, TimeoutError), match=expected),
    ):
        take(site, job, hub)
    assert dying.wait(10) == -signal.SIGKILL


def test_a_rank_that_has_written_another_version(site, hub):
    job = site.job(hub)
    peers = [Peer(f"trainer.{rank}", site.key, hub.address) for rank in range(2)]
    for peer in peers:
        peer.send(Hello(weights_map(job.plan(), source_layout(job)).plan_hash, this_host()))
        peer.send(WeightsOffer(0))
        peer.send(WeightsWritten(1, 0, 0.0))
    message = (
        r"generator.0 waited for trainer.0, trainer.1 to write weights version 0, but "
        r"trainer.\d has written version 1"
    )
    with unusable_after(site), pytest.raises(RuntimeError, match=message):
        take(site, job, hub)
    for peer in peers:
        peer.close()


def test_a_grant_and_an_end_of_another_version(site, hub):
    job = site.job(hub)
    outcome = as_thread(0, job)
    hub.receive(WeightsOffer, DEADLINE_S, "the offer")
    hub.send("trainer.0", WeightsGrant(3))
    with pytest.raises(
        RuntimeError, match="trainer.0 offered weights version 0, generator.0 granted version 3"
    ):
        outcome.result(DEADLINE_S)


def test_an_update_that_is_confirmed_as_a_newer_one(site, hub, monkeypatch):
    """In the generator's message about the version that the engines serve."""
    job = site.job(hub)
    send = hub._send
    newer = encode(WeightsApplied(1, True, 0.0, 0))
    monkeypatch.setattr(
        hub,
        "_send",
        lambda peer, body: send(peer, newer if isinstance(decode(body), WeightsApplied) else body),
    )
    outcomes = [as_thread(rank, job) for rank in range(2)]
    take(site, job, hub)
    for outcome in outcomes:
        with pytest.raises(
            RuntimeError, match="weights version 0 was written last, generator.0 applied version 1"
        ):
            outcome.result(DEADLINE_S)


def test_an_engine_that_goes_by_another_version_after_the_update(site, hub, monkeypatch):
    client = site.generator.client
    job = site.job(hub)
    set_version = client.set_version
    monkeypatch.setattr(
        client, "set_version", lambda version, timeout_s: set_version(version + 4, timeout_s)
    )
    with (
        threads(as_thread(0, job), as_thread(1, job), hub=hub),
        unusable_after(site),
        pytest.raises(VersionError) as failure,
    ):
        take(site, job, hub)
    assert f"engine {client.url} holds weights version 4, not 0" in str(failure.value)


def test_an_engine_that_no_longer_holds_what_it_was_given(site, hub):
    """Such as a restarted engine (see below).

    With shared memory its old memory would still be writable, as long as a trainer rank has it
    mapped.
    """
    job = site.job(hub, versions=(0, 1))
    client = site.generator.client
    go = Event()
    ends = receiver(job.plan(SHARED_MEMORY), hub, job.key_file)
    with threads(*(as_thread(rank, job, go) for rank in range(2)), hub=hub):
        site.generator.take(ends)
        go.set()
        site.generator.run(client.set_version(-1, DEADLINE_S))
        with pytest.raises(
            VersionError,
            match="holds weights version -1, not 0: was it restarted since the last update?",
        ):
            site.generator.take(ends)
        with pytest.raises(EngineError, match="must not be used any more"):
            site.generator.score([PROMPT])


def test_engine_with_foreign_writes_ends_and_comes_back(site, hub, monkeypatch):
    """In a run that can continue without a lost engine, the update ends without it.

    After its restart it gets the next update before it serves.
    """
    generator = site.generator
    client = site.generator.client
    new = site.other
    go = Event()
    generator.fleet = Fleet([client], elastic=True)
    processes = generator.engine.processes()
    end_update = client.end_update

    async def kill_before(timeout_s: float) -> None:
        """Really kills the engine's worker, and then makes the real call."""
        kill_worker(processes)
        await end_update(timeout_s)

    monkeypatch.setattr(client, "end_update", kill_before)
    job = site.job(hub, SHARED_MEMORY, versions=(0, 1), model=str(new))
    ends = receiver(job.plan(SHARED_MEMORY), hub, job.key_file)
    with threads(*(as_thread(rank, job, go) for rank in range(2)), hub=hub):
        with beside(generator) as requests:
            generator.take(ends)
        with pytest.raises(EngineUnreachable):
            generator.run(outcome_of(requests[0]))  # the fleet would finish it elsewhere
        assert not generator.fleet.serving and generator.fleet.down == generator.fleet.engines
        assert psutil.wait_procs(processes, timeout=15)[1] == []
        monkeypatch.undo()
        site.start()
        assert generator.run(client.version(DEADLINE_S)) == -1
        generator.fleet.come_back(generator.fleet.engines[0])
        go.set()
        generator.take(ends)
    assert (
        generator.fleet.serving == generator.fleet.engines
        and generator.run(client.version(DEADLINE_S)) == 1
    )
    generator.map_memory(site.key_file)
    written = generator.memory()
    scored = generator.score([PROMPT])
    generator.scramble()
    generator.load(new)
    assert (
        unequal(written, generator.memory()) == []
        and generator.score([PROMPT]) == scored != site.started_with
    )


def test_engine_with_a_broken_connection_serves_again(site, hub):
    """It is updated although it never ended."""
    generator = site.generator
    client = site.generator.client
    go = Event()
    generator.fleet = Fleet([client], elastic=True)
    job = site.job(hub, versions=(0, 1), model=str(site.other))
    ends = receiver(job.plan(SHARED_MEMORY), hub, job.key_file)
    with threads(*(as_thread(rank, job, go) for rank in range(2)), hub=hub):
        generator.take(ends)
        generator.fleet.lose(EngineUnreachable(client.url, "reset by peer"))
        assert (
            generator.fleet.engines[0].is_intact
            and generator.run(client.answers())
            and not generator.run(client.fresh())
        )
        generator.fleet.come_back(generator.fleet.engines[0])
        go.set()
        generator.take(ends)
    assert (
        generator.fleet.serving == generator.fleet.engines
        and generator.run(client.version(DEADLINE_S)) == 1
    )
    scored = generator.score([PROMPT])
    generator.load(site.other)
    assert generator.score([PROMPT]) == scored != site.started_with


@pytest.mark.parametrize("kind", REST_IN_MATRIX)
def test_an_engine_worker_dies_in_mid_transfer(site, hub, kind, monkeypatch):
    """The engine ends with it.

    (tests/unit/test_transports_dead_owner.py has a worker that dies before the connection.)
    """
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
    # writers continue without it, and report it unless the generator notices first
    url = site.generator.client.url
    lost = (
        f"engine {url}/update_weights_from_tensor is not reachable|trainer.1 could not write "
        f"to engine {url}"
    )
    writers = threads(as_thread(0, job), as_thread(1, job), hub=hub)
    with writers, unusable_after(site, paused=False), pytest.raises(RuntimeError, match=lost):
        take(site, job, hub)
    assert psutil.wait_procs(processes, timeout=15)[1] == []
