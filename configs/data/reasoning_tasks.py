"""Tasks of the package reasoning-gym: their rows, and their own scorers as a reward.

python configs/data/reasoning_tasks.py TASK FOLDER [SETTING=NUMBER …] writes 256 held-out rows and
2,000 others, all with different questions: eval.jsonl and train.jsonl.
"""

import json
import sys
from functools import cache
from itertools import count
from pathlib import Path

import reasoning_gym

HELD_OUT_ROWS = 256
TRAIN_ROWS = 2000

scorer_of = cache(reasoning_gym.get_score_answer_fn)


def score(response: str, row: dict) -> float:
    """The score that the row's task gives to the response, from 0 to 1."""
    scorer = scorer_of(row["metadata"]["source_dataset"])
    return scorer(response.strip(), row)


def distinct_rows(task: str, rows: int, **settings: float) -> list[dict]:
    """The first `rows` rows of a task whose questions differ."""
    by_question = {}
    for seed in count():
        for row in reasoning_gym.create_dataset(task, size=rows, seed=seed, **settings):
            by_question.setdefault(row["question"], row)
        if len(by_question) >= rows:
            return list(by_question.values())[:rows]
    raise AssertionError


def write_rows(path: Path, rows: list[dict]) -> None:
    lines = [json.dumps(row, default=str) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    task, folder, *assignments = sys.argv[1:]
    settings = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        settings[name] = json.loads(value)
    rows = distinct_rows(task, HELD_OUT_ROWS + TRAIN_ROWS, **settings)
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_rows(Path(folder) / "eval.jsonl", rows[:HELD_OUT_ROWS])
    write_rows(Path(folder) / "train.jsonl", rows[HELD_OUT_ROWS:])
