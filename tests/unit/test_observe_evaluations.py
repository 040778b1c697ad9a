"""Held-out scores among the metrics: they go into the next row, and those of the last weights into
the last row.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megarl.evaluation.scores import (
    NewEvaluations,
    complete_metrics,
    damaged_results,
    forget_after,
    read_results,
    write_result,
)
from megarl.observe.metrics import METRICS_FILE, MetricsWriter, read_metrics


def row_keys(run_dir: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in row.items() if key.startswith("eval/")}
        for row in read_metrics(run_dir / METRICS_FILE)
    ]


def test_evaluation_is_in_the_next_row_and_the_last_in_the_last(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    new = NewEvaluations(tmp_path)
    for step, evaluated in enumerate(([0], [], [1, 2], [])):
        for version in evaluated:
            write_result(
                tmp_path,
                version,
                {"pass@1": version / 4, "suites": {"hard": {"pass@1": 0.0, "reward/mean": 0.25}}},
            )
        writer.write(step, {"loss": float("nan"), **new.metrics()})
    writer.close()
    score = {"eval/hard/pass@1": 0.0, "eval/hard/reward/mean": 0.25}
    at_zero = {"eval/version": 0, "eval/pass@1": 0.0, **score}
    at_two = {"eval/version": 2, "eval/pass@1": 0.5, **score}
    at_one = at_two | {"eval/version": 1, "eval/pass@1": 0.25}
    assert row_keys(tmp_path) == [at_zero, {}, at_one, at_two]
    before = (tmp_path / METRICS_FILE).read_bytes()
    complete_metrics(tmp_path)
    assert (tmp_path / METRICS_FILE).read_bytes() == before, "nothing new"
    write_result(tmp_path, 4, {"pass@1": 1.0})
    for _ in range(2):
        complete_metrics(tmp_path)
        assert row_keys(tmp_path) == [
            at_zero,
            at_one,
            at_two,
            {"eval/version": 4, "eval/pass@1": 1.0},
        ]
    assert [row["step"] for row in read_metrics(tmp_path / METRICS_FILE)] == [0, 1, 2, 3]


def test_evaluations_after_the_last_row_are_all_recorded(tmp_path: Path) -> None:
    """max_steps=4, eval.every=2: the evaluations of versions 2 and 4 both end when all rows are
    written.
    """
    writer = MetricsWriter(tmp_path)
    for step in range(4):
        writer.write(
            step, {"loss": 0.5, **({"eval/version": 0, "eval/pass@1": 0.0} if step == 0 else {})}
        )
    writer.close()
    for version in (0, 2, 4):
        write_result(tmp_path, version, {"pass@1": version / 4})
    for _ in range(2):
        complete_metrics(tmp_path)
        assert [row.get("eval/version") for row in row_keys(tmp_path)] == [0, None, 2, 4]
    assert all(row["loss"] == 0.5 for row in read_metrics(tmp_path / METRICS_FILE))


def test_evaluation_without_a_free_row_has_only_its_file(tmp_path: Path) -> None:
    """eval.every=1: there is one more version than steps."""
    writer = MetricsWriter(tmp_path)
    new = NewEvaluations(tmp_path)
    for step in range(2):
        write_result(tmp_path, step, {"pass@1": step / 4, "suites": {"hard": {"pass@1": 0.0}}})
        writer.write(step, new.metrics())
    writer.close()
    write_result(tmp_path, 2, {"pass@1": 0.5})
    complete_metrics(tmp_path)
    assert row_keys(tmp_path)[0]["eval/version"] == 0
    assert row_keys(tmp_path)[1] == {
        "eval/version": 2,
        "eval/pass@1": 0.5,
    }


def test_a_resumed_run_forgets_what_is_to_be_evaluated_again(tmp_path: Path) -> None:
    for version in (0, 5, 10):
        write_result(tmp_path, version, {"pass@1": 0.5})
    forget_after(tmp_path, 5)
    assert [result["version"] for result in read_results(tmp_path)] == [0, 5]
    new = NewEvaluations(tmp_path)
    assert [new.metrics().get("eval/version") for _ in range(3)] == [0, 5, None]


def test_scores_that_were_copied_are_of_no_other_version(tmp_path: Path) -> None:
    """A run that continues from before them reads the other scores. The report names the copy."""
    for version in (2, 6):
        write_result(tmp_path, version, {"pass@1": version / 8})
    copy = shutil.copy(tmp_path / "eval/version_000006.json", tmp_path / "eval/version_000008.json")
    assert [result["version"] for result in read_results(tmp_path)] == [2, 6]
    assert damaged_results(tmp_path) == [copy]
    forget_after(tmp_path, 4)
    assert [result["version"] for result in read_results(tmp_path)] == [2]


def test_scores_of_a_row_cut_on_resume_move_to_a_later_row(tmp_path: Path) -> None:
    """The evaluation of version 4 ended in step 5.

    The run continues from the checkpoint after step 4.
    """
    writer = MetricsWriter(tmp_path)
    new = NewEvaluations(tmp_path)
    for step in range(6):
        if step in (0, 5):
            write_result(tmp_path, max(0, step - 1), {"pass@1": step / 8})
        writer.write(step, {"loss": 0.0, **new.metrics()})
    writer.close()
    writer = MetricsWriter(tmp_path, resume_step=5)
    forget_after(tmp_path, 5)
    new = NewEvaluations(tmp_path)
    for step in (5, 6):
        writer.write(step, {"loss": 0.0, **new.metrics()})
    writer.close()
    at_zero = {"eval/version": 0, "eval/pass@1": 0.0}
    at_four = {"eval/version": 4, "eval/pass@1": 0.625}
    assert row_keys(tmp_path) == [at_zero, {}, {}, {}, {}, at_four, {}]


def test_run_without_rows_or_evaluations_completes_nothing(tmp_path: Path) -> None:
    complete_metrics(tmp_path)
    write_result(tmp_path, 0, {"pass@1": 0.5})
    complete_metrics(tmp_path)
    assert not (tmp_path / METRICS_FILE).exists()
