"""The nodes of a run: which node this process is on, from the environment of srun or torchrun if
either started it, and which process runs on which node and slot.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from megarl.config.errors import ConfigError
from megarl.generator.groups import EngineGroup
from megarl.messaging.host import address_towards, is_loopback, loopback, with_port
from megarl.messaging.rendezvous import ROLLOUTS

# unassigned addresses (RFC 5737, 3849); a look-up of their route sends nothing
_UNASSIGNED_ADDRESSES = ("192.0.2.1", "2001:db8::1")


@dataclass(frozen=True)
class Node:
    """One node, with one launcher.

    `launch` names this launch: the same on all of its nodes, and never used again.
    """

    rank: int
    count: int
    launch: str

    @property
    def is_head(self) -> bool:
        return self.rank == 0


def this_node(environment: Mapping[str, str] = os.environ) -> Node:
    """The node of this process.

    Raises ConfigError if several tasks were started on a node, since the launcher itself starts
    processes.
    """
    if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
        return _slurm_node(environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        if environment["LOCAL_WORLD_SIZE"] != "1":
            raise ConfigError(
                f"torchrun --nproc-per-node={environment['LOCAL_WORLD_SIZE']}: must be 1: megarl "
                "starts a node's ranks itself"
            )
        run_id = environment["TORCHELASTIC_RUN_ID"]
        if run_id == "none":
            raise ConfigError("torchrun --rdzv-id=none: must be given, and be new for every launch")
        launch = f"torchrun.{run_id}.{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return Node(int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"]), launch)
    return Node(0, 1, "local")


def speaks(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this launcher is the head, which prints messages for the user."""
    if "SLURM_STEP_NUM_TASKS" in environment:
        rank = environment.get("SLURM_PROCID")
    else:
        rank = environment.get("GROUP_RANK")
    return rank in (None, "0")


def _slurm_node(environment: Mapping[str, str]) -> Node:
    """The node of a Slurm task.

    In a step of a heterogeneous job, SLURM_PROCID counts over all components.
    """
    tasks = int(environment["SLURM_STEP_NUM_TASKS"])
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    if tasks != nodes:
        raise ConfigError(
            f"srun --ntasks={tasks}: must be one task per node, and there are {nodes} nodes: use "
            "--ntasks-per-node=1"
        )
    # each component has its own job id
    job = environment.get("SLURM_HET_JOB_ID") or environment["SLURM_JOB_ID"]
    job_step = environment.get("SLURM_STEP_ID", "0")
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    launch = f"slurm.{job}.{job_step}.{restarts}"
    return Node(int(environment["SLURM_PROCID"]), tasks, launch)


def address_of(interface: str | None, nodes: int) -> str:
    """The address at which other nodes reach this one, on `interface` (a pattern such as ib*) or on
    the default route. It is an IPv6 address only if there is no other.

    Raises ConfigError if no interface matches, or the host has no default route.
    """
    if interface is not None:
        return _address_on(interface)
    if nodes == 1:
        return loopback()
    for unassigned in _UNASSIGNED_ADDRESSES:
        with contextlib.suppress(OSError):  # no default route
            return address_towards(with_port(unassigned, 9))
    address = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
    if is_loopback(str(address)):
        raise ConfigError(
            f"launch.interface=null: must be set: {socket.gethostname()} has no default route, "
            f"and resolves to {address}"
        )
    return str(address)


def interface_with(address: str) -> str | None:
    """The network interface that has this address."""
    for name, entries in sorted(psutil.net_if_addrs().items()):
        if any(entry.address == address for entry in entries):
            return name
    return None


def _address_on(pattern: str) -> str:
    interfaces = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for name in fnmatch.filter(sorted(interfaces), pattern):
            for entry in interfaces[name]:
                # an address with a zone is valid only on this host
                if entry.family == family and "%" not in entry.address:
                    return entry.address
    raise ConfigError(
        f"launch.interface={pattern}: no network interface of {socket.gethostname()} matches; "
        f"there are {', '.join(sorted(interfaces))}"
    )


@dataclass(frozen=True)
class EnginePart:
    """The TP ranks of one engine that run on one node.

    Engines larger than a node have several parts; part 0 answers requests.
    """

    engine: int
    part: int
    parts: int
    ranks: int  # TP ranks in this part
    first_slot: int  # its first slot on the node
    group: EngineGroup

    @property
    def fleet(self) -> str:
        """The name of its fleet."""
        return self.group.purpose.prefix

    @property
    def name(self) -> str:
        """The name of its process and of its port."""
        if self.part:
            return f"{self.engine_name}.{self.part}"
        return self.engine_name

    @property
    def engine_name(self) -> str:
        return f"{self.fleet}.{self.engine}"


