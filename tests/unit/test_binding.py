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


def test_worker_keeps_to_its_allowed_cores(monkeypatch):
    before = os.sched_getaffinity(0)
    last_core = max(before)
    try:
        monkeypatch.setenv(worker.CORES, f"{last_core},9999")
        worker.keep_to_cores()
        assert os.sched_getaffinity(0) == {last_core}
        os.sched_setaffinity(0, before)
        monkeypatch.setenv(worker.CORES, "9999")
        worker.keep_to_cores()
        assert os.sched_getaffinity(0) == before, "cores outside of the job's are no reason to fail"
    finally:
        os.sched_setaffinity(0, before)


SHOWN = [(str(index), f"GPU-{index}aaa", f"00000000:{index}B:00.0") for index in range(4)]


@pytest.mark.parametrize(
    "setting, names, addresses",
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
def test_launch_uses_its_visible_gpus(setting, names, addresses):
    gpus = visible(SHOWN, setting)
    assert [gpu.name for gpu in gpus] == names
    assert [gpu.address for gpu in gpus] == addresses


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


def of_torch(monkeypatch, setting: str) -> list[int] | list[str]:
    """The devices of PyTorch's own parser: places in SHOWN, or names of MIG instances."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    devices = torch.cuda._parse_visible_devices()
    if not devices or isinstance(devices[0], int):
        return list(itertools.takewhile(lambda place: place < len(SHOWN), devices))
    if devices[0].startswith("MIG-"):
        return devices
    return torch.cuda._transform_uuid_to_ordinals(devices, UUIDS)


def test_visible_devices_are_read_like_by_pytorch(monkeypatch):
    places = {gpu.address: place for place, gpu in enumerate(visible(SHOWN, None))}
    devices = {}
    expected = {}
    lists = itertools.chain.from_iterable(
        itertools.product(ENTRIES, repeat=length) for length in range(4)
    )
    for setting in map(",".join, lists):
        devices[setting] = [
            places[gpu.address] if gpu.address else gpu.name for gpu in visible(SHOWN, setting)
        ]
        expected[setting] = of_torch(monkeypatch, setting)
    assert devices == expected
    assert devices["0, 2,1gpu2"] == [0, 2, 1]
    assert devices["0,4,0"] == []


@pytest.mark.parametrize("status, shown", [(0, "0, GPU-1, 00000000:1B:00.0\n"), (9, "")])
def test_broken_driver_shows_no_gpu(status, shown, tmp_path, monkeypatch):
    """Then the tool writes its error to standard output."""
    tool = tmp_path / "nvidia-smi"
    output = (
        shown or "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    )
    tool.write_text(f'#!/bin/sh\necho "{output.strip()}"\nexit {status}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert nvidia_smi("--query-gpu=index") == shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch can use the GPUs of this node")
@pytest.mark.parametrize(
    ("shown", "planned_for", "refused"), [(8, "H100", True), (8, "cpu", False), (0, "H100", False)]
)
def test_gpus_that_pytorch_cannot_use_are_refused(
    monkeypatch, tmp_path, shown, planned_for, refused
):
    """Such as with the torch of `make setup`, or an old driver: otherwise the trainer would
    silently train on the CPU.
    """
    lines = "\n".join(f"{index}, GPU-{index}aaa, 00000000:{index}B:00.0" for index in range(shown))
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = Path(__file__).parents[2] / "configs/8b_aipo.yaml"
    plan = resolve(load_config(path, [f"cluster.gpu={planned_for}"]), "plan")
    problem = "this node has 8 GPUs, but torch .* cannot use them .*; with cluster.gpu=cpu it would"
    gpus.cache_clear()
    try:
        if not refused:
            return worker_roles.check_gpus(plan)
        with pytest.raises(RuntimeError, match=problem):
            worker_roles.check_gpus(plan)
    finally:
        gpus.cache_clear()
