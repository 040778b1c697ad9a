"""The faults of `megarl bench faults`: how each is done to a run, what the run must then say, and how it must go on or end."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import psutil
import zmq

from megarl.bench import fault_orders
from megarl.bench.fault_hooks import FLIPPED
from megarl.bench.fault_run import ENGINES, STARTED_S, FaultRun
from megarl.executors.checkpoints import complete_checkpoints
from megarl.messaging.link import Peer, RunKey
from megarl.messaging.messages import WeightsApplied

FAILED, STOPPED, KILLED = 1, 128 + signal.SIGTERM, -signal.SIGKILL  # exit statuses of the launcher

Inject = Callable[[FaultRun, Random], dict[str, str]]  # returns the words to fill into what is to be said


@dataclass(frozen=True)
class Kind:
    """Of fault. `notice` and `recovered` are patterns for what launcher or driver print, with {words} of `inject`."""

    inject: Inject
    notice: str = ""  # that names the cause; empty: there is nothing to be seen
    recovered: str = ""  # before the run counts as whole again
    ends: int | None = None  # the run's exit status; None: it goes on
    weight: int = 1  # how often it is chosen, after the first time; starting an engine or a run anew takes long
    mend: Callable[[FaultRun], None] = lambda run: None  # before the run is started again


def engine_killed(run: FaultRun, random: Random) -> dict[str, str]:
    index = random.randrange(ENGINES)
    run.engine(index).kill()
    return {"engine": str(index)}


def engine_stopped(run: FaultRun, random: Random) -> dict[str, str]:
    index = random.randrange(ENGINES)
    for process in _with_children(run.engine(index)):
        process.suspend()
    return {"engine": str(index)}


def engine_stalled(run: FaultRun, random: Random) -> dict[str, str]:
    """For less long than it takes to be given up."""
    processes = _with_children(run.engine(random.randrange(ENGINES)))
    for process in processes:
        process.suspend()
    time.sleep(random.uniform(1.0, 4.0))
    for process in processes:
        process.resume()
    return {}


def scheduler_killed(run: FaultRun, random: Random) -> dict[str, str]:
    index = random.randrange(ENGINES)
    schedulers = [child for child in run.engine(index).children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]
    random.choice(schedulers).kill()
    return {"engine": str(index)}


def engine_killed_in_transfer(run: FaultRun, random: Random) -> dict[str, str]:
    index = random.randrange(ENGINES)
    pids = " ".join(str(process.pid) for process in _with_children(run.engine(index)))
    _order(run, fault_orders.KILL_ENGINE, pids)
    return {"engine": str(index)}


def stranger_at_the_hub(run: FaultRun, random: Random) -> dict[str, str]:
    """Noise, ZeroMQ without a key, and a well-formed message under another run's key, at every port of the generator."""
    for port in _listening(run.generator()):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(random.randbytes(4096))
        stranger = zmq.Context.instance().socket(zmq.DEALER)
        stranger.connect(f"tcp://127.0.0.1:{port}")
        stranger.send(b"let me in")
        forger = Peer("trainer.0", RunKey.generate(), f"tcp://127.0.0.1:{port}")
        forger.send(WeightsApplied(0, True, 0.0, 0))
        time.sleep(0.5)
        forger.close()
        stranger.close(linger=0)
    return {}


def stranger_at_an_engine(run: FaultRun, random: Random) -> dict[str, str]:
    """Requests without a key: one to generate, one that would change the weights, one that is none."""
    requests = {"/generate": b'{"text": "x"}', "/update_weights_from_disk": b'{"model_path": "x"}', "/pause_generation": b"{"}
    for port in _listening(run.engine(random.randrange(ENGINES))):
        for path, body in requests.items():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                status = connection.getresponse().status
            except (OSError, http.client.HTTPException):
                continue  # a port that speaks something else
            finally:
                connection.close()
            if status == 200:
                raise RuntimeError(f"port {port} of an engine answered {path} to a stranger")
    return {}


def reward_worker_killed(run: FaultRun, random: Random) -> dict[str, str]:
    random.choice(run.processes("megarl.rewards.worker")).kill()
    return {}


def reward_worker_stopped(run: FaultRun, random: Random) -> dict[str, str]:
    """It is killed when it has taken too long, and replaced."""
    random.choice(run.processes("megarl.rewards.worker")).suspend()
    return {}


def tool(what: str) -> Inject:
    def inject(run: FaultRun, random: Random) -> dict[str, str]:
        _order(run, fault_orders.TOOL, what)
        return {}

    return inject


def trainer_killed(run: FaultRun, random: Random) -> dict[str, str]:
    rank = random.randrange(2)
    run.trainer(rank).kill()
    return {"rank": str(rank)}


def generator_killed(run: FaultRun, random: Random) -> dict[str, str]:
    run.generator().kill()
    return {}


def generator_stopped(run: FaultRun, random: Random) -> dict[str, str]:
    run.generator().suspend()
    return {}


