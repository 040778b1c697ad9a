"""Starts the ranks of trainer_worker.py and reads what they saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

DEADLINE_S = 150


def spawn(world_size: int, out: Path, scenarios: list[dict[str, Any]], expected_status: int = 0) -> None:
    plan = out / f"scenarios.{world_size}.json"
    plan.write_text(json.dumps(scenarios))
    worker = Path(__file__).with_name("trainer_worker.py")
    logs = [out / f"world{world_size}.{rank}.log" for rank in range(world_size)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(worker), str(rank), str(world_size), str(out / f"rendezvous.{world_size}"), str(plan), str(out)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            output = dict(stdout=log.open("w"), stderr=subprocess.STDOUT)
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True, **output))
        for process in processes:
            process.wait(timeout=DEADLINE_S)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    for process, log in zip(processes, logs):
        assert process.returncode == expected_status, log.read_text()[-4000:]


def saved(runs: Path, name: str) -> list[dict[str, Any]]:
    """What every rank saved, in rank order."""
    count = len(list(runs.glob(f"{name}.[0-9].pt")))
    return [torch.load(runs / f"{name}.{rank}.pt", weights_only=False) for rank in range(count)]
