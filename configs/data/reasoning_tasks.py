"""Tasks of the package reasoning-gym: their rows, and their own scorers as a reward.

python configs/data/reasoning_tasks.py TASK FOLDER [SETTING=NUMBER …] writes 256 held-out rows and
2,000 others, all with different questions: eval.jsonl and train.jsonl.
"""

import json
import sys
from functools import cache
from pathlib import Path

import reasoning_gym

scorer_of = cache(reasoning_gym.get_score_answer_fn)


def score(response: str, row: dict) -> float:
    """The score that the row's task gives to the response, from 0 to 1."""
    scorer = scorer_of(row["metadata"]["source_dataset"])
    return scorer(response.strip(), row)


def distinct_rows(task: str, rows: int, **settings: float) -> list[dict]:
    """The first `rows` rows of a task whose questions differ. Raises ValueError if there are fewer
    among a hundred times as many.
    """
    by_question = {}
    for row in reasoning_gym.create_dataset(task, size=100 * rows, seed=0, **settings):
        by_question.setdefault(row["question"], row)
        if len(by_question) == rows:
            return list(by_question.values())
    raise ValueError(f"{task} with {settings} has only {len(by_question)} different questions")


def write_split(
    folder: Path, task: str, held_out: int = 256, train: int = 2000, **settings: float
) -> None:
    """Writes eval.jsonl and train.jsonl, which share no question."""
    rows = distinct_rows(task, held_out + train, **settings)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("eval", rows[:held_out]), ("train", rows[held_out:])):
        lines = [json.dumps(row, default=str) + "\n" for row in part]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    task, folder, *assignments = sys.argv[1:]
    settings = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        settings[name] = json.loads(value)
    write_split(Path(folder), task, **settings)
