"""megarl run: warm start and training with one command, which continues wherever it was ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_tools import rows, run, started, succeed, wait_until

from megarl.evaluation.scores import read_results
from megarl.plan.checkpoints import checkpoint_path, complete_checkpoints

pytestmark = pytest.mark.timeout(900)
STEPS = 40
EVERY = 10


@pytest.mark.long
def test_killed_warm_start_goes_on_and_training_follows(tmp_path: Path) -> None:
    """A warm start in two parts makes bit-equal weights to those of an uninterrupted one."""
    folder = tmp_path / "first"
    log = tmp_path / "log"
    assert run(["init", str(folder)]).returncode == 0
    (folder / "held_out.jsonl").write_text(
        "".join((folder / "eval.jsonl").read_text().splitlines(keepends=True)[:32])
    )
    held_out = (
        f"sft.eval={{source: {folder}/held_out.jsonl, prompt_key: prompt, "
        f"demonstration_key: demonstration}}"
    )
    settings = [
        held_out,
        f"sft.steps={STEPS}",
        f"sft.save_every={EVERY}",
        "sft.every=4",
        "sft.batch_size=32",
    ]
    settings += [
        "max_steps=2",
        "rollout.prompts_per_step=4",
        "rollout.n=2",
        "eval.limit=8",
        "observe.trackers=[]",
    ]

    def arguments(command: str, run_dir: Path, *overrides: str) -> list[str]:
        return [command, f"{folder}/run.yaml", f"run_dir={run_dir}", *settings, *overrides]

    uninterrupted = tmp_path / "whole"
    broken = tmp_path / "broken"
    succeed(arguments("sft", uninterrupted))
    with started(arguments("run", broken), log) as process:
        wait_until(checkpoint_path(broken / "sft", EVERY).exists, process, "first checkpoint")
    [*_, (step, saved)] = complete_checkpoints(broken / "sft")
    assert 0 < step < STEPS and not (broken / "sft/hf").exists()

    refused = run(arguments("run", broken, "sft.batch_size=16"))
    message = (
        "sft.batch_size=16: the warm start that was interrupted had 32; keep that, or remove "
        f"{saved.parent} to begin anew"
    )
    assert refused.returncode == 2 and message in refused.stderr
    again = succeed(arguments("run", broken))
    assert (
        f"Weights: the checkpoint {saved}\n" in again.stdout
        and f"Supervised weights are in {broken}/sft/hf\n" in again.stdout
    )
    assert (
        f"Weights: the warm start in sft.output={broken}/sft/hf" in again.stdout
        and f"{broken}: 2 steps" in again.stdout
    )
    losses = [
        [(row["step"], row["loss"], row.get("eval/loss")) for row in rows(root / "sft")]
        for root in (uninterrupted, broken)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    assert (uninterrupted / "sft/hf/model.safetensors").read_bytes() == (
        broken / "sft/hf/model.safetensors"
    ).read_bytes()
    assert complete_checkpoints(broken / "sft") == complete_checkpoints(uninterrupted / "sft") == []
    assert f"{broken} is complete: 2 of 2 steps" in run(arguments("run", broken)).stdout


@pytest.mark.long
def test_engines_evaluate_a_warm_start_between_its_parts(tmp_path: Path) -> None:
    """The scores are in the rows of their steps, and the weights are those of a warm start in one
    part.
    """
    folder = tmp_path / "first"
    assert run(["init", str(folder)]).returncode == 0

    def arguments(run_dir: Path, *overrides: str) -> list[str]:
        settings = ["sft.steps=5", "sft.batch_size=32", "eval.limit=8", "observe.trackers=[]"]
        return ["sft", f"{folder}/run.yaml", f"run_dir={run_dir}", *settings, *overrides]

    refused = run(arguments(tmp_path / "none", "data.eval=null", "sft.score_every=2"))
    assert refused.returncode == 2
    assert "sft.score_every=2: needs a held-out set: set data.eval.source" in refused.stderr

    succeed(arguments(tmp_path / "whole"))
    printed = succeed(arguments(tmp_path / "parts", "sft.score_every=2")).stdout
    parts = tmp_path / "parts/sft"
    evaluated = {row["step"]: row for row in rows(parts) if "eval/version" in row}
    assert {step: row["eval/version"] for step, row in evaluated.items()} == {1: 2, 3: 4, 4: 5}
    assert all(row["eval/prompts"] == 8 for row in evaluated.values())
    assert [result["version"] for result in read_results(parts)] == [2, 4, 5]
    assert printed.count("held-out scores of") == 3
    assert [row["loss"] for row in rows(parts)] == [
        row["loss"] for row in rows(tmp_path / "whole/sft")
    ]
    weights = [tmp_path / name / "sft/hf/model.safetensors" for name in ("whole", "parts")]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    last = parts / "eval/version_000005.json"
    result = json.loads(last.read_text())
    last.unlink()  # as if the last evaluation had been interrupted
    printed = succeed(arguments(tmp_path / "parts", "sft.score_every=2")).stdout
    assert "is there already: only its evaluation is missing" in printed
    again = json.loads(last.read_text())
    assert again | {"seconds": 0} == result | {"seconds": 0}
    printed = succeed(arguments(tmp_path / "parts", "sft.score_every=2")).stdout
    assert "is there already: nothing to do" in printed
