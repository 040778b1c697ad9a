"""A whole run that gets a signal to stop, as by Slurm's preemption or by Ctrl-C."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest
from run_tools import (
    PROMPTS,
    descendants,
    quickstart,
    rows,
    run,
    started,
    trained_ordinals,
    wait_for_steps,
    wait_until,
)
from waiting_transport import ASK, FOLDER, REACHED, settings

from megarl.plan.checkpoints import complete_checkpoints

pytestmark = pytest.mark.timeout(900)


def arguments(model: Path, run_dir: Path, *overrides: str) -> list[str]:
    return quickstart(model, run_dir, "checkpoint.every=0", *overrides)


@pytest.mark.long
def test_stopped_run_saves_its_step_and_goes_on(model, tmp_path, monkeypatch):
    """The same command goes on after SIGTERM and after Ctrl-C.

    Trainer TP2, with checkpoints only at the end.

    All processes get the signal, as in a Slurm step, while the engine has half of an update. The
    resumed run first sends the engine all weights. It does not need its initial weights, a warm
    start of a model that has weights itself. (tests/unit/test_rollouts_channel.py tests a signal
    during a wait for samples, and test_run_engines.py a second signal.)
    """
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    streaming = [*settings(), "async.partial_rollout=in_flight"]
    monkeypatch.setenv(FOLDER, str(tmp_path))
    warm_start = run_dir / "sft/hf"
    assert (
        run(
            ["sft", *arguments(model, run_dir, "sft.steps=1", "model.random_init=false")[1:]]
        ).returncode
        == 0
    )
    with started(arguments(model, run_dir, *streaming, "max_steps=100000"), log) as process:
        wait_for_steps(process, run_dir, 2)
        (tmp_path / ASK).touch()
        wait_until((tmp_path / REACHED).exists, process, "an update in its middle")
        for member in [process, *descendants(process)]:
            member.send_signal(signal.SIGTERM)
        (tmp_path / ASK).unlink()
        process.wait(timeout=150)
    output = log.read_text()
    steps = len(rows(run_dir))
    assert process.returncode == 143, output
    assert f"stopped at step {steps} by SIGTERM; the same command goes on from there\n" in output
    assert [step for step, _ in complete_checkpoints(run_dir)] == [steps]
    assert (
        f"Weights: the warm start in sft.output={warm_start}; megarl sft made it from "
        f"model.path={model}\n" in output
    )
    for folder in (model, warm_start):
        (folder / "model.safetensors").unlink()
    with started(
        arguments(model, run_dir, *streaming, "max_steps=100000", "rollout.temperature=0.9"), log
    ) as again:
        wait_for_steps(again, run_dir, steps + 2)
        # Ctrl-C reaches only the launcher: its children have sessions of their own
        again.send_signal(signal.SIGINT)
        again.wait(timeout=150)
    output = log.read_text()
    before = steps
    steps = len(rows(run_dir))
    assert again.returncode == 130, output
    assert (
        f"Weights: the checkpoint {run_dir}/checkpoints/step_{before:06d}\nChanged: "
        "rollout.temperature=0.9, was 1.0\n" in output
    )
    assert "\nCtrl-C: the running step is finished and saved, within 120 s" in output
    assert f"\nstopped at step {steps} by Ctrl-C; the same command goes on from there\n" in output
    assert complete_checkpoints(run_dir)[-1][0] == steps
    assert all((run_dir / name).stat().st_size > 0 for name in ("report.png", "trace.json"))
    probes = [
        row["logprob/abs_diff_mean"]
        for row in rows(run_dir)[before:]
        if "logprob/abs_diff_mean" in row
    ]
    assert probes and max(probes) < 1e-4, (
        "the engine, which began with made-up weights, computes as the trainer does"
    )
    # the run may stop before the engine confirms the update at the beginning of the last step
    *confirmed, last = rows(run_dir)[before:]
    assert all(row["sync/audit_ok"] for row in confirmed) and last.get("sync/audit_ok", True)
    assert sorted(itertools.chain(*trained_ordinals(run_dir))) == list(range(steps * PROMPTS))
