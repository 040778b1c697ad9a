"""Tasksets of verifiers 0.4, played by a process of another interpreter. The policy is a fake."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hub_play import FAILED, ROOT, TOKENIZER, Played, Saying
from json_files import json_lines

from megarl.agents.hubs.verifiers import Verifiers, write_rows
from megarl.base.rollout_types import UNANSWERED, Group
from megarl.config.errors import ConfigError

THERE = os.environ.get("MEGARL_VERIFIERS_V1_PYTHON", str(ROOT / "envs/verifiers-v1/bin/python"))
HERE: dict[str, Any] = {
    "python": THERE,
    "folder": str(Path(__file__).with_name("hub_v1")),
    "environment": "sums",
}
ROWS: dict[str, Any] = {
    "train": {"exclude": {"idx": [0]}},
    "eval": {"taskset": {"first": 40}, "limit": 1},
}
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not Path(THERE).exists(), reason="no interpreter with verifiers 0.4 (docs/agents.md)"
    ),
]


def args(kind: str = "fine", turns: int = 1, tools: bool = False) -> dict[str, Any]:
    """Arguments of the taskset. `kind` says how the harness or the scoring fails."""
    agent = {
        "runtime": {"type": "subprocess"},
        "harness": {"id": "sums", "turns": turns, "kind": kind},
    }
    return {"taskset": {"task": {"kind": kind, "tools": tools}}, "agent": agent}


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("rows") / "train.jsonl"
    write_rows({**HERE, "rows": ROWS, "args": args()}, {"train": file})
    return json.loads(file.read_text().splitlines()[0])


def play(
    row: dict[str, Any], policy: Saying, n: int = 1, grace_s: float = 15.0, **arguments: Any
) -> Group:
    with Played(
        lambda: Verifiers(TOKENIZER, **{**HERE, "deadline_s": 120.0, **arguments})
    ) as played:
        played.rollout.grace_s = grace_s
        return played(policy, row, n)


def test_rows_are_the_tasks_that_are_selected(tmp_path: Path):
    files = {split: tmp_path / f"{split}.jsonl" for split in ("train", "eval")}
    assert (
        write_rows({**HERE, "rows": ROWS, "args": args()}, files)
        == f"{files['train']}: 3 rows\n{files['eval']}: 1 rows\n"
    )
    rows = {split: json_lines(file) for split, file in files.items()}
    assert [row["task"]["prompt"] for row in rows["train"]] == ["2+1", "3+1", "4+1"]
    assert rows["eval"][0]["prompt"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "40+1"},
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"rows": {"eval": {}}, "args": args()},
            r"a taskset has no splits: rollout\.args\.rows\.train must say",
        ),
        (
            {"rows": {"train": {"take": 3}}, "args": args()},
            "its train rows cannot be had: ValidationError: .* take Extra inputs are not",
        ),
        (
            {"rows": {"train": {"taskset": {"task": {}}}}, "args": args()},
            r"belongs in args\.taskset\.task",
        ),
        (
            {"args": {"taskset": {"id": "others"}}},
            r"args\.taskset\.id=others is another one than environment=sums",
        ),
        (
            {"args": {"taskset": {"task": {"size": 3}}}},
            "it cannot be loaded: ValidationError: .*task.size Extra inputs are not permitted",
        ),
        (
            {"args": {"agent": {"client": {"type": "eval", "base_url": "http://localhost"}}}},
            "the policy would play none of its agents",
        ),
        ({"environment": "no-such-sums"}, "its module no_such_sums is not installed there"),
    ],
)
def test_rows_that_cannot_be_had_are_refused_with_the_reason(
    arguments: dict[str, Any], message: str, tmp_path: Path
):
    with pytest.raises(ConfigError, match=message):
        write_rows({**HERE, **arguments}, {"train": tmp_path / "train.jsonl"})


def test_reward_and_metrics_are_those_of_the_trace(row: dict[str, Any]):
    samples = {
        sample.text: sample for sample in play(row, Saying("3", "17"), n=2, args=args()).samples
    }
    assert {text: sample.reward for text, sample in samples.items()} == {
        "3<eos>": 0.75,
        "17<eos>": 0.0,
    }
    right = samples["3<eos>"].metrics
    assert [right[name] for name in ("right", "short", "letters", "calls")] == [
        1,
        1,
        1,
        1,
    ] and not any(map(right.get, FAILED))
    assert samples["17<eos>"].metrics["letters"] == 2


def test_turns_and_tools_of_an_episode_are_one_sequence(row: dict[str, Any]):
    called = '<tool_call>{"name": "calculator_add", "arguments": {"a": 2, "b": 1}}</tool_call>'
    policy = Saying(called, "3")
    [sample] = play(row, policy, args=args(turns=2, tools=True)).samples
    begin = "<bos><tools>calculator_add<system>Add.<user>2+1<assistant>"
    assert policy.prompts == [begin, f"{begin}{called}<eos><tool>3<assistant>"]
    assert sample.text == f"{called}<eos><tool>3<assistant>3<eos>" and sample.reward == 0.75
    sampled = [
        token
        for token, learned in zip(sample.token_ids, sample.policy_mask, strict=True)
        if learned
    ]
    assert sampled == [
        *TOKENIZER.encode_text(called),
        TOKENIZER.eos_id,
        *TOKENIZER.encode_text("3"),
        TOKENIZER.eos_id,
    ]
    assert sample.metrics["branches"] == 1 and sample.metrics["calls"] == 2


@pytest.mark.parametrize(
    "kind, counted, arguments, message",
    [
        ("raises", "failed_environment", {}, "RuntimeError: the board is broken"),
        ("function", "failed_reward", {}, "TaskError: .*KeyError: 'rubric'"),
        (
            "nan",
            "failed_reward",
            {},
            r"not all finite numbers, with at most 32 names: \{'reward': nan",
        ),
        ("late", "failed_deadline", {"deadline_s": 15.0}, "it took longer than 15 s"),
        (
            "hangs",
            "failed_worker",
            {"deadline_s": 15.0, "grace_s": 2.0, "retries": 0},
            "it did not answer within 17 s",
        ),
        ("dies", "failed_worker", {"retries": 0}, "it ended with status 3"),
    ],
)
def test_failed_episode_is_counted_and_rewarded_as_a_crash(
    kind: str,
    counted: str,
    arguments: dict[str, Any],
    message: str,
    row: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
):
    [sample] = play(row, Saying("3"), on_crash=-0.5, args=args(kind), **arguments).samples
    assert sample.reward == -0.5 and sample.text == "3<eos>"
    assert [name for name in FAILED if sample.metrics[name]] == [counted]
    assert re.search(message, capfd.readouterr().out)


def test_a_row_of_another_task_is_not_played(
    row: dict[str, Any], capfd: pytest.CaptureFixture[str]
):
    for changed in ({"task": {**row["task"], "answer": "4"}}, {"taskset": "products"}):
        policy = Saying("3")
        [sample] = play({**row, **changed}, policy, args=args(), retries=0).samples
        assert sample.finish_reason == UNANSWERED and not policy.prompts
        assert "write the rows again with megarl rows" in capfd.readouterr().out
