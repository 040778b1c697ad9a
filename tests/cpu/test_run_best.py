"""A whole run that keeps its best checkpoint by a held-out score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_tools import OVERRIDES, make_model, succeed

from megarl.evaluation.scores import read_results
from megarl.plan.checkpoints import complete_checkpoints

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_the_best_is_kept_across_a_resume_exported_and_evaluated(tmp_path: Path) -> None:
    """At this learning rate weights change, but no answers do.

    So all scores are equal, and the earliest is the best.
    """
    model = make_model(tmp_path / "model")
    run_dir = tmp_path / "run"
    settings = [
        "checkpoint.keep=1",
        "checkpoint.keep_best=eval/pass@1",
        "eval.every=2",
        "trainer.optimizer.lr=1.0e-7",
    ]
    arguments = [
        "configs/quickstart.yaml",
        f"model.path={model}",
        f"run_dir={run_dir}",
        *OVERRIDES,
        *settings,
    ]
    for steps in (4, 6):
        completed = succeed(["train", *arguments, f"max_steps={steps}"])
        assert [step for step, _ in complete_checkpoints(run_dir)] == [2, steps]
        score = read_results(run_dir)[-1]["pass@1"]
        assert (
            f"  best checkpoint         step 2, eval/pass@1 {score:.3f} (--best of megarl export "
            "and megarl eval)\n" in completed.stdout
        )
    evaluated = succeed(["eval", *arguments, "--best", "--json"])
    result = json.loads(evaluated.stdout)
    assert (result["weights"], result["pass@1"]) == (f"{run_dir}/checkpoints/step_000002", score)
    best = (
        f"Weights: the checkpoint {run_dir}/checkpoints/step_000002, the best by eval/pass@1: "
        f"{score:.3f}\n"
    )
    assert best in evaluated.stderr
    exported = succeed(["export", *arguments, "--best", "--output", str(tmp_path / "exported")])
    assert best in exported.stdout, exported.stderr
    succeed(["export", *arguments, "--output", str(tmp_path / "newest")])
    folders = (tmp_path / "exported", run_dir / "evaluated", tmp_path / "newest")
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] != weights[2]
