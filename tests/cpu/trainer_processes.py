"""Starts the ranks of trainer_worker.py and reads what they saved."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch
from nursery import ForkedRun, script

START_S = 200
SCENARIO_S = 10  # generous, since a busy machine takes four seconds a scenario


def spawn(
    world_size: int, out: Path, scenarios: list[dict[str, Any]], expected_status: int = 0
) -> None:
    plan = out / f"scenarios.{world_size}.json"
    plan.write_text(json.dumps(scenarios))
    ranks = ForkedRun(
        **script(
            "trainer_worker",
            str(world_size),
            str(out / f"rendezvous.{world_size}"),
            str(plan),
            str(out),
        ),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = ranks.communicate(timeout=START_S + SCENARIO_S * len(scenarios))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    assert ranks.returncode == 0, output
    for rank, status in enumerate(json.loads(output.splitlines()[-1])):
        assert status == expected_status, (out / f"world{world_size}.{rank}.log").read_text()[
            -4000:
        ]


def saved(runs: Path, name: str) -> list[dict[str, Any]]:
    """What every rank saved, in rank order."""
    count = len(list(runs.glob(f"{name}.[0-9].pt")))
    return [torch.load(runs / f"{name}.{rank}.pt", weights_only=False) for rank in range(count)]
