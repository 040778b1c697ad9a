"""Whole runs with teachers.

The first has its teacher on engines, one of which dies, and no reward. The second has it on the
trainer's ranks, and a reward, and is resumed.
"""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import pytest
from json_files import write_json_lines
from run_tools import (
    OVERRIDES,
    descendants,
    make_model,
    rows,
    started,
    succeed,
    title,
    wait_for_steps,
    wait_until,
)

from megarl.plan.checkpoints import complete_checkpoints

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
STEPS = 6


def test_run_without_reward_survives_its_teacher_engine(tmp_path: Path) -> None:
    """Responses are cut and continue under newer weights. No prompt has an answer."""
    model = make_model(tmp_path / "model")
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    data = tmp_path / "train.jsonl"
    teacher = make_model(tmp_path / "teacher", hidden_size=64, initializer_range=0.3)
    write_json_lines(data, ({"question": f"{i % 10}+1="} for i in range(8 * STEPS)))
    settings = [
        "configs/quickstart.yaml", f"model.path={model}", f"run_dir={run_dir}", *OVERRIDES,
        f"max_steps={STEPS}", "trainer.tp=1",
        f"data.train.source={data}", "data.train.prompt_key=question", "data.eval=null",
        "rollout.prompts_per_step=8", "rollout.n=1",
        f"roles.teacher.path={teacher}", "roles.teacher.kv_cache_tokens=4096",
        "algorithm.name=distill", "reward.name=none",
        "algorithm.distill.over=top_k", "algorithm.distill.top_k=8", "async.partial_rollout=resume",
    ]  # fmt: skip
    with started(["train", *settings], log) as process:
        wait_for_steps(process, run_dir, 1)
        serves = [child for child in descendants(process) if str(teacher) in title(child)]
        psutil.Process(min(child.pid for child in serves)).kill()
        assert process.wait(400) == 0, log.read_text()[-4000:]
    driver = (run_dir / "logs/generator.0.log").read_text()
    assert "teacher 0 is lost, 0 are left" in driver and "teacher 0 serves again" in driver
    assert f"Role teacher: {teacher}, frozen, on 1 engine TP1\n" in log.read_text()
    table = rows(run_dir)
    assert len(table) == STEPS and all(
        row["sync/audit_ok"] and row["grad_norm"] > 0 for row in table
    )
    assert all("zero_advantage_fraction" not in row for row in table), (
        "or the run is told that equal rewards teach nothing"
    )
    assert all(row["reward/mean"] == 0 and "distill/teacher/failed" not in row for row in table)
    assert all(row["distill/kl"] == row["distill/teacher/kl"] > 0 for row in table)


def test_a_resumed_run_has_its_teachers_and_its_reference(tmp_path: Path) -> None:
    """A teacher of another size over the whole vocabulary, beside a reward; and a reference model
    of another size than the policy.
    """
    model = make_model(tmp_path / "model")
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    teacher = make_model(tmp_path / "other", hidden_size=64, initializer_range=0.3)
    settings = [
        "configs/quickstart.yaml", f"model.path={model}", f"run_dir={run_dir}", *OVERRIDES,
        f"max_steps={STEPS}", "data.eval=null",
        f"roles.teacher.path={teacher}", "roles.teacher.on=trainer",
        "algorithm.distill.over=vocabulary", "algorithm.distill.coef=0.5",
        f"roles.reference.path={teacher}", "algorithm.kl_coef=0.1", "rollout.temperature=0.8",
    ]  # fmt: skip
    with started(["train", *settings], log) as process:
        wait_until(lambda: len(complete_checkpoints(run_dir)) >= 1, process, "first checkpoint")
    again = succeed(["train", *settings])
    assert (
        f"Role teacher: {teacher}, frozen, on the trainer's ranks\n" in log.read_text()
        and "Reference model: what" not in again.stdout
    )
    table = rows(run_dir)
    assert [row["step"] for row in table] == list(range(STEPS))
    for row in table:
        assert (
            row["distill/teacher/kl"] > 0
            and math.isfinite(row["kl/mean"])
            and row["kl/mean"] > 0.01
        ), "from the first step on"
        assert row["sync/audit_ok"]
    planned = succeed(["plan", *settings])
    assert " frozen " in planned.stdout, planned.stdout + planned.stderr
