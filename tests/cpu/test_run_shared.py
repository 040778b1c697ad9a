"""A whole run whose trainer rank and engine share a slot (cluster.share_gpus): it loses each of
them, and goes on with sides apart.
"""

from __future__ import annotations

import re

import pytest
from run_tools import (
    descendants,
    make_model,
    quickstart,
    rows,
    started,
    title,
    wait_for_more_steps,
    wait_for_steps,
    wait_for_text,
)

from megarl.plan.checkpoints import complete_checkpoints

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
DEADLINE_S = 240


def test_run_with_shared_gpus_survives_its_engine(tmp_path):
    """The run takes turns, as a co-located synchronous one does, and ends with its trainer.

    The engine is started after the trainer has taken its peak, and started again beside it.

    The run then resumes with sides apart.
    """
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    model = make_model(tmp_path / "model")
    common = quickstart(model, run_dir, "trainer.tp=1", "eval.limit=1")
    turns = ["max_steps=100000", "cluster.share_gpus=true", "async.capacity=0"]
    with started([*common, *turns], log) as process:
        wait_for_steps(process, run_dir, 2)
        next(
            child for child in descendants(process) if "megarl.generator.server" in title(child)
        ).kill()
        driver_log = run_dir / "logs/generator.0.log"
        wait_for_text(process, driver_log, "engines [0] serve version")
        wait_for_more_steps(process, run_dir, 4)
        next(child for child in descendants(process) if "trainer 0" in title(child)).kill()
        process.wait(timeout=60)
    output = log.read_text()
    assert process.returncode == 1 and "trainer.0 was killed by SIGKILL" in output, output
    assert "Shared GPUs: trainer and engines are on the same GPUs (cluster.share_gpus)" in output
    table = rows(run_dir)
    assert all(row["staleness/max"] == 0 for row in table)
    assert all(
        row["sync/audit_ok"] and row["memory/trainer_gib"] > 0.1 and row["memory/engine_gib"] > 0.1
        for row in table
    )
    last, _ = complete_checkpoints(run_dir)[-1]
    with started([*common, f"max_steps={last + 2}", "cluster.share_gpus=false"], log) as process:
        process.wait(timeout=DEADLINE_S)
    output = log.read_text()
    assert process.returncode == 0 and "Changed: cluster.share_gpus=false, was true" in output, (
        output
    )
    assert [row["step"] for row in rows(run_dir)] == list(range(last + 2))
    assert re.search(
        r"most memory of a rank +trainer \d\.\d\d GiB, planned \d\.\d\d; engine \d\.\d\d GiB, "
        r"planned \d\.\d\d",
        output,
    )
