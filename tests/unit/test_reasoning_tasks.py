"""The rows and the reward of configs/examples/smollm2.yaml (the package reasoning-gym)."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym==0.1.25")

SCRIPT = Path(__file__).parents[2] / "configs/data/reasoning_tasks.py"
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def tasks() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_reward_is_the_score_of_the_rows_task(tasks: dict[str, Any]) -> None:
    (row,) = tasks["distinct_rows"]("chain_sum", 1, **SUMS)
    score = tasks["score"]
    assert score(f" {row['answer']}\n", row) == 1.0
    assert score(f"it is {row['answer']}", row) == pytest.approx(
        len(row["answer"]) / len(f"it is {row['answer']}")
    )
    assert score("no number", row) == 0.0
    word = {"answer": "nus", "metadata": {"source_dataset": "spell_backward"}}
    assert score("nut", word) == pytest.approx(2 / 3)


def test_rows_of_a_task_have_different_questions(tasks: dict[str, Any]) -> None:
    rows = tasks["distinct_rows"]("chain_sum", 150, **SUMS)
    assert len({row["question"] for row in rows}) == len(rows) == 150
    with pytest.raises(ValueError, match="chain_sum with .* has only 200 different questions"):
        tasks["distinct_rows"]("chain_sum", 201, **SUMS)


def test_split_shares_no_question(tasks: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    tasks["write_split"](folder, "chain_sum", held_out=20, train=30, **SUMS)
    questions = []
    for name, count in (("eval", 20), ("train", 30)):
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        questions += [json.loads(line)["question"] for line in lines]
        assert len(lines) == count
    assert len(set(questions)) == 50
