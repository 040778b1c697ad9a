"""The faults of `megarl bench faults`: what the run must say about each, and how it must go on or end."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from megarl.bench import fault_memory as memory
from megarl.bench import fault_network as network
from megarl.bench import fault_orders
from megarl.bench import fault_processes as processes
from megarl.bench import fault_storage as storage
from megarl.bench.fault_hooks import FLIPPED
from megarl.bench.fault_run import FaultRun, Inject, carried_out

FAILED, STOPPED, KILLED, REFUSED = 1, 128 + signal.SIGTERM, -signal.SIGKILL, 2  # exit statuses of the launcher


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `notice` and `recovered` match what launcher or driver print; `inject` returns the values of their {words}."""

    inject: Inject
    notice: str = ""  # the message that names the cause; empty: none is expected
    recovered: str = ""  # the message after which the run counts as whole again
    ends: int | None = None  # exit status with which the run must end; None: it must go on
    weight: int = 1  # how often it is drawn after its first time: seldom where an engine or the run must start anew, which takes long
    mend: Callable[[FaultRun], None] = lambda run: None  # undoes the damage before the run is started again
    root: bool = False  # only root can do it: it mounts file systems, or writes to other processes' memory


def tool(what: str) -> Inject:
    def inject(run: FaultRun, random: Random) -> dict[str, str]:
        carried_out(run, fault_orders.TOOL, what)
        return {}

    return inject


def bit_flipped(run: FaultRun, random: Random) -> dict[str, str]:
    carried_out(run, fault_orders.FLIP)
    return {}


_LOST, _BACK = r"engine {engine} is lost", r"engines \[[\d, ]*{engine}[\d, ]*\] serve version"
_SILENT = r"engine\.{engine} has answered nothing for"
_NO_MESSAGE = r"was sent something by trainer\.\d that is not a message of this run"
_NOT_WRITTEN = r"checkpoints/step_\d+ of \d+ bytes could not be written; \d+ bytes were free"
_NOT_AS_SENT = r"weight audit failed:\s+\S+ on generator rank \d is not what trainer rank"  # the memory was changed during an update
_REWRITTEN = r"something other than an update has written to an engine's memory:\s+\S+ on generator rank \d"
_DAMAGED, _DAMAGED_TENSORS = r"{folder}: {file} is damaged", r"{folder} cannot be used: {file} is damaged"
_RANK_KILLED = r"trainer\.{rank} was killed by SIGKILL"

KINDS: dict[str, Kind] = {
    "engine killed": Kind(processes.engine_killed, _LOST, _BACK, weight=2),
    "engine hangs": Kind(processes.engine_stopped, _SILENT, _BACK, weight=2),
    "engine slow": Kind(processes.engine_stalled, weight=8),
    "engine's scheduler killed": Kind(processes.scheduler_killed, _LOST, _BACK, weight=2),
    "engine killed in a transfer": Kind(processes.engine_killed_in_transfer, _LOST, _BACK, weight=2),
    "stranger at the rollouts port": Kind(network.stranger_at_the_hub, weight=8),
    "stranger at an engine": Kind(network.stranger_at_an_engine, weight=8),
    "reward worker killed": Kind(processes.reward_worker_killed, weight=8),
    "reward worker hangs": Kind(processes.reward_worker_stopped, weight=8),
    "tool crashes": Kind(tool("crash twice"), "the tool failed: it brought its process down", weight=8),
    "tool hangs": Kind(tool("hang"), "the tool failed: it took longer than", weight=8),
    "tool prints for ever": Kind(tool("print"), "the tool failed: it took longer than", weight=8),
    "tool answers too much": Kind(tool("answer too much"), r"the tool failed: more than \d+ bytes of result", weight=8),
    "trainer rank killed": Kind(processes.trainer_killed, _RANK_KILLED, ends=FAILED, weight=2),
    "trainer rank killed in a transfer": Kind(processes.trainer_killed_in_transfer, r"trainer\.[01] was killed by SIGKILL", ends=FAILED),
    "generator killed": Kind(processes.generator_killed, r"generator\.0 was killed by SIGKILL", ends=FAILED, weight=1),
    "generator hangs": Kind(processes.generator_stopped, r"waited \d+ s for .*generator\.0", ends=FAILED, weight=0),
    "launcher killed": Kind(processes.launcher_killed, ends=KILLED, weight=2),
    "launcher killed while saving": Kind(processes.killed_while_saving, ends=KILLED, weight=1),
    "SIGTERM": Kind(processes.sigterm, r"stopped at step \d+ by SIGTERM; the same command goes on from there", ends=STOPPED, weight=2),
    "full disk while saving": Kind(storage.full_disk, _NOT_WRITTEN, ends=FAILED, weight=1),
    "bit flipped in a transfer": Kind(bit_flipped, re.escape(FLIPPED), ends=FAILED, weight=1),
    "undecodable message of a trainer rank": Kind(network.undecodable_from_a_trainer, _NO_MESSAGE, ends=FAILED),
    "undecodable message of a new peer": Kind(network.undecodable_from_a_new_peer, _NO_MESSAGE, ends=FAILED),
    "engine's port stolen": Kind(network.port_stolen, recovered=_BACK),
    "engine's scheduler killed before ready": Kind(processes.killed_before_ready, _LOST, _BACK),
    "trainer rank stops for 20 s": Kind(processes.paused("trainer rank"), weight=2),
    "generator stops for 20 s": Kind(processes.paused("generator"), weight=2),
    "launcher stops for 20 s": Kind(processes.paused("launcher"), weight=2),
    "reward worker stops for 20 s": Kind(processes.paused("reward worker"), weight=2),
    "engine stops for 20 s": Kind(processes.paused("engine"), _SILENT, _BACK),
    "engine's scheduler stops for 20 s": Kind(processes.paused("scheduler"), _SILENT, _BACK),
    "disk full": Kind(storage.disk_filled, _NOT_WRITTEN, ends=FAILED, mend=storage.disk_emptied, root=True),
    "shared memory full at the start": Kind(storage.shared_memory_filled_before_the_start, mend=storage.shared_memory_emptied, root=True),
    "shared memory full": Kind(storage.shared_memory_filled, "/dev/shm", _BACK, mend=storage.shared_memory_emptied, root=True),
    "engine's parameter changed in memory": Kind(memory.parameter_changed, f"{_REWRITTEN}|{_NOT_AS_SENT}", ends=FAILED, root=True),
    "engine's rotary cache changed in memory": Kind(memory.rotary_changed, _REWRITTEN, ends=FAILED, root=True),
    "checkpoint truncated": Kind(
        storage.checkpoint_file("*", storage.cut_short), _DAMAGED, ends=REFUSED, mend=storage.whole_again, weight=2
    ),
    "checkpoint's file removed": Kind(
        storage.checkpoint_file("*", storage.remove), r"{folder}: .*{file} is missing", ends=REFUSED, mend=storage.whole_again, weight=2
    ),
    "bit flipped in a checkpoint's small files": Kind(
        storage.checkpoint_file("[!r]*", storage.flip_bit), _DAMAGED, ends=REFUSED, mend=storage.whole_again, weight=2
    ),
    "bit flipped in a checkpoint's tensors": Kind(
        storage.checkpoint_file("rank_*.bin", storage.flip_bit), _DAMAGED_TENSORS, ends=FAILED, mend=storage.whole_again
    ),
}
