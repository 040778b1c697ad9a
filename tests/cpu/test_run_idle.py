"""The idle side put to work in whole runs that are continued from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_tools import quickstart, rows, succeed

from megarl.plan.checkpoints import complete_checkpoints

pytestmark = pytest.mark.timeout(900)
STEPS = (3, 5)  # of the run's beginning, and of the whole run


def continued(model: Path, run_dir: Path, *settings: str) -> list[dict]:
    """The rows of a run that ends after STEPS[0] steps and is continued."""
    for steps in STEPS:
        succeed(
            quickstart(
                model,
                run_dir,
                "data.eval=null",
                "checkpoint.every=1",
                f"max_steps={steps}",
                *settings,
            )
        )
    run_rows = rows(run_dir)
    assert [row["step"] for row in run_rows] == list(range(STEPS[-1]))
    return run_rows


def test_more_optimizer_steps_than_planned_are_saved_and_continued(model: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    run_rows = continued(
        model,
        run_dir,
        "async.capacity=2",
        "async.idle=updates",
        "async.max_updates=3",
        "rollout.name=slow_rollouts:after_a_second",
    )
    more_updates = sum(int(row["idle/updates"]) for row in run_rows)
    assert more_updates > 0
    step, folder = complete_checkpoints(run_dir)[-1]
    state = json.loads((folder / "state.json").read_text())
    assert step == state["position"] == STEPS[-1]
    assert state["steps"] == STEPS[-1] + more_updates


def test_chosen_samples_are_trained_on_after_a_continuation(model: Path, tmp_path: Path):
    run_rows = continued(
        model,
        tmp_path / "run",
        "async.capacity=1",
        "async.idle=samples",
        "async.max_samples=8",
        "trainer.epochs=24",  # so that the generator waits for the trainer
    )
    assert max(row["idle/samples"] for row in run_rows) > 4
    for row in run_rows:
        assert 0 < row["idle/sent_fraction"] <= 1
