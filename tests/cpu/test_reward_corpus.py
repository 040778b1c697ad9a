"""The verifier on 3,000 pairs of more than 30 kinds (data/make_reward_corpus.py), in two processes that hash differently."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

CORPUS = Path(__file__).parents[1] / "data" / "reward_corpus.jsonl"
PROGRAM = """
import json, logging, sys
logging.disable(logging.CRITICAL)  # as in the worker
from megarl.rewards.verify import math_reward
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
order = list(range(len(rows)))[:: int(sys.argv[2])]
verdicts = {row: math_reward(rows[row]["response"], rows[row]["reference"]) for row in order}
print(json.dumps([verdicts[row] for row in range(len(rows))]))
"""
RIGHT_SCORED_ZERO = 0  # of each kind's right answers, at most; of wrong ones none may score 1


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.timeout(300)
def test_the_corpus_is_scored_as_it_is_labelled_in_every_process(rows: list[dict]):
    """The second process also meets the pairs in the opposite order: nothing that was asked before decides."""
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, CORPUS, order], stdout=subprocess.PIPE, text=True, env=environment)
        for order, environment in zip(("1", "-1"), environments)
    ]
    first, second = (json.loads(process.communicate()[0]) for process in processes)
    differing = [row for row, a, b in zip(rows, first, second, strict=True) if a != b]
    assert differing == []
    assert [row for row, score in zip(rows, first, strict=True) if score and not row["right"]] == []
    missed = Counter(row["kind"] for row, score in zip(rows, first, strict=True) if row["right"] and not score)
    assert not {kind: count for kind, count in missed.items() if count > RIGHT_SCORED_ZERO}


def test_the_corpus_is_large_and_varied(rows: list[dict]):
    kinds = Counter(row["kind"] for row in rows)
    assert len(rows) >= 3000 and len(kinds) >= 30
    assert min(Counter(row["right"] for row in rows).values()) >= 1200
    assert len({(row["reference"], row["response"]) for row in rows}) == len(rows), "no pair is there twice"
