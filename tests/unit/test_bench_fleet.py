"""megarl bench fleet, small, in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megarl import cli

KEYS = ("trainer_ranks", "generator_ranks", "update_cpu_s", "paused_cpu_s", "opening_cpu_s", "opening_bytes", "longest_block_s")


@pytest.mark.long
def test_a_small_fleet_is_updated_loses_an_engine_and_misses_a_trainer_rank():
    argv = [sys.executable, "-m", "megarl", "bench", "fleet", "16+16", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=True)
    (row,) = json.loads(done.stdout)["sizes"]
    assert list(row)[: len(KEYS)] == list(KEYS) and (row["trainer_ranks"], row["generator_ranks"]) == (16, 16)
    assert 0 < row["paused_cpu_s"] <= row["update_cpu_s"] and 0 < row["update_bytes"] < row["opening_bytes"]


@pytest.mark.parametrize("size", ["512", "12+64", "512+", "512+0", "a+b"])
def test_sizes_that_cannot_be_are_refused(size, capsys):
    assert cli.main(["bench", "fleet", size]) == 2
    assert f"{size}: must be TRAINERS+WORKERS, two multiples of 8" in capsys.readouterr().err
