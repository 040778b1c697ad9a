"""Several transports in one update, chosen for each pair of ranks, and relays inside a host: bytes,
audits, and network traffic.

Processes and transports are real; the tests declare each rank's host (pair_processes.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pair_processes import (
    ENGINES,
    TIMEOUT_S,
    TRAINERS,
    EngineWorker,
    PipedEngine,
    TrainerProcess,
    bits,
    plain_map,
    shards,
)
from remote_object import RemoteObject

from megarl.config.errors import ConfigError
from megarl.config.schema import WeightsConfig
from megarl.messaging.host import Host
from megarl.messaging.link import Hub, RunKey
from megarl.reshard.forwarding import RelayRule, SentTensors, relayed
from megarl.weight_sync.audit import AuditError, compare, pack_shares, packed, packed_shares
from megarl.weight_sync.opening import OpenedEngines, open_engines
from megarl.weight_sync.transports import mooncake
from megarl.weight_sync.transports.base import GLOO, MOONCAKE, SHARED_MEMORY
from megarl.weight_sync.updates import WeightUpdate
from megarl.weight_sync.workers import Workers, connect


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[list[RemoteObject], list[RemoteObject]]]:
    trainers = []
    engines = []
    try:
        trainers += [RemoteObject(TrainerProcess, rank) for rank in range(TRAINERS)]
        engines += [RemoteObject(EngineWorker, rank) for rank in range(ENGINES)]
        yield trainers, engines
    finally:
        for process in trainers + engines:
            process.kill()


class PairRun:
    """One set of hosts, and the updates of WeightsReceiver and WeightsSender between them, from the
    first on.
    """

    def __init__(
        self,
        processes,
        folder: Path,
        weights: WeightsConfig,
        trainers: list[Host],
        engines: list[Host],
        map=None,
    ):
        self.map = map or plain_map()
        self.trainers, self.engines = processes
        self.weights = weights
        self.trainer_hosts = trainers
        self.engine_hosts = engines
        self.folder = folder
        key = RunKey.generate()
        key.save(folder / "key")
        self.hub = Hub("generator.0", key)
        self.clients = [PipedEngine(process) for process in self.engines]
        self.workers = Workers(self.clients, [1] * len(self.clients), self.hub, TIMEOUT_S)

    def do(self, coroutine: Any) -> Any:
        try:
            return asyncio.run(coroutine)
        finally:
            for client in self.clients:
                client.settle()

    def open(self) -> OpenedEngines:
        for process, host in zip(self.engines, self.engine_hosts):
            process.call("move_to", host)
        hosts = self.do(connect(self.workers, str(self.folder / "key")))
        assert hosts == self.engine_hosts
        self.opened = self.do(
            open_engines(self.workers, self.weights, self.map, self.trainer_hosts, hosts)
        )
        self.connecting = list(self.trainers)
        for rank, (process, host) in enumerate(zip(self.trainers, self.trainer_hosts)):
            process.start(
                "connect",
                self.weights.transport,
                host,
                self.opened.endpoints_of(rank),
                self.opened.relay,
            )
        return self.opened

    def update(self, seed: int) -> list[Counter[int]]:
        """Makes an update, audits it, and compares it with the model.

        Returns the bytes sent by each trainer rank, by generator rank.
        """
        for process in self.engines:
            process.call("scramble")
        session = WeightUpdate(self.workers, version=0)
        by_rank, shares = zip(*self.write(seed, session))
        self.do(
            session.audit(
                [packed_shares(share) for share in shares], self.opened.tensors, self.opened.relays
            )
        )
        for rank, process in enumerate(self.engines):
            memory = process.call("memory")
            expected = shards(plain_map().destination, rank, seed)
            assert memory.keys() == expected.keys()
            assert [
                name for name in memory if not np.array_equal(memory[name], bits(expected[name]))
            ] == []
        return list(by_rank)

    def write(self, seed: int, session: WeightUpdate) -> list[Any]:
        """Writes an update, and returns each trainer rank's report."""
        for process in self.trainers:
            process.start("write", seed)
        if not self.opened.one_sided:
            self.do(session.receive())
        while self.connecting:
            self.connecting.pop().result()
        sent = [process.result() for process in self.trainers]
        if self.opened.lands:
            self.do(session.spread())
        if self.opened.relays:
            self.do(session.pass_on(self.opened.relays))
        return sent

    def close(self) -> None:
        for process in self.trainers:
            process.call("close")
        self.hub.close()


@contextlib.contextmanager
def run(*arguments: Any) -> Iterator[PairRun]:
    run = PairRun(*arguments)
    try:
        run.open()
        yield run
        run.close()
    finally:
        run.hub.close()


def host(name: str, network: str) -> Host:
    """A host's processes. `network`: the transport to other hosts."""
    return Host(memory=name, network=name, name=name, has=("mooncake",) * (network == MOONCAKE))


