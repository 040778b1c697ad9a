"""The report of `make gpu`'s part `loop`: the figures of a run that it shows, and its failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.bench.gpu import loop
from megarl.bench.gpu.measure import Bench
from megarl.bench.gpu.reward import even_ids

PLANNED = {"step_s": 1.0, "train_s": 0.5, "generate_s": 0.6, "sync_s": 0.1}


def steps(count: int = 8, **changed: Any) -> list[dict[str, Any]]:
    """The rows of a good run; `changed`: key, with __ for its /, and its value in every row."""
    times = ("step_s", "train_s", "generate_s", "sync_s", "sync_pause_s")
    rows = [
        {
            "step": step,
            "reward/mean": 0.5 + step / 100,
            "loss": 0.0,
            "grad_norm": 1.0,
            "logprob/abs_diff_mean": 0.01,
            "logprob/abs_diff_max": 0.1,
            "logprob/limit": 0.05,
            "sync/audit_ok": True,
            "sync/bytes": 10**6,
            "tokens_per_s": 100.0,
            **{f"time/{key}": 1.0 for key in times},
        }
        for step in range(count)
    ]
    for row in rows:
        row.update({key.replace("__", "/"): value for key, value in changed.items()})
    return rows


def reported(rows: list[dict[str, Any]], kill_at: int | None = None) -> list[dict[str, Any]]:
    emitted: list[dict[str, Any]] = []
    bench = Bench(torch.device("cpu"), toy=True, emit=emitted.append)
    case = loop.LoopCase(8, None, "in_flight", graphs=True, kill_at=kill_at)
    loop.report(bench, case, rows, PLANNED)
    return emitted


def failures(rows: list[dict[str, Any]]) -> str:
    return "; ".join(row["failed"] for row in reported(rows) if "failed" in row)


def test_good_run_has_no_failures():
    assert failures(steps()) == ""


@pytest.mark.parametrize("changed, failure", [
    ({"reward__mean": 0.5}, "the reward did not rise"),
    ({"loss": float("nan")}, "not finite in steps [0, 1, 2, 3, 4, 5, 6, 7]"),
    ({"logprob__abs_diff_mean": 0.06}, "log-probs differ by 0.06 on average, allowed is 0.05"),
    ({"logprob__abs_diff_mean": float("nan")}, "log-probs differ by nan"),
    ({"sync__audit_ok": False}, "audits of steps [0, 1, 2, 3, 4, 5, 6, 7] are not equal"),
])  # fmt: skip
def test_wrong_numbers_of_a_run_are_failures(changed, failure):
    assert failure in failures(steps(**changed))


def test_run_without_probes_is_a_failure():
    rows = steps()
    for row in rows:
        del row["logprob/abs_diff_mean"]
    assert "no step has a probe" in failures(rows)


def test_medians_leave_out_restarts_of_engines():
    rows = steps()
    for row in rows[4:8]:
        row["time/step_s"] = 60.0
    shown = {row["what"]: row.get("measured") for row in reported(rows, kill_at=4)}
    assert shown["time/step_s, median"] == 1.0


def test_run_that_ended_before_a_step_reports_that():
    assert reported([]) == [{"what": "steps done", "measured": 0, "planned": 8}]


def test_reward_is_the_share_of_even_ids():
    assert even_ids([2, 4, 6, 7]) == 0.75
    assert even_ids([]) == 0.0


@pytest.mark.parametrize("decode, failure", [(True, ""), (False, "the other way of decoding")])
def test_graphs_are_counted_in_lines_of_decoding(tmp_path: Path, decode: bool, failure: str):
    emitted: list[dict[str, Any]] = []
    bench = Bench(torch.device("cuda"), toy=False, emit=emitted.append)
    case = loop.LoopCase(8, None, "in_flight", graphs=True)
    log = tmp_path / "logs" / "engine.0.log"
    log.parent.mkdir()
    log.write_text(
        "Prefill batch, #new-seq: 8, cuda graph: False, input throughput (token/s): 9.1\n"
        f"Decode batch, #running-req: 8, cuda graph: {decode}, gen throughput (token/s): 9.1\n"
    )
    loop.graphs(bench, case, tmp_path)
    (row,) = emitted
    assert (row["measured"], row["planned"]) == (int(decode), 1)
    assert failure in row.get("failed", "")
    assert bool(failure) == ("failed" in row)
