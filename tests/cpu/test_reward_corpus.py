"""The verifier on 3,400 pairs of more than 40 kinds (data/make_reward_corpus.py), and on 1,153
pairs labelled by hand (data/reward_corpus_by_hand.jsonl), in two processes with different hash
seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from json_files import json_lines

MADE = Path(__file__).parents[1] / "data" / "reward_corpus.jsonl"
BY_HAND = MADE.with_name("reward_corpus_by_hand.jsonl")
PROGRAM = """
import json, logging, sys
logging.disable(logging.CRITICAL)  # as in the worker
from megarl.rewards.verify import math_reward
rows = json.load(sys.stdin)
order = list(range(len(rows)))[:: int(sys.argv[1])]
verdicts = {row: math_reward(rows[row]["response"], rows[row]["reference"]) for row in order}
print(json.dumps([verdicts[row] for row in range(len(rows))]))
"""
# bound for the right answers of each kind that score 0; no wrong answer may score 1
RIGHT_SCORED_ZERO = 0


def pairs(path: Path) -> list[dict]:
    return json_lines(path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.long)])
def test_corpora_are_scored_as_labelled_in_every_process(every: int):
    """The second process also gets the pairs in the opposite order, so a score does not depend on
    earlier pairs.
    """
    rows = (pairs(MADE) + [{"kind": row["half"], **row} for row in pairs(BY_HAND)])[::every]
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, order],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for order, environment in zip(("1", "-1"), environments)
    ]
    first, second = (json.loads(process.communicate(json.dumps(rows))[0]) for process in processes)
    differing = [row for row, a, b in zip(rows, first, second, strict=True) if a != b]
    assert differing == []
    assert [row for row, score in zip(rows, first, strict=True) if score and not row["right"]] == []
    missed = Counter(
        row["kind"] for row, score in zip(rows, first, strict=True) if row["right"] and not score
    )
    assert not {kind: count for kind, count in missed.items() if count > RIGHT_SCORED_ZERO}


def test_the_corpora_are_large_and_varied():
    generated = pairs(MADE)
    by_hand = pairs(BY_HAND)
    kinds = Counter(row["kind"] for row in generated)
    assert len(generated) >= 3400 and len(kinds) >= 40
    assert min(Counter(row["right"] for row in generated).values()) >= 1200
    assert (
        min(Counter((row["half"], row["right"]) for row in by_hand).values()) >= 75
        and len(by_hand) >= 600
    )
    for rows in (generated, by_hand):
        assert len({(row["reference"], row["response"]) for row in rows}) == len(rows), (
            "no pair is there twice"
        )
