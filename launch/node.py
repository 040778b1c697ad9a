"""Finds out which node of the run this process is, from srun's or torchrun's environment, if either started it."""

from __future__ import annotations

import fnmatch
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from megarl.config.errors import ConfigError

LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", 9)  # an unassigned address (RFC 5737); looking up the route to it sends nothing


@dataclass(frozen=True)
class Node:
    """One node, with one launcher. `launch` names this launch: the same on all of its nodes, and never used again."""

    rank: int
    count: int
    launch: str

    @property
    def is_head(self) -> bool:
        return self.rank == 0


def this_node(environment: Mapping[str, str] = os.environ) -> Node:
    """The node of this process. Raises ConfigError if several tasks were started on a node: the launcher starts its processes itself."""
    if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
        return _slurm_node(environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        if environment["LOCAL_WORLD_SIZE"] != "1":
            given = f"torchrun --nproc-per-node={environment['LOCAL_WORLD_SIZE']}"
            raise ConfigError(f"{given}: must be 1: megarl starts a node's ranks itself")
        if environment["TORCHELASTIC_RUN_ID"] == "none":
            raise ConfigError("torchrun --rdzv-id=none: must be given, and be new for every launch")
        launch = f"torchrun.{environment['TORCHELASTIC_RUN_ID']}.{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return Node(int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"]), launch)
    return Node(0, 1, "local")


def speaks(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this launcher is the head, which prints for people."""
    rank = environment.get("SLURM_PROCID") if "SLURM_STEP_NUM_TASKS" in environment else environment.get("GROUP_RANK")
    return rank in (None, "0")


def _slurm_node(environment: Mapping[str, str]) -> Node:
    """The node of a Slurm task. In a heterogeneous job's step SLURM_PROCID counts over all components."""
    tasks, nodes = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment["SLURM_STEP_NUM_NODES"])
    if tasks != nodes:
        raise ConfigError(f"srun --ntasks={tasks}: must be one task per node, and there are {nodes} nodes: use --ntasks-per-node=1")
    job = environment.get("SLURM_HET_JOB_ID") or environment["SLURM_JOB_ID"]  # components have job ids of their own
    launch = f"slurm.{job}.{environment.get('SLURM_STEP_ID', '0')}.{environment.get('SLURM_RESTART_COUNT', '0')}"
    return Node(int(environment["SLURM_PROCID"]), tasks, launch)


def address_of(interface: str | None, nodes: int) -> str:
    """The IPv4 address at which the other nodes reach this one: that of `interface` (a pattern such as ib*), or of the default route.

    Raises ConfigError if no interface matches, or the host has no default route.
    """
    if interface is not None:
        return _address_on(interface)
    if nodes == 1:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            return probe.getsockname()[0]
        except OSError:  # no default route
            address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        raise ConfigError(f"launch.interface=null: must be set: {socket.gethostname()} has no default route, and its name means {address}")
    return address


def interface_with(address: str) -> str | None:
    """The network interface that has this IPv4 address."""
    found = psutil.net_if_addrs()
    return next((name for name in sorted(found) for entry in found[name] if entry.address == address), None)


def _address_on(pattern: str) -> str:
    found = psutil.net_if_addrs()
    for name in sorted(found):
        for entry in found[name]:
            if entry.family == socket.AF_INET and fnmatch.fnmatch(name, pattern):
                return entry.address
    there = ", ".join(sorted(found))
    raise ConfigError(f"launch.interface={pattern}: no network interface of {socket.gethostname()} matches; there are {there}")
