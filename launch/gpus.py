"""The GPUs of this machine, as the driver shows them, and the cores near them.

It needs only the standard library, since an installation (doctor.py) uses it before anything is
installed.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_SMI_S = 60.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
MIG = "MIG-"  # how the name of a MIG instance begins


@dataclass(frozen=True)
class InstalledGpu:
    name: str  # as in CUDA_VISIBLE_DEVICES: an index or a UUID
    address: str  # PCI address, such as 0000:1b:00.0; empty if unknown


@functools.cache
def gpus() -> tuple[InstalledGpu, ...]:
    """The GPUs that this launch may use, in CUDA's order. Does not need torch."""
    shown = nvidia_smi("--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
    return visible(
        [tuple(line.split(", ")) for line in shown.splitlines()], os.environ.get(VISIBLE)
    )


def visible(
    shown: Sequence[tuple[str, ...]], visible_devices: str | None
) -> tuple[InstalledGpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES=`visible_devices` admits, from the driver's list of
    (index, UUID, bus id). None: it is not set.

    Follows torch/cuda/__init__.py, `_parse_visible_devices` and `_transform_uuid_to_ordinals`. All
    entries are of one kind, which the first one decides: numbers, prefixes of UUIDs, or MIG
    instances. The first entry of another kind ends the list. A repeated one then empties it,
    wherever it stands; only after that the first entry without a GPU ends the list.
    """
    if visible_devices is None:
        return tuple(InstalledGpu(index, sysfs_address(bus)) for index, _, bus in shown)
    kind = next((prefix for prefix in ("GPU-", MIG) if visible_devices.startswith(prefix)), "")
    entries = visible_devices.split(",")
    if not kind:
        entries = list(map(_leading_number, entries))
    names = list(itertools.takewhile(lambda name: name and name.startswith(kind), entries))
    if len(set(names)) < len(names):
        return ()
    if kind == MIG:  # not in the driver's list, and so without an address
        return tuple(InstalledGpu(name, "") for name in names)
    buses: list[str] = []
    for name in names:
        if kind:
            matches = [bus for _, uuid, bus in shown if uuid.startswith(name)]
        else:
            matches = [bus for index, _, bus in shown if index == name]
        if len(matches) != 1:
            break
        buses += matches
    if len(set(buses)) < len(buses):
        return ()
    return tuple(InstalledGpu(name, sysfs_address(bus)) for name, bus in zip(names, buses))


def memory_gib() -> dict[str, float]:
    """GiB of each GPU that this launch may use, by its name. A MIG instance has the memory that its
    profile names, such as 3g.40gb. A GPU whose memory the driver does not tell is left out.
    """
    listed = nvidia_smi("--query-gpu=pci.bus_id,memory.total", "--format=csv,noheader,nounits")
    of_gpus = {
        sysfs_address(bus): int(mib) / 1024
        for bus, mib in (line.split(", ") for line in listed.splitlines())
    }
    of_instances = {
        uuid: float(gb)
        for gb, uuid in re.findall(r"MIG .*?(\d+)gb.*\(UUID: (MIG-[^)]+)\)", nvidia_smi("-L"))
    }
    sizes = {gpu.name: of_gpus.get(gpu.address, of_instances.get(gpu.name)) for gpu in gpus()}
    return {name: gib for name, gib in sizes.items() if gib is not None}


def _leading_number(entry: str) -> str:
    """The number that an entry begins with, as C's strtoul reads it; empty if there is none, or if
    it is negative.
    """
    number = re.match(r"[+-]?\d+", entry.strip())
    if number and int(number[0]) >= 0:
        return str(int(number[0]))
    return ""


def run_program(timeout_s: float, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, timeout=timeout_s, encoding="utf-8", errors="replace"
    )


def nvidia_smi(*arguments: str) -> str:
    """The output of nvidia-smi; empty if it is missing, or if there is no driver or GPU.

    Raises TimeoutError.
    """
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        process = run_program(NVIDIA_SMI_S, "nvidia-smi", *arguments)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(
            f"nvidia-smi gave no answer within {NVIDIA_SMI_S:.0f} s: is a GPU of this node broken?"
        ) from error
    if process.returncode == 0:
        return process.stdout
    return ""


def sysfs_address(bus_id: str) -> str:
    """Converts a bus id from the driver's form (domain of eight digits) to the kernel's (four
    digits, lower case).
    """
    domain, _, device = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{device}"


def cores_near(address: str, devices: Path = PCI_DEVICES) -> tuple[int, ...]:
    """The cores of the NUMA node of a PCI device.

    Memory that a rank pins there is near its GPU and NIC. () if the kernel does not know them.
    """
    path = devices / address / "local_cpulist"
    if path.exists():
        return parse_cpulist(path.read_text(encoding="utf-8"))
    return ()


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Parses the kernel's notation for a set of cores: 0-3,8,10-11"""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)
