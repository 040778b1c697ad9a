"""Whole runs with an engine that only evaluates.

It evaluates during training, with the right weights, and does not delay it.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import psutil
import pytest
from gated_rollouts import GATE
from run_tools import (
    descendants,
    kill,
    make_model,
    quickstart,
    rows,
    run,
    start,
    succeed,
    title,
    wait_until,
)

from megarl.evaluation.scores import BEGUN, missed, read_journal, read_results
from megarl.observe.status import read_statuses
from megarl.plan.checkpoints import complete_checkpoints

pytestmark = pytest.mark.timeout(900)
DEADLINE_S = 240
SETTINGS = [
    "eval.engines=1",
    "eval.every=2",
    "rollout.name=gated_rollouts:held_out_waits",
    "observe.probe_every=0",
]
# scores differ if responses do
SCORED = ["eval.limit=64", "eval.reward=reward_functions:by_chance"]


def evaluated(run_dir: Path) -> dict[int, dict]:
    return {result["version"]: result for result in read_results(run_dir)}


def begin(tmp_path: Path, log: str, *overrides: str) -> tuple[subprocess.Popen, Path]:
    run_dir = tmp_path / "run"
    model = tmp_path / "model"
    if not model.exists():
        make_model(model)
    arguments = quickstart(model, run_dir, *SETTINGS, *overrides)
    return start(arguments, tmp_path / log), run_dir


def end(process: subprocess.Popen, run_dir: Path, *logs: Path) -> None:
    if process.poll() is None:
        kill(process)
    print(
        *(path.read_text() for path in (*logs, run_dir / "logs/evaluator.0.log") if path.exists())
    )


def audits(run_dir: Path) -> dict[int, bool]:
    """By version: whether the evaluating engine's memory was as sent."""
    events = map(json.loads, (run_dir / "trace/evaluator.0.jsonl").read_text().splitlines())
    return {
        int(e["name"].split()[-1]): e["args"]["audited"]
        for e in events
        if e["name"].startswith("evaluation weights")
    }


@pytest.mark.long
def test_every_version_is_evaluated_with_its_own_weights(tmp_path, monkeypatch):
    """The scores equal those of `megarl eval` on the same version's export."""
    monkeypatch.setenv(GATE, str(tmp_path / "no gate"))
    # the task's own reward could be 0 for all samples
    learning = ["reward.name=reward_functions:by_chance", "trainer.optimizer.lr=0.0001"]
    process, run_dir = begin(tmp_path, "log", *SCORED, *learning, "checkpoint.hf_every=2")
    try:
        assert process.wait(DEADLINE_S) == 0
    finally:
        end(process, run_dir, tmp_path / "log")
    evaluations = evaluated(run_dir)
    assert evaluations.keys() == {0, 2, 4, 6} and not missed(run_dir)
    assert audits(run_dir) == dict.fromkeys((0, 2, 4, 6), True)
    table = rows(run_dir)
    assert all(row["sync/audit_ok"] and row["engines/serving"] == 1 for row in table)
    assert [row["step"] for row in table if "eval/sync_s" in row] == [0, 2, 4]
    assert table[-1]["eval/version"] == 6
    assert not re.search("evaluat", (run_dir / "logs/generator.0.log").read_text())
    exact_metrics = ("response_tokens/mean", "reward/mean", "truncated_fraction", "pass@1")
    of_versions = {
        version: [result[key] for key in exact_metrics] for version, result in evaluations.items()
    }
    assert len({str(scores) for scores in of_versions.values()}) == 4, of_versions
    for version in (2, 6):
        export = run_dir / f"hf/step_{version:06d}"
        scored = succeed(
            [
                "eval",
                "configs/quickstart.yaml",
                f"model.path={export}",
                f"run_dir={tmp_path / 'eval'}",
                *SCORED,
                "--json",
            ]
        )
        assert [json.loads(scored.stdout)[key] for key in exact_metrics] == of_versions[version]


