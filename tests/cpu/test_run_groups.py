"""Whole runs with different engines: one group in float32, and one in fp8 over two ranks.

The trainer has two ranks.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from run_tools import (
    kill,
    make_model,
    quickstart,
    rows,
    run,
    start,
    succeed,
    wait_for_more_steps,
    wait_for_steps,
    wait_for_text,
)
from test_run_engines import engine, exactly_once

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]
GROUPS = [
    "generator.max_concurrency=32",
    *("generator.groups.plain.engines=2", "generator.groups.plain.max_concurrency=16"),
    *(
        "generator.groups.fp8.engines=1",
        "generator.groups.fp8.tp=2",
        "generator.groups.fp8.quantization=fp8_block",
    ),
]
STREAMING = [
    "async.capacity=2",
    "async.partial_rollout=in_flight",
    "eval.limit=4",
    "observe.probe_every=5",
]
# Bytes of one engine's weights. Each layer has qkv, o, gate, up, down and norms; then come
# embedding, head and last norm.
LINEAR = 128 * (512 + 2 * 256 + 512 + 3 * 512)
NORMS = 2 * 128
ENDS = 2 * 64 * 128
PLAIN = 4 * (4 * (LINEAR + NORMS) + ENDS + 128)
SCALES = 4 * (4 + 2 + 2 + 4 + 4 + 4 + 4)
FP8 = 4 * (LINEAR + SCALES) + 2 * ENDS + 2 * 2 * (4 * NORMS + 128)  # all norms are on both ranks


def arguments(model: Path, run_dir: Path, *overrides: str) -> list[str]:
    return quickstart(model, run_dir, *GROUPS, *STREAMING, *overrides)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model of which each of two ranks has whole blocks of 128."""
    return make_model(
        tmp_path_factory.mktemp("model") / "model", head_dim=128, intermediate_size=512
    )


@pytest.mark.parametrize(
    ("steps", "written", "overrides"),
    [
        pytest.param(
            20,
            2 * PLAIN + FP8,
            [],
            id="shared memory",
            marks=[pytest.mark.sample, pytest.mark.long],
        ),
        # One of the plain engines passes weights on to the other.
        pytest.param(
            6, PLAIN + FP8, ["weights.transport=gloo"], id="gloo", marks=pytest.mark.sample
        ),
        pytest.param(6, PLAIN + FP8, ["weights.transport=mooncake"], id="mooncake"),
    ],
)
def test_a_run_on_unlike_engines(steps, written, overrides, model, tmp_path):
    """Audits compare every engine's memory with the sent weights, bit for bit, after each update
    and before the next.
    """
    run_dir = tmp_path / "run"
    result = succeed(arguments(model, run_dir, f"max_steps={steps}", *overrides))
    assert (
        "2 engines TP1 of plain (unquantised) and 1 engine TP2 of fp8 (fp8_block)" in result.stdout
    )
    table = rows(run_dir)
    assert (
        len(table) == steps
        and all(row["sync/audit_ok"] for row in table)
        and exactly_once(run_dir, steps)
    )
    assert all(
        (row["engines/serving"], row["engines/serving/plain"], row["engines/serving/fp8"])
        == (3, 2, 1)
        for row in table
    )
    tokens = [(row["engines/tokens/plain"], row["engines/tokens/fp8"]) for row in table]
    assert tokens == sorted(tokens) and min(tokens[-1]) > 0, "both have sampled"
    probes = [row for row in table if "logprob/abs_diff_mean" in row]
    for row in probes:
        assert (
            row["logprob/abs_diff_mean/plain"] < 1e-5
            and 1e-4 < row["logprob/abs_diff_mean/fp8"] < 0.1
        )
        assert (
            row["logprob/abs_diff_mean/plain"]
            < row["logprob/abs_diff_mean"]
            < row["logprob/abs_diff_mean/fp8"]
        )
    assert probes and {row["sync/bytes"] for row in table} == {written}


