"""python tests/benchmarks fleet in small.

Here the light members are threads, which saves the imports of two processes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import fleet_updates
import pytest

from megarl.config.errors import ConfigError

KEYS = (
    "trainer_ranks",
    "generator_ranks",
    "update_cpu_s",
    "paused_cpu_s",
    "opening_cpu_s",
    "opening_bytes",
    "longest_block_s",
)


@contextlib.contextmanager
def threads(*arguments: Any) -> Iterator[list[Connection]]:
    connections = []
    players = []
    for number in range(fleet_updates.CLIENTS):
        connection, player_end = Pipe()
        player = threading.Thread(target=fleet_updates._play, args=(player_end, number, *arguments))
        player.start()
        connection.recv()
        connections.append(connection)
        players.append(player)
    yield connections
    for player, connection in zip(players, connections):
        connection.close()
        player.join(60)


def test_bench_fleet_updates_and_loses_an_engine(monkeypatch, capsys):
    """And it misses a trainer rank."""
    monkeypatch.setattr(fleet_updates, "_members", threads)
    monkeypatch.setattr(fleet_updates, "STOPPED_S", 0.5)
    row = fleet_updates.measure(16, 16, replace(fleet_updates.LLAMA_405B, num_layers=4))
    assert list(row)[: len(KEYS)] == list(KEYS)
    assert (row["trainer_ranks"], row["generator_ranks"]) == (16, 16)
    assert "engine 0 is lost, 1 are left" in capsys.readouterr().out
    assert 0 < row["paused_cpu_s"] <= row["update_cpu_s"]
    assert 0 < row["update_bytes"] < row["opening_bytes"]
    assert "16 + 16" in fleet_updates.render([row, row])


@pytest.mark.parametrize("size", ["512", "12+64", "512+", "512+0", "a+b", "8+8", "16+8", "8+16"])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ConfigError) as refusal:
        fleet_updates.parse_size(size)
    assert str(refusal.value).endswith(
        f"{size}: must be TRAINERS+WORKERS, two multiples of 8, as in 512+64; at least 16 workers, "
        "and no more of them than trainer ranks"
    )


@pytest.mark.parametrize(
    ("trainers", "stages"), [(16, 2), (32, 2), (96, 6), (112, 14), (704, 2), (1000, 1), (4096, 16)]
)
def test_stages_of_any_size_share_the_layers(trainers, stages, tmp_path):
    topology = fleet_updates.plan_of(
        trainers, 16, fleet_updates.LLAMA_405B, str(tmp_path)
    ).trainer_topology
    assert (topology.pp, topology.pp * topology.tp * topology.dp) == (stages, trainers)
    assert fleet_updates.source_of(
        fleet_updates.plan_of(trainers, 16, fleet_updates.LLAMA_405B, str(tmp_path))
    )
