"""Real runs with a user's own reward functions: each step's report, and the end of a run whose
scores fail.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from json_files import write_json_lines
from run_tools import PROMPTS, SAMPLES, quickstart, rows, run

pytestmark = pytest.mark.timeout(900)


def arguments(model: Path, run_dir: Path, *overrides: str) -> list[str]:
    return quickstart(model, run_dir, "trainer.tp=1", *overrides)


def test_too_many_failed_rewards_end_the_run(model: Path, tmp_path: Path) -> None:
    """Step 3 is the first with samples of version 2.

    The algorithm is online DPO, and a prompt's worst response is the failed one.
    """
    run_dir = tmp_path / "run"
    data = tmp_path / "train.jsonl"
    write_json_lines(
        data, ({"question": f"{i}+1=", "answer": str(i + 1), "level": i % 2} for i in range(8))
    )
    overrides = [
        f"data.train.source={data}",
        "data.eval=null",
        "reward.name=reward_functions:by_level",
        "reward.failed_score=-0.5",
        "algorithm.name=online_dpo",
    ]
    completed = run(arguments(model, run_dir, *overrides))
    assert completed.returncode == 1 and "step 3: " in completed.stderr, completed.stderr
    expected = (
        "step 3: reward.name=reward_functions:by_level: of 16 samples 16 scores failed: 16 "
        "errors, more than"
    )
    message = completed.stderr[completed.stderr.index(expected) :]
    assert (
        "reward.max_failed_fraction=0.5; for example" in message
        and ": no\nnumber at level" in message
        and "Traceback" not in completed.stderr
    )
    table = rows(run_dir)
    assert [row["reward/errors"] for row in table] == [PROMPTS] * 3
    assert all(
        row["reward/failed_fraction"] == 1 / SAMPLES and row["reward/timeouts"] == 0
        for row in table
    )
    assert all(
        row["pairs/fraction"] == 1 and row["samples/trained"] == 2 * PROMPTS for row in table
    ), "of each prompt best and worst"
    assert table[0]["loss"] == pytest.approx(math.log(2), abs=1e-5) and table[0][
        "pairs/margin"
    ] == pytest.approx(0, abs=1e-5)
    assert table[2]["pairs/margin"] != 0 and all(row["sync/audit_ok"] for row in table)
    assert all(
        row["reward/level/mean"] in (0, 0.25, 0.5, 0.75, 1) and 1 <= row["reward/tokens/mean"] <= 16
        for row in table
    )
    shown = " ".join(completed.stdout.split())
    assert shown.count(": scoring failed (error): no number at level") == 1, (
        "at once, and the first alone"
    )
    assert "step 1: 4 scores failed: 4 errors; the last: no number at level" in shown
    assert all(row["time/reward_s"] > 0 and row["rollout/failed_fraction"] == 0 for row in table)
    assert f"The step's samples are in {run_dir}/rollouts/step_000003.txt" in message
    text = (run_dir / "rollouts/step_000000.txt").read_text()
    assert (
        text.count("reward -0.5 (failed: error), versions 0 to 0") == PROMPTS
        and "\n  ! no\n  ! number at level" in text
    )
    assert "scored one of level 1\n" in (run_dir / "logs/reward.0.log").read_text()


@pytest.mark.long
def test_a_function_that_raises_ends_the_run_by_its_own_line(model: Path, tmp_path: Path) -> None:
    completed = run(arguments(model, tmp_path / "run", "reward.name=reward_functions:broken"))
    assert completed.returncode == 1
    first, second = completed.stderr.splitlines()[:2]
    assert first.startswith("megarl: reward.name=reward_functions:broken: ") and first.endswith(
        ": return grades[answer]"
    )
    lines = (Path(__file__).parent / "reward_functions.py").read_text().splitlines()
    number = next(
        number for number, line in enumerate(lines, start=1) if "return grades[answer]" in line
    )
    assert f"reward_functions.py, line {number}, in broken" in first and second.startswith(
        "KeyError: "
    )
    assert (
        "Traceback" not in completed.stderr
        and "Traceback" in (tmp_path / "run/logs/reward.0.log").read_text()
    )


TURNS = ("rollout.name=turn_rollouts:two_turns", "eval.every=0", "max_steps=3")
CREDIT = {
    "returns": ("algorithm.credit=returns", "algorithm.turn_gamma=0.5"),
    "critic": (
        "algorithm.advantage=critic",
        "algorithm.critic_targets=vtrace",
        "algorithm.credit=returns",
    ),
    "ignored": (),
}


@pytest.mark.long
@pytest.mark.parametrize("credit", CREDIT)
def test_aipo_learns_from_rewards_at_turns(model: Path, tmp_path: Path, credit: str) -> None:
    """All final rewards are equal, so without them nothing is learned."""
    completed = run(arguments(model, tmp_path / "run", *TURNS, *CREDIT[credit]))
    assert completed.returncode == 0, completed.stderr
    table = rows(tmp_path / "run")
    assert all(row["reward/mean"] == 1 and row["turns/mean"] == 2 for row in table)
    assert all(0.5 < row["reward/turns/mean"] <= 1.5 for row in table)
    assert all(row["reward/turns/sum"] == 2 * row["reward/turns/mean"] for row in table)
    is_ignored = credit == "ignored"
    assert ("its rewards at turns are ignored" in " ".join(completed.stdout.split())) == is_ignored
    trained = sum(row["samples/trained"] for row in table)
    assert (trained == 0) == is_ignored
    if is_ignored:
        assert all(row["reward/turns/ignored_fraction"] == 1 for row in table)
    elif credit == "critic":
        assert all(0 <= row["value/rho_clipped_fraction"] <= 1 for row in table)
        assert all(row["returns"] > 0 for row in table)
    else:
        assert all(row["zero_advantage_fraction"] < 1 for row in table)
    written = (tmp_path / "run/rollouts/step_000000.txt").read_text()
    assert "rewards of turns " in written
