"""A launcher writes to the trace: its start with the plan's expectations, and its end, whatever the
reason.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from json_files import json_lines
from resolving import config

from megarl.config.errors import ConfigError
from megarl.estimate.estimate import estimate
from megarl.launch import launcher
from megarl.launch.nodes import Node
from megarl.launch.resuming import Resume
from megarl.launch.watch import Stopped
from megarl.plan.resolve import RunPlan, resolve


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    return resolve(config(tmp_path, "cluster.gpu=H100"), "plan")


def node(rank: int = 0) -> Node:
    return Node(rank=rank, count=2, launch="x")


def marks(plan: RunPlan, rank: int = 0) -> list[dict]:
    path = Path(plan.config.run_dir) / "trace" / f"launcher.{rank}.jsonl"
    return json_lines(path)


def test_start_in_the_trace_has_the_plan(plan: RunPlan) -> None:
    with launcher.traced(plan, node(), Resume(step=7)):
        pass
    start, end = marks(plan)
    assert (start["args"]["step"], start["args"]["nodes"]) == (7, 2)
    assert end["args"] == {"how": "finished"}
    estimated = estimate(plan.config, plan.spec)
    expected = start["args"]["expected"]
    assert expected["step_s"] == estimated.step_s
    assert expected["binding"] == estimated.binding
    assert (expected["gpu"], expected["peak_flops"]) == ("H100", 989e12)
    assert sum(expected["train_parts_s"].values()) == pytest.approx(expected["train_s"])


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (RuntimeError("trainer.0 died\n" + "x" * 9000), "failed: trainer.0 died\nxxx"),
        (Stopped(), "stopped by SIGTERM"),
        (Stopped("trainer.0 did not finish", 2), "stopped by Ctrl-C"),
        (KeyboardInterrupt(), "stopped by Ctrl-C"),
        (SystemExit(143), "stopped by SIGTERM"),
        (SystemExit(138), "stopped by SIGUSR1"),
        (Stopped(number=1), "stopped by SIGHUP"),
    ],
)
def test_end_is_in_the_trace_and_the_error_goes_on(
    plan: RunPlan, error: BaseException, ending: str
) -> None:
    with pytest.raises(type(error)), launcher.traced(plan, node(1), Resume()):
        raise error
    (end,) = marks(plan, 1)
    assert end["args"]["how"].startswith(ending)
    assert len(end["args"]["how"]) <= launcher.END_CHARACTERS


def test_run_without_an_estimate_starts(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise ConfigError("no such shape")

    monkeypatch.setattr(launcher, "estimate", refuses)
    assert launcher.expected(plan) == {"problem": "no such shape"}