@dataclass(frozen=True)
class NodePlan:
    """The ranks and engines of one node.

    A slot is a GPU, or on a machine without GPUs the place of one rank.
    """

    node: int
    trainer_ranks: range  # on slots 0, 1, …
    engines: tuple[EnginePart, ...]

    @property
    def serves(self) -> tuple[int, ...]:
        """The policy's engines that answer requests on this node."""
        return tuple(part.engine for part in self.answering if part.group.purpose == ROLLOUTS)

    @property
    def answering(self) -> tuple[EnginePart, ...]:
        """The engine parts on this node that answer requests."""
        return tuple(part for part in self.engines if part.part == 0)

    @property
    def idle(self) -> bool:
        return not self.trainer_ranks and not self.engines


def place(
    trainer_ranks: int, groups: Sequence[EngineGroup], nodes: int, slots: int, shared: bool = False
) -> list[NodePlan]:
    """Fills the slots of nodes in order: trainer ranks first, then the engines of one group after
    another. `shared`: the policy's engines are on the same slots as the trainer ranks, from the
    first on.

    An engine that fits into a node is never split. A larger one takes whole nodes. Neighbouring
    trainer ranks share a node, so that the innermost axes (tp, then cp) use its fast links. Raises
    ConfigError if there are too few nodes.
    """
    for group in groups:
        tp = group.settings.tp
        if tp > slots and tp % slots:
            raise ConfigError(
                f"{group.key}.tp={tp}: an engine larger than a node must fill whole nodes "
                f"of {slots} slots"
            )
    first_of_engine: list[tuple[EngineGroup, int, int]] = []  # group, engine, slot
    slot = 0 if shared else trainer_ranks
    for group in groups:
        for engine in group.numbers:
            if group.purpose != ROLLOUTS:
                slot = max(slot, trainer_ranks)
            free = slots - slot % slots  # free slots in the node of `slot`
            if free < min(group.settings.tp, slots):
                slot += free
            first_of_engine.append((group, engine, slot))
            slot += group.settings.tp
    needed_nodes = -(-max(slot, trainer_ranks) // slots)
    if needed_nodes > nodes:
        processes = f"{trainer_ranks} trainer ranks"
        for group in groups:
            joint = " and " if group is groups[-1] else ", "
            settings = group.settings
            processes += f"{joint}{settings.engines} engines of {group.key}.tp={settings.tp}"
        sharing = ""
        if trainer_ranks and not shared and any(group.purpose == ROLLOUTS for group in groups):
            sharing = ", share GPUs (cluster.share_gpus=true)"
        raise ConfigError(
            f"{processes} need {needed_nodes} nodes of {slots} slots; the allocation has {nodes}: "
            f"ask for more (sbatch --nodes={needed_nodes}){sharing}, or reduce the sizes"
        )
    plans = []
    for node in range(nodes):
        begin = node * slots
        end = (node + 1) * slots
        parts = tuple(
            EnginePart(
                engine=engine,
                part=max(0, begin - first) // slots,
                parts=max(1, group.settings.tp // slots),
                ranks=min(group.settings.tp, slots),
                first_slot=max(first, begin) - begin,
                group=group,
            )
            for group, engine, first in first_of_engine
            if first < end and first + group.settings.tp > begin
        )
        node_ranks = range(min(begin, trainer_ranks), min(end, trainer_ranks))
        plans.append(NodePlan(node, node_ranks, parts))
    return plans


def slots_per_node(ranks: int, nodes: int, gpus: int, ranks_per_node: int | None) -> int:
    """The slots of a node: `ranks_per_node` (launch.ranks_per_node), else its GPUs, or without GPUs
    the least number for `ranks` on all nodes.

    Raises ConfigError if a node has fewer GPUs than `ranks_per_node`.
    """
    if ranks_per_node is not None and gpus and ranks_per_node > gpus:
        raise ConfigError(
            f"launch.ranks_per_node={ranks_per_node}: must be at most the GPUs of a node, {gpus}"
        )
    return ranks_per_node or gpus or -(-ranks // nodes)
