"""Faults of processes: ended, stopped, or stopped for a while."""

from __future__ import annotations

import contextlib
import time
from random import Random

import psutil

from megarl.bench import fault_orders
from megarl.bench.fault_run import ENGINES, STARTED_S, FaultRun, Inject, carried_out

PAUSE_S = 20.0


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
    """Stops an engine for less time than it may be silent."""
    processes = _with_children(run.engine(random.randrange(ENGINES)))
    for process in processes:
        process.suspend()
    time.sleep(random.uniform(1.0, 4.0))
    for process in processes:
        process.resume()
    return {}


def scheduler_killed(run: FaultRun, random: Random) -> dict[str, str]:
    index = random.randrange(ENGINES)
    random.choice(_schedulers(run.engine(index))).kill()
    return {"engine": str(index)}


def engine_killed_in_transfer(run: FaultRun, random: Random) -> dict[str, str]:
    index = random.randrange(ENGINES)
    pids = " ".join(str(process.pid) for process in _with_children(run.engine(index)))
    carried_out(run, fault_orders.KILL_ENGINE, pids)
    return {"engine": str(index)}


def reward_worker_killed(run: FaultRun, random: Random) -> dict[str, str]:
    random.choice(run.processes("megarl.rewards.worker")).kill()
    return {}


def reward_worker_stopped(run: FaultRun, random: Random) -> dict[str, str]:
    """Stops a reward worker, which is killed and replaced when its call has taken too long."""
    random.choice(run.processes("megarl.rewards.worker")).suspend()
    return {}


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
    """Kills the launcher when the first file of a checkpoint exists."""
    checkpoints = run.run_dir / "checkpoints"
    run.wait_until(lambda: any(checkpoints.glob("*.partial/*")), "checkpoint being written", STARTED_S, every_s=0.002)
    run.launcher.kill()
    return {}


def sigterm(run: FaultRun, random: Random) -> dict[str, str]:
    run.launcher.terminate()
    return {}


def trainer_killed_in_transfer(run: FaultRun, random: Random) -> dict[str, str]:
    carried_out(run, fault_orders.DIE)
    return {}


def killed_before_ready(run: FaultRun, random: Random) -> dict[str, str]:
    """Kills an engine, and a scheduler of its successor before that is ready."""
    index = random.randrange(ENGINES)
    before = run.engine(index)
    before.kill()
    run.wait_until(lambda: _started_again(run, index, before), f"scheduler of engine {index}", STARTED_S, every_s=0.05)
    time.sleep(random.uniform(0.5, 3.0))
    random.choice(_schedulers(run.engine(index))).kill()
    return {"engine": str(index)}


def _started_again(run: FaultRun, index: int, before: psutil.Process) -> bool:
    found = run.engines(index)
    return bool(found) and found[0] != before and bool(_schedulers(found[0]))


def paused(role: str) -> Inject:
    """Stops a process for PAUSE_S: longer than an engine may be silent, shorter than any other deadline of the run."""

    def inject(run: FaultRun, random: Random) -> dict[str, str]:
        index = random.randrange(ENGINES)
        processes = {
            "trainer rank": lambda: [run.trainer(random.randrange(2))],
            "generator": lambda: [run.generator()],
            "launcher": lambda: [psutil.Process(run.launcher.pid)],
            "engine": lambda: _with_children(run.engine(index)),
            "scheduler": lambda: _schedulers(run.engine(index)),
            "reward worker": lambda: [random.choice(run.processes("megarl.rewards.worker"))],
        }[role]()
        for process in processes:
            process.suspend()
        time.sleep(PAUSE_S)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # the run gave it up and ended it
                process.resume()
        return {"engine": str(index)}

    return inject


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _schedulers(engine: psutil.Process) -> list[psutil.Process]:
    return [child for child in engine.children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]