def launcher_killed(run: FaultRun, random: Random) -> dict[str, str]:
    run.launcher.kill()
    return {}


def killed_while_saving(run: FaultRun, random: Random) -> dict[str, str]:
    """When the first file of a checkpoint is there."""
    checkpoints = run.run_dir / "checkpoints"
    run.wait_until(lambda: any(checkpoints.glob("*.partial/*")), "checkpoint being written", STARTED_S, every_s=0.002)
    run.launcher.kill()
    return {}


def sigterm(run: FaultRun, random: Random) -> dict[str, str]:
    run.launcher.terminate()
    return {}


def full_disk(run: FaultRun, random: Random) -> dict[str, str]:
    """Trainer rank 1 cannot write files of more than 1 MiB: no part of a checkpoint."""
    psutil.Process(run.trainer(1).pid).rlimit(psutil.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    return {}


def bit_flipped(run: FaultRun, random: Random) -> dict[str, str]:
    _order(run, fault_orders.FLIP)
    return {}


def trainer_killed_in_transfer(run: FaultRun, random: Random) -> dict[str, str]:
    _order(run, fault_orders.DIE)
    return {}


def checkpoint_truncated(run: FaultRun, random: Random) -> dict[str, str]:
    """The newest checkpoint of a stopped run loses half of its largest file; the run is started on it."""
    run.launcher.terminate()
    run.exit_status(STARTED_S)
    step, folder = complete_checkpoints(run.run_dir)[-1]
    largest = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    (run.folder / "damaged").write_text(str(largest))
    shutil.copy(largest, run.folder / "whole")
    os.truncate(largest, largest.stat().st_size // 2)
    run.start()
    return {"folder": re.escape(folder.name)}


def whole_again(run: FaultRun) -> None:
    if (run.folder / "whole").exists():
        shutil.move(run.folder / "whole", (run.folder / "damaged").read_text())


def _order(run: FaultRun, name: str, text: str = "") -> None:
    fault_orders.order(run.orders, name, text)
    run.wait_until(lambda: not (run.orders / name).exists(), f"process that carries out {name}", STARTED_S, every_s=0.05)


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _listening(process: psutil.Process) -> list[int]:
    return sorted({c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN})


_LOST, _BACK = r"engine {engine} is lost", r"engines \[[\d, ]*{engine}[\d, ]*\] serve version"
_NOT_WRITTEN = r"checkpoints/step_\d+ of \d+ bytes could not be written; \d+ bytes were free"
_RANK_KILLED = r"trainer\.{rank} was killed by SIGKILL"

KINDS: dict[str, Kind] = {
    "engine killed": Kind(engine_killed, _LOST, _BACK, weight=2),
    "engine hangs": Kind(engine_stopped, r"engine\.{engine} has answered nothing for", _BACK, weight=2),
    "engine slow": Kind(engine_stalled, weight=8),
    "engine's scheduler killed": Kind(scheduler_killed, _LOST, _BACK, weight=2),
    "engine killed in a transfer": Kind(engine_killed_in_transfer, _LOST, _BACK, weight=2),
    "stranger at the rollouts port": Kind(stranger_at_the_hub, weight=8),
    "stranger at an engine": Kind(stranger_at_an_engine, weight=8),
    "reward worker killed": Kind(reward_worker_killed, weight=8),
    "reward worker hangs": Kind(reward_worker_stopped, weight=8),
    "tool crashes": Kind(tool("crash twice"), "the tool failed: it brought its process down", weight=8),
    "tool hangs": Kind(tool("hang"), "the tool failed: it took longer than", weight=8),
    "tool prints for ever": Kind(tool("print"), "the tool failed: it took longer than", weight=8),
    "tool answers too much": Kind(tool("answer too much"), r"the tool failed: more than \d+ bytes of result", weight=8),
    "trainer rank killed": Kind(trainer_killed, _RANK_KILLED, ends=FAILED, weight=2),
    "trainer rank killed in a transfer": Kind(trainer_killed_in_transfer, r"trainer\.[01] was killed by SIGKILL", ends=FAILED, weight=1),
    "generator killed": Kind(generator_killed, r"generator\.0 was killed by SIGKILL", ends=FAILED, weight=1),
    "generator hangs": Kind(generator_stopped, r"waited \d+ s for .*generator\.0", ends=FAILED, weight=0),
    "launcher killed": Kind(launcher_killed, ends=KILLED, weight=2),
    "launcher killed while saving": Kind(killed_while_saving, ends=KILLED, weight=1),
    "SIGTERM": Kind(sigterm, r"stopped at step \d+ by SIGTERM; the same command goes on from there", ends=STOPPED, weight=2),
    "full disk while saving": Kind(full_disk, _NOT_WRITTEN, ends=FAILED, weight=1),
    "bit flipped in a transfer": Kind(bit_flipped, re.escape(FLIPPED), ends=FAILED, weight=1),
    "checkpoint truncated": Kind(checkpoint_truncated, r"{folder}.* cannot be loaded", ends=FAILED, mend=whole_again, weight=1),
}
