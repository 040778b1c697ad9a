"""metrics.jsonl: whole lines, cut on resume, followed while it grows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.observe.metrics import (
    MetricsTail,
    MetricsWriter,
    damaged_lines,
    parse_lines,
    read_metrics,
)


def write_steps(run_dir: Path, steps: range, resume_step: int = 0, mark: str = "first") -> None:
    writer = MetricsWriter(run_dir, resume_step=resume_step)
    for step in steps:
        writer.write(step, {"loss": step / 4, mark: 1})
    writer.close()


def test_a_line_is_strict_json_with_the_values_given(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(
        3,
        {
            "loss": math.nan,
            "reward/mean": 0.25,
            "sync/audit_ok": True,
            "sync/bytes": 7,
            "absent": None,
            "grad_norm": math.inf,
        },
    )
    # readable while the writer is open
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    strict = json.loads(line, parse_constant=refuse)
    assert strict == {
        "step": 3,
        "loss": None,
        "reward/mean": 0.25,
        "sync/audit_ok": True,
        "sync/bytes": 7,
        "grad_norm": None,
    }
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row["loss"])
    assert row["sync/audit_ok"] is True
    writer.close()


def test_resume_cuts_torn_line_and_steps_that_are_repeated(tmp_path: Path) -> None:
    write_steps(tmp_path, range(6))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 6, "lo')
    write_steps(tmp_path, range(4, 7), resume_step=4, mark="second")
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert ["second" in row for row in rows] == [False] * 4 + [True] * 3


@given(cut=st.integers(0, 200), resume_step=st.integers(0, 7))
@settings(max_examples=50, deadline=None)
def test_crash_at_any_byte_leaves_whole_steps(
    tmp_path_factory: pytest.TempPathFactory, cut: int, resume_step: int
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    write_steps(run_dir, range(6))
    path = run_dir / "metrics.jsonl"
    all_bytes = path.read_bytes()
    prefix = all_bytes[:cut]
    path.write_bytes(prefix)
    survivors = prefix.count(b"\n")
    assert [row["step"] for row in read_metrics(path)] == list(range(survivors))
    lacks_newline = cut > 0 and len(prefix) == cut and all_bytes[cut : cut + 1] == b"\n"
    first_step = min(survivors + lacks_newline, resume_step)
    write_steps(run_dir, range(first_step, first_step + 2), resume_step=resume_step)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(
        range(first_step + 2)
    )


GARBAGE = (
    b"garbage\n",
    b"[1]\n",
    b'{"loss": 1}\n',
    b"\xff\x00\n",
    b"torn\rtorn\n",
    b"null\n",
    b"\n",
    b"[" * 100_000 + b"\n",
)


@pytest.mark.parametrize("damage", GARBAGE)
def test_damaged_lines_are_skipped_and_listed(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, range(2))
    with open(path, "ab") as file:
        file.write(damage)
    tail = MetricsTail(path)
    assert tail.poll() == 2
    writer = MetricsWriter(tmp_path, resume_step=2)
    assert path.read_bytes().endswith(b'"first": 1}\n') and damaged_lines(path) == [], (
        "what comes after the last step that is kept goes"
    )
    writer.close()
    undamaged = path.read_bytes()
    path.write_bytes(
        undamaged[: undamaged.index(b"\n") + 1] + damage + undamaged[undamaged.index(b"\n") + 1 :]
    )
    write_steps(tmp_path, range(2, 4), resume_step=2)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]
    assert damaged_lines(path) == [2]
    tail = MetricsTail(path)
    assert tail.poll() == 4
    assert tail.poll() == 0
    assert [row["step"] for row in tail.rows] == [0, 1, 2, 3]


def test_last_line_without_newline_is_kept_on_resume(tmp_path: Path) -> None:
    write_steps(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    write_steps(tmp_path, range(3, 4), resume_step=3)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]
    assert damaged_lines(path) == []


def test_lines_end_at_newlines_only() -> None:
    line = json.dumps({"step": 1, "name": "a\u2028b\x85c\x0b"}, ensure_ascii=False).encode() + b"\n"
    assert [end for end, _ in parse_lines(line)] == [len(line)]


def test_tail_follows_growth_half_lines_and_a_resumed_run(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    assert tail.poll() == 0
    write_steps(tmp_path, range(3))
    assert tail.poll() == 3
    assert tail.poll() == 0
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step"')
        file.flush()
        assert tail.poll() == 0
        file.write(b': 3, "loss": 0}\n')
    assert tail.poll() == 1
    MetricsWriter(tmp_path, resume_step=2).close()
    assert tail.poll() == 0
    assert [row["step"] for row in tail.rows] == [0, 1]
    write_steps(tmp_path, range(2, 4), resume_step=2, mark="second")
    assert tail.poll() == 2
    assert tail.rows == read_metrics(tmp_path / "metrics.jsonl")


def test_distributions_are_quantiles_in_the_line(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"reward/mean": 0.5}, {"reward": [0.0, 1.0, 0.25], "response_tokens": []})
    writer.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row == pytest.approx({
        "step": 0, "reward/mean": 0.5, "reward/min": 0.0, "reward/p10": 0.05, "reward/p50": 0.25,
        "reward/p90": 0.85, "reward/max": 1.0
    })  # fmt: skip