def networks() -> list[Any]:
    missing = pytest.mark.skipif(not mooncake.imports(), reason="Mooncake does not import")
    return [GLOO, pytest.param(MOONCAKE, marks=missing)]


@pytest.mark.parametrize("network", networks())
def test_each_pair_has_its_own_transport(processes, tmp_path, network):
    a = host("a", network)
    b = host("b", network)
    with run(processes, tmp_path, WeightsConfig(), [a, b], [a, b, b]) as two_engines:
        assert (
            two_engines.opened.kinds == {SHARED_MEMORY, network} and not two_engines.opened.relays
        )
        for seed in (1, 2):
            by_rank = two_engines.update(seed)
        assert all(
            by_rank[trainer][engine] > 0 for trainer in range(TRAINERS) for engine in range(ENGINES)
        )


@pytest.mark.parametrize("network", networks())
def test_engines_of_one_host_share_one_network_transfer(processes, tmp_path, network):
    a = host("a", network)
    b = host("b", network)
    with run(processes, tmp_path, WeightsConfig(), [a, a], [b, b, b]) as far:
        assert far.opened.kinds == {network, SHARED_MEMORY} and far.opened.relay == RelayRule(
            "inside_hosts", ENGINES
        )
        of_one_engine = sum(
            values.nbytes for values in shards(plain_map().destination, 0, 1).values()
        )
        for seed in (1, 2):
            by_rank = far.update(seed)
            assert sum(sum(sent.values()) for sent in by_rank) == of_one_engine
        # all relays share the load
        assert {relay.source_rank for relay in far.opened.relays} == {0, 1, 2}


@pytest.mark.skipif(not mooncake.imports(), reason="Mooncake does not import")
@pytest.mark.parametrize("network", [GLOO, MOONCAKE])
def test_engines_of_any_hosts_pass_on_to_each_other(processes, tmp_path, network):
    """With Mooncake between hosts and shared memory inside one, however the trainer writes."""
    a = host("a", MOONCAKE)
    b = host("b", MOONCAKE)
    c = host("c", MOONCAKE)
    with run(
        processes, tmp_path, WeightsConfig(transport=network, relay="engines"), [a, a], [b, b, c]
    ) as far:
        assert far.opened.kinds == {
            network,
            MOONCAKE,
            SHARED_MEMORY,
        } and far.opened.relay == RelayRule("between_engines", 1)
        full_bytes = sum(
            write.bytes for rank in range(TRAINERS) for write in plain_map().writes_from(rank)
        )
        for seed in (1, 2):
            by_rank = far.update(seed)
            assert (
                sum(sum(sent.values()) for sent in by_rank)
                + sum(relay.bytes for relay in far.opened.relays)
                == full_bytes
            )
        assert (
            {relay.source_rank for relay in far.opened.relays}
            == {relay.destination_rank for relay in far.opened.relays}
            == {0, 1, 2}
        )


def test_relays_can_be_turned_off(processes, tmp_path):
    a = host("a", GLOO)
    b = host("b", GLOO)
    with run(processes, tmp_path, WeightsConfig(relay="off"), [a, a], [b, b, b]) as far:
        assert not far.opened.relays
        of_one_engine = sum(
            values.nbytes for values in shards(plain_map().destination, 0, 1).values()
        )
        assert sum(sum(sent.values()) for sent in far.update(1)) == ENGINES * of_one_engine


def test_unusable_transport_is_refused_before_anything_opens(processes, tmp_path):
    a = host("a", GLOO)
    b = host("b", GLOO)
    refused = (
        r"weights.transport=shared_memory: trainer rank 0 on a and generator rank 1 on b "
        r"share no memory.*between them work gloo"
    )
    config = WeightsConfig(transport="shared_memory")
    with (
        pytest.raises(ConfigError, match=refused),
        run(processes, tmp_path, config, [a, a], [a, b, b]),
    ):
        pass


def test_a_relay_that_brings_something_else_is_found(processes, tmp_path):
    written, forwarding = relayed(plain_map(), RelayRule("inside_hosts", ENGINES))
    tensors = SentTensors(written, forwarding.relays)
    relay = next(r for r in forwarding.relays if r.tensor == "model.norm.weight")
    places = range(tensors.places[-1])
    shares = [
        pack_shares(np.zeros(len(tensors.sent_by(rank)), np.uint64)) for rank in range(TRAINERS)
    ]
    digests = [
        {name: 0 for rank, name in map(tensors.name, places) if rank == engine}
        for engine in range(ENGINES)
    ]
    compare([packed(digest) for digest in digests], shares, tensors, forwarding.relays)
    digests[relay.destination_rank]["model.norm.weight"] = 8
    wrong = (
        f"model.norm.weight on generator rank {relay.destination_rank} is not what trainer "
        "rank . sent"
    )
    with pytest.raises(
        AuditError, match=f"failed:\n{wrong}, passed on by generator rank {relay.source_rank}$"
    ):
        compare([packed(digest) for digest in digests], shares, tensors, forwarding.relays)
