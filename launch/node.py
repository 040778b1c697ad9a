"""Finds out which node of the run this process is, from srun's or torchrun's environment, if either started it."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from megarl.config.errors import ConfigError
from megarl.messaging.host import address_towards, is_loopback, loopback, with_port

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # unassigned addresses (RFC 5737, 3849); looking up the route to them sends nothing


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
    """The address at which the other nodes reach this one: that of `interface` (a pattern such as ib*), or of the default route; an IPv6
    address only where there is no other.

    Raises ConfigError if no interface matches, or the host has no default route.
    """
    if interface is not None:
        return _address_on(interface)
    if nodes == 1:
        return loopback()
    for elsewhere in _ELSEWHERE:
        with contextlib.suppress(OSError):  # no default route
            return address_towards(with_port(elsewhere, 9))
    address = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
    if is_loopback(str(address)):
        raise ConfigError(f"launch.interface=null: must be set: {socket.gethostname()} has no default route, and its name means {address}")
    return str(address)


def interface_with(address: str) -> str | None:
    """The network interface that has this address."""
    found = psutil.net_if_addrs()
    return next((name for name in sorted(found) for entry in found[name] if entry.address == address), None)


def _address_on(pattern: str) -> str:
    found = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for name in fnmatch.filter(sorted(found), pattern):
            for entry in found[name]:
                if entry.family == family and "%" not in entry.address:  # an address with a zone means something here only
                    return entry.address
    there = ", ".join(sorted(found))
    raise ConfigError(f"launch.interface={pattern}: no network interface of {socket.gethostname()} matches; there are {there}")
