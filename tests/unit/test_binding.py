"""Cores near a GPU, read from the kernel's files."""

from __future__ import annotations

import os

import pytest

from megarl.launch import worker
from megarl.launch.binding import cores_near, parse_cpulist, sysfs_address


@pytest.mark.parametrize("text, cores", [("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)), ("5\n", (5,)), ("\n", ())])
def test_lists_of_cores(text, cores):
    assert parse_cpulist(text) == cores


def test_cores_of_the_gpus_numa_node(tmp_path):
    device = tmp_path / sysfs_address("00000000:1B:00.0")
    device.mkdir()
    (device / "local_cpulist").write_text("0-1\n")
    assert device.name == "0000:1b:00.0"
    assert cores_near("0000:1b:00.0", tmp_path) == (0, 1)
    assert cores_near("0000:ff:00.0", tmp_path) == ()


def test_a_worker_keeps_to_the_cores_it_is_allowed(monkeypatch):
    before = os.sched_getaffinity(0)
    chosen = max(before)
    try:
        monkeypatch.setenv(worker.CORES, f"{chosen},9999")
        worker.keep_to_cores()
        assert os.sched_getaffinity(0) == {chosen}
        os.sched_setaffinity(0, before)
        monkeypatch.setenv(worker.CORES, "9999")
        worker.keep_to_cores()
        assert os.sched_getaffinity(0) == before, "cores outside of the job's are no reason to fail"
    finally:
        os.sched_setaffinity(0, before)
