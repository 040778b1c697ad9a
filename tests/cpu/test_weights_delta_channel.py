"""Deltas through the whole weights channel into a live engine, with the default strict audit.

Tests check when changes are sent and when everything is, and that a delta which breaks off is
detected.

There is one engine at TP2. Trainer ranks are the real sending ends with held weights, as in
test_weights_faults.py, which shares the fixtures.
"""

from __future__ import annotations

import contextlib
import re
import signal
from concurrent.futures import Future
from threading import Event
from typing import Any

import faulty_transports
import psutil
import pytest
import torch
from fault_site import TRAINER, Site, kill_worker, threads, unusable_after
from faulty_transports import HOOKED
from held_weights import as_process, as_thread
from test_weights_faults import KINDS, REST_IN_LONG, WRITE_S, hub, site, whole_site  # noqa: F401  fixtures
from weights_rig import noted_grants, receiver, unequal
from weights_worker import DEADLINE_S, Job

from megarl.generator.client import EngineUnreachable
from megarl.generator.fleet import Fleet
from megarl.messaging.link import Hub
from megarl.weight_sync.audit import AuditError
from megarl.weight_sync.commands import Recall
from megarl.weight_sync.transports.base import GLOO, SHARED_MEMORY

SHARE = 0.02  # this share of the elements changes between versions (weights_worker.Job.changing)


@pytest.fixture
def granted(hub) -> list[str]:
    return noted_grants(hub)


@pytest.fixture(autouse=True)
def forgotten(site: Site) -> None:
    """Makes the engine's workers forget what the previous test left, since `site` has overwritten
    it.
    """
    site.generator.in_update(site.key_file, lambda workers: workers.run_all(Recall()))


def begin(site: Site, hub, kind: str, versions: int, **changes: Any):
    job = site.job(
        hub, kind, versions=tuple(range(versions)), audit="strict", changing=SHARE, **changes
    )
    return receiver(job.plan(kind), hub, job.key_file), ranks_of(job)


def ranks_of(job: Job) -> list[Future]:
    go = Event()
    go.set()
    return [as_thread(rank, job, go) for rank in range(job.plan().trainer_topology.world_size)]


@pytest.mark.parametrize("trainer", [TRAINER, {"tp": 4}], ids=["TP2", "TP4"])  # on 2 kv heads
@pytest.mark.parametrize("kind", REST_IN_LONG)
def test_the_memory_is_that_of_full_updates(site, hub, granted, kind, trainer):
    ends, ranks = begin(site, hub, kind, 5, trainer=trainer)
    with threads(*ranks, hub=hub):
        for _ in range(5):
            site.generator.take(ends)
    for rank in ranks:
        rank.result(DEADLINE_S)
    assert granted == ["F", "d", "d", "d", "d"]
    site.generator.map_memory(site.key_file)
    by_delta = site.generator.memory()
    site.generator.scramble()
    with contextlib.closing(Hub("generator.0", site.key)) as full_hub:
        settings = {"changing": SHARE, "delta": "off", "trainer": trainer}
        last = site.job(full_hub, SHARED_MEMORY, versions=(0, 4), **settings)
        full = receiver(last.plan(), full_hub, last.key_file)
        site.generator.set_version(-1)
        with threads(*ranks_of(last), hub=full_hub):
            site.generator.take(full)
            site.generator.scramble()
            site.generator.take(full)
    assert unequal(by_delta, site.generator.memory()) == []


def test_resumed_engine_gets_all_weights_and_then_changes(site, hub, granted):
    generator = site.generator
    client = site.generator.client
    generator.fleet = Fleet([client], elastic=True)
    ends, ranks = begin(site, hub, SHARED_MEMORY, 5)
    with threads(*ranks, hub=hub):
        generator.take(ends)
        generator.take(ends)
        generator.fleet.lose(EngineUnreachable(client.url, "reset by peer"))
        generator.fleet.come_back(generator.fleet.engines[0])
        for _ in range(3):
            generator.take(ends)
    assert (
        granted == ["F", "d", "F", "d", "d"] and generator.fleet.serving == generator.fleet.engines
    )


@pytest.mark.parametrize("kind", REST_IN_LONG)
def test_a_flipped_bit_of_what_has_changed(site, hub, granted, kind, monkeypatch):
    ends, ranks = begin(site, hub, HOOKED[kind], 2)
    with threads(*ranks, hub=hub):
        site.generator.take(ends)
        monkeypatch.setattr(faulty_transports, "before_write", faulty_transports.flip_one_bit)
        with (
            unusable_after(site),
            pytest.raises(
                AuditError,
                match=re.escape(faulty_transports.FLIPPED) + " on generator rank 1 is not what",
            ),
        ):
            site.generator.take(ends)
    assert granted == ["F", "d"]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_rank_dies_in_the_middle_of_a_delta(site, hub, granted, kind):
    """A half-written engine does not generate: it stays paused, and requests are refused."""
    settings = dict(versions=(0, 1), audit="strict", changing=SHARE, weights_s=WRITE_S)
    job = site.job(hub, HOOKED[kind], **settings)
    ends = receiver(job.plan(job.syncs[0].transport), hub, job.key_file)
    go = Event()
    go.set()
    dying = as_process(1, job, "die_in_a_delta")
    assert hub.wait(DEADLINE_S)
    expected = (
        r"weights from trainer rank 1"
        if kind == GLOO
        else "waited 8 s for trainer.1 to write weights version 1"
    )
    with threads(as_thread(0, job, go), hub=hub):
        site.generator.take(ends)
        with unusable_after(site), pytest.raises((RuntimeError, TimeoutError), match=expected):
            site.generator.take(ends)
    assert dying.wait(10) == -signal.SIGKILL and granted == ["F", "d"]


def test_an_engine_worker_dies_in_the_middle_of_a_delta(site, hub, granted, monkeypatch):
    processes = site.generator.engine.processes()
    ends, ranks = begin(site, hub, HOOKED[SHARED_MEMORY], 2, weights_s=30.0)

    def kill(rank: int, writes: int, copy: Any, values: torch.Tensor) -> torch.Tensor:
        if rank == 0 and granted[-1] == "d":
            kill_worker(processes)
        return values

    with threads(*ranks, hub=hub):
        site.generator.take(ends)
        monkeypatch.setattr(faulty_transports, "before_write", kill)
        lost = f"engine {site.generator.client.url}/update_weights_from_tensor is not reachable"
        with unusable_after(site, paused=False), pytest.raises(RuntimeError, match=lost):
            site.generator.take(ends)
    assert psutil.wait_procs(processes, timeout=15)[1] == [] and granted == ["F", "d"]