@pytest.mark.long
def test_training_waits_for_no_evaluation_but_the_last(tmp_path, monkeypatch):
    """The first version's evaluation is held up from the beginning to the end."""
    gate = tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    gate.touch()
    process, run_dir = begin(tmp_path, "log", "timeouts.rollouts_s=60")

    def waits() -> bool:
        texts = {status.name: status.text for status in read_statuses(run_dir)}
        return texts.get("trainer.0", "") == "waiting for evaluator.0 to take weights version 6"

    try:
        wait_until(waits, process, "end of the last step")
        assert read_journal(run_dir)[0] == (BEGUN, "") and not evaluated(run_dir), (
            "the first evaluation is still under way"
        )
        assert len(rows(run_dir)) == 6 and complete_checkpoints(run_dir)[-1][0] == 6
        gate.unlink()
        assert process.wait(DEADLINE_S) == 0
    finally:
        end(process, run_dir, tmp_path / "log")
    assert evaluated(run_dir).keys() == {0, 6}
    assert missed(run_dir) == dict.fromkeys(
        (2, 4), ("skipped", "version 0 was still being evaluated")
    )
    last = {key: value for row in rows(run_dir) for key, value in row.items()}
    assert last["eval/skipped"] == 2 and last["eval/version"] == 6 and last["step"] == 5
    assert "evaluations by step" in (tmp_path / "log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("engines", [0, 1])
def test_killed_run_repeats_the_evaluation_of_its_last_version(engines: int, tmp_path, monkeypatch):
    """All steps are made and saved. The same command then evaluates the last weights, and ends."""
    gate = tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    overrides = [f"eval.engines={engines}", "eval.every=0", *SCORED]
    process, run_dir = begin(tmp_path, "log", *overrides)
    try:
        wait_until(lambda: 0 in evaluated(run_dir), process, "first scores")
        gate.touch()
        wait_until(
            lambda: (
                complete_checkpoints(run_dir)[-1:] and complete_checkpoints(run_dir)[-1][0] == 6
            ),
            process,
            "the end",
        )
        kill(process)
        before = rows(run_dir)
        assert evaluated(run_dir).keys() == {0} and len(before) == 6
        gate.unlink()
        process, _ = begin(tmp_path, "again", *overrides)
        assert process.wait(DEADLINE_S) == 0
    finally:
        end(process, run_dir, tmp_path / "log", tmp_path / "again")
    assert (
        "The run ended before version 6, its last, was evaluated: this is done now"
        in (tmp_path / "again").read_text()
    )
    assert evaluated(run_dir).keys() == {0, 6} and not missed(run_dir)
    table = rows(run_dir)
    assert [row["step"] for row in table] == [*range(6)] and table[-1]["eval/version"] == 6
    assert [row["loss"] for row in table] == [row["loss"] for row in before]
    assert run(quickstart(tmp_path / "model", run_dir, *SETTINGS, *overrides)).stdout.startswith(
        f"{run_dir} is complete"
    )


@pytest.mark.matrix
def test_killed_engine_or_run_costs_the_evaluation_alone(tmp_path, monkeypatch):
    """First the engine dies during an evaluation, and is started again.

    Then the whole run dies during another evaluation.
    """
    gate = tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    overrides = ["checkpoint.keep_best=eval/reward/mean", "checkpoint.keep=1"]
    process, run_dir = begin(tmp_path, "log", *overrides, "max_steps=100000")

    def being_evaluated(after: int) -> int | None:
        running = [
            v
            for v, (state, _) in read_journal(run_dir).items()
            if state == BEGUN and v > after and v not in evaluated(run_dir)
        ]
        return running[0] if running else None

    def held_up() -> int:
        """Closes the gate, and returns the version whose evaluation waits there."""
        newest = max(read_journal(run_dir))
        gate.touch()
        wait_until(
            lambda: being_evaluated(newest) is not None, process, "an evaluation that is held up"
        )
        return being_evaluated(newest) or 0

    try:
        wait_until(lambda: 0 in evaluated(run_dir), process, "first scores")
        of_dead_engine = held_up()
        engine(process, run_dir).kill()
        wait_until(lambda: of_dead_engine in missed(run_dir), process, "notice of the loss")
        gate.unlink()
        wait_until(
            lambda: max(evaluated(run_dir)) > of_dead_engine, process, "scores by the new engine"
        )
        of_dead_run = held_up()
        wait_until(
            lambda: complete_checkpoints(run_dir)[-1][0] > of_dead_run + 2,
            process,
            "a later checkpoint",
        )
        saved = [step for step, _ in complete_checkpoints(run_dir)]
        assert of_dead_run in saved, "its score may be the best"
        kill(process)
        gate.unlink()
        resumed = complete_checkpoints(run_dir)[-1][0]
        process, _ = begin(tmp_path, "resumed", *overrides, f"max_steps={resumed + 4}")
        assert process.wait(DEADLINE_S) == 0
    finally:
        end(process, run_dir, tmp_path / "log", tmp_path / "resumed")
    lost = missed(run_dir)
    assert lost[of_dead_engine][0] == "failed" and lost[of_dead_run] == (
        "lost",
        "the run ended meanwhile",
    )
    assert f"the evaluation of version {of_dead_run} is lost" in (tmp_path / "resumed").read_text()
    assert {of_dead_engine, of_dead_run}.isdisjoint(evaluated(run_dir)) and {
        resumed,
        resumed + 4,
    } <= evaluated(run_dir).keys()
    due = set(range(0, resumed + 5, 2))
    assert evaluated(run_dir).keys() | lost.keys() == due and all(audits(run_dir).values())
    table = rows(run_dir)
    assert [row["step"] for row in table] == list(range(resumed + 4)) and all(
        row["engines/serving"] == 1 for row in table
    )
    last = {key: value for row in table for key, value in row.items()}
    assert (
        last["eval/failed"] == sum(state == "failed" for state, _ in lost.values())
        and last["eval/lost"] == 1
    )


def engine(process: subprocess.Popen, run_dir: Path) -> psutil.Process:
    """The evaluating engine's process, recognised by its port."""
    (file,) = run_dir.glob(".launch/train/*/rendezvous.json")
    port = json.loads(file.read_text())["engines"]["eval_engine"][0]["port"]
    lines = {child: title(child) for child in descendants(process)}
    return next(
        child
        for child, line in lines.items()
        if "megarl.generator.server" in line and f'"port": {port}' in line
    )
