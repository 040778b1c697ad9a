"""A whole run that is asked to stop, as Slurm's preemption does."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path

import pytest

from run_tools import OVERRIDES, PROMPTS, descendants, kill, make_model, rows, run, start, wait_until
from waiting_transport import ASK, FOLDER, REACHED, settings

from megarl.executors.checkpoints import complete_checkpoints

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("stop") / "model")


def trained(run_dir: Path) -> list[int]:
    lines = [json.loads(line) for line in (run_dir / "rollouts/ordinals.jsonl").read_text().splitlines()]
    return sorted(itertools.chain(*(line["ordinals"] for line in lines)))


def arguments(model: Path, run_dir: Path, *more: str) -> list[str]:
    return ["train", "configs/quickstart.yaml", f"model.path={model}", f"run_dir={run_dir}", *OVERRIDES, "checkpoint.every=0", *more]


def test_sigterm_saves_the_running_step_and_the_same_command_goes_on(model, tmp_path, monkeypatch):
    """Trainer TP2, checkpoints only at the end. All processes get the signal, as in a Slurm step, while the engine has a half of an
    update: the run that goes on gives it all of the weights first. (In a wait for samples:
    tests/unit/test_rollouts_channel.py; a second signal: test_run_engines.py.)"""
    run_dir, log, in_groups = tmp_path / "run", tmp_path / "log", [*settings(), "async.partial_rollout=in_flight"]
    monkeypatch.setenv(FOLDER, str(tmp_path))
    process = start(arguments(model, run_dir, *in_groups, "max_steps=100000"), log)
    try:
        wait_until(lambda: len(rows(run_dir)) >= 2, process, "second step", timeout_s=240)
        (tmp_path / ASK).touch()
        wait_until((tmp_path / REACHED).exists, process, "an update in its middle")
        for each in [process, *descendants(process)]:
            each.send_signal(signal.SIGTERM)
        (tmp_path / ASK).unlink()
        process.wait(timeout=150)
    finally:
        kill(process)
    output, steps = log.read_text(), len(rows(run_dir))
    assert process.returncode == 143, output
    assert f"stopped at step {steps} by SIGTERM; the same command goes on from there\n" in output
    assert [step for step, _ in complete_checkpoints(run_dir)] == [steps]
    again = run(arguments(model, run_dir, *in_groups, f"max_steps={steps + 2}"), timeout_s=240)
    assert again.returncode == 0, again.stderr
    assert all(row["sync/audit_ok"] for row in rows(run_dir)[steps:])
    assert trained(run_dir) == list(range((steps + 2) * PROMPTS))
