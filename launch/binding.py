"""Which cores a rank should use: those of its GPU's NUMA node, so that memory it pins lies next to the GPU and to its NIC."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")


@functools.cache
def gpu_addresses() -> tuple[str, ...]:
    """PCI address of every GPU in the driver's order, such as 0000:1b:00.0. Asked without torch."""
    return tuple(sysfs_address(line) for line in nvidia_smi("--query-gpu=pci.bus_id", "--format=csv,noheader").split())


def nvidia_smi(*arguments: str) -> str:
    """What the driver's tool prints; nothing on a machine without it."""
    if shutil.which("nvidia-smi") is None:
        return ""
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60).stdout


def sysfs_address(bus_id: str) -> str:
    """The driver writes the domain with eight digits, the kernel with four, in small letters."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def cores_near(address: str, devices: Path = PCI_DEVICES) -> tuple[int, ...]:
    """Cores of the NUMA node that the PCI device hangs on; () where the kernel does not know."""
    path = devices / address / "local_cpulist"
    return parse_cpulist(path.read_text()) if path.exists() else ()


def parse_cpulist(text: str) -> tuple[int, ...]:
    """The kernel's way to write a set of cores: 0-3,8,10-11"""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)
