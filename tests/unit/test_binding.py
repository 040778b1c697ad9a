"""GPUs as listed by the driver, and the cores near them, read from the kernel's files."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

from megarl.config.load import load_config
from megarl.launch import worker, worker_roles
from megarl.launch.gpus import cores_near, gpus, nvidia_smi, parse_cpulist, sysfs_address, visible
from megarl.plan.resolve import resolve


@pytest.mark.parametrize(
    "text, cores", [("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)), ("5\n", (5,)), ("\n", ())]
)
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


SHOWN = [(str(index), f"GPU-{index}aaa", f"00000000:{index}B:00.0") for index in range(4)]


@pytest.mark.parametrize(
    "wanted, names, addresses",
    [
        (
            None,
            ["0", "1", "2", "3"],
            ["0000:0b:00.0", "0000:1b:00.0", "0000:2b:00.0", "0000:3b:00.0"],
        ),
        ("2,3", ["2", "3"], ["0000:2b:00.0", "0000:3b:00.0"]),
        ("GPU-3a,GPU-1aaa", ["GPU-3a", "GPU-1aaa"], ["0000:3b:00.0", "0000:1b:00.0"]),
        ("1,-1,2", ["1"], ["0000:1b:00.0"]),
        ("MIG-77", ["MIG-77"], [""]),
        ("", [], []),
    ],
)
def test_a_launch_uses_the_gpus_that_it_was_given(wanted, names, addresses):
    found = visible(SHOWN, wanted)
    assert [gpu.name for gpu in found] == names and [gpu.address for gpu in found] == addresses


UUIDS = [uuid for _, uuid, _ in SHOWN]
ENTRIES = [
    "0",
    "2",
    " 2",
    "2 ",
    "+1",
    "1gpu2",
    "4",
    "-0",
    "-1",
    "",
    " ",
    "x",
    "GPU-2",
    "GPU-",
    "GPU-9",
    " GPU-2",
    "MIG-7",
    "MIG-8",
]


def of_torch(monkeypatch, wanted: str) -> list[int] | list[str]:
    """The devices of PyTorch's own parser: places in SHOWN, or names of MIG instances."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    devices = torch.cuda._parse_visible_devices()
    if devices and isinstance(devices[0], str):
        return (
            devices
            if devices[0].startswith("MIG-")
            else torch.cuda._transform_uuid_to_ordinals(devices, UUIDS)
        )
    return list(itertools.takewhile(lambda place: place < len(SHOWN), devices))


def test_visible_devices_are_read_as_pytorch_reads_them(monkeypatch):
    found = {}
    expected = {}
    lists = itertools.chain.from_iterable(
        itertools.product(ENTRIES, repeat=length) for length in range(4)
    )
    for wanted in map(",".join, lists):
        places = {
            address: place
            for place, address in enumerate(gpu.address for gpu in visible(SHOWN, None))
        }
        found[wanted] = [
            places[gpu.address] if gpu.address else gpu.name for gpu in visible(SHOWN, wanted)
        ]
        expected[wanted] = of_torch(monkeypatch, wanted)
    assert found == expected
    assert found["0, 2,1gpu2"] == [0, 2, 1]
    assert found["0,4,0"] == []


@pytest.mark.parametrize("status, shown", [(0, "0, GPU-1, 00000000:1B:00.0\n"), (9, "")])
def test_a_driver_that_cannot_be_asked_shows_no_gpu(status, shown, tmp_path, monkeypatch):
    """Then the tool writes its error to standard output."""
    tool = tmp_path / "nvidia-smi"
    said = shown or "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    tool.write_text(f'#!/bin/sh\necho "{said.strip()}"\nexit {status}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert nvidia_smi("--query-gpu=index") == shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch can use the GPUs of this node")
@pytest.mark.parametrize(
    ("shown", "planned_for", "refused"), [(8, "H100", True), (8, "cpu", False), (0, "H100", False)]
)
def test_gpus_that_pytorch_cannot_use_are_not_passed_over(
    monkeypatch, tmp_path, shown, planned_for, refused
):
    """Such as with the torch of `make setup`, or an old driver: otherwise the trainer would
    silently train on the CPU.
    """
    lines = "\n".join(
        ", ".join((str(index), f"GPU-{index}aaa", f"00000000:{index}B:00.0"))
        for index in range(shown)
    )
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan = resolve(
        load_config(
            Path(__file__).parents[2] / "configs/8b_aipo.yaml", [f"cluster.gpu={planned_for}"]
        ),
        "plan",
    )
    gpus.cache_clear()
    try:
        if not refused:
            return worker_roles.check_gpus(plan)
        with pytest.raises(
            RuntimeError,
            match="this node has 8 GPUs, but torch .* cannot use them .*; with cluster.gpu=cpu it would",
        ):
            worker_roles.check_gpus(plan)
    finally:
        gpus.cache_clear()