def test_changes_go_to_engines_in_bf16_and_in_fp8(model, tmp_path):
    run_dir = tmp_path / "run"
    overrides = [
        "weights.delta=auto",
        "weights.delta_refresh=4",
        "trainer.optimizer.lr=1e-6",
        "model.dtype=bfloat16",
    ]
    succeed(arguments(model, run_dir, "max_steps=8", *overrides))
    table = rows(run_dir)
    assert (
        len(table) == 8 and all(row["sync/audit_ok"] for row in table) and exactly_once(run_dir, 8)
    )
    sizes = [row["sync/bytes"] for row in table]
    assert max(sizes) == PLAIN + FP8 and sum(size < 0.5 * max(sizes) for size in sizes) >= 4
    assert (
        max(
            row["logprob/abs_diff_mean/plain"]
            for row in table
            if "logprob/abs_diff_mean/plain" in row
        )
        < 0.02
    )


def test_groups_change_between_starts(model, tmp_path):
    run_dir = tmp_path / "run"
    result = succeed(arguments(model, run_dir, "max_steps=4"))
    later_overrides = [
        "generator.groups.plain.engines=1",
        "generator.groups.plain.tp=2",
        "generator.groups.fp8=null",
        "generator.groups.half.engines=1",
    ]
    result = succeed(arguments(model, run_dir, "max_steps=8", *later_overrides))
    assert "Changed: generator.groups.plain.tp=2, was null" in result.stdout
    assert (
        "1 engine TP2 of plain (unquantised) and 1 engine TP1 of half (unquantised)"
        in result.stdout
    )
    table = rows(run_dir)
    assert [row["step"] for row in table] == list(range(8)) and all(
        row["sync/audit_ok"] for row in table
    )
    assert (
        exactly_once(run_dir, 8)
        and table[-1]["engines/serving/half"] == 1
        and "engines/serving/fp8" not in table[-1]
    )


def test_engines_of_a_group_die_join_and_leave(model, tmp_path):
    """Engine 2, in fp8, is killed and comes back.

    Another engine of its group joins, numbered after the engines of both groups. Then one leaves.
    """
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    overrides = [
        "max_steps=100000",
        "checkpoint.every=0",
        "rollout.name=slow_rollouts:after_a_second",
    ]
    process = start(arguments(model, run_dir, *overrides), log)
    joined: list[subprocess.Popen] = []
    driver_log = run_dir / "logs/generator.0.log"

    def steps() -> dict:
        return wait_for_more_steps(process, run_dir, 3)[-1]

    try:
        wait_for_steps(process, run_dir, 2)
        engine(process, 2).kill()
        wait_for_text(process, driver_log, "engine 2 is lost, 2 are left")
        wait_for_text(process, driver_log, "engines [2] serve version")
        assert steps()["engines/serving/fp8"] == 1
        refused = run(["engines", "add", str(run_dir), "1"])
        assert refused.returncode == 2 and "must be --group NAME of plain, fp8" in refused.stderr
        joined.append(
            start(["engines", "add", str(run_dir), "1", "--group", "fp8"], tmp_path / "add")
        )
        wait_for_text(process, tmp_path / "add", "engine 3 serves")
        row = steps()
        assert (row["engines/serving/plain"], row["engines/serving/fp8"]) == (2, 2)
        succeed(["engines", "remove", str(run_dir), "0"])
        row = steps()
        assert (row["engines/serving/plain"], row["engines/serving/fp8"]) == (1, 2)
        process.terminate()
        assert process.wait(120) == 143 and joined[0].wait(60) == 0
    finally:
        for launcher in (process, *joined):
            if launcher.poll() is None:
                kill(launcher)
        print(
            driver_log.read_text(),
            log.read_text(),
            *((tmp_path / "add").read_text() for _ in joined),
        )
    table = rows(run_dir)
    assert all(row["sync/audit_ok"] for row in table if "sync/audit_ok" in row)
    assert [row["step"] for row in table] == list(range(len(table))) and exactly_once(
        run_dir, len(table)
    )
