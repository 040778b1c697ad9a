"""Engines join and leave a whole run: by command, by SIGTERM and by the death of their launcher."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from run_tools import (
    OVERRIDES,
    descendants,
    kill,
    make_model,
    quickstart,
    rows,
    run,
    start,
    succeed,
    title,
    wait_for_more_steps,
    wait_for_steps,
    wait_for_text,
)
from test_run_engines import exactly_once

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]


def engines(run_dir: Path) -> dict[int, dict]:
    """Each engine's line in `megarl engines list`."""
    result = succeed(["engines", "list", str(run_dir), "--json"])
    return {engine["number"]: engine for engine in json.loads(result.stdout)["engines"]}


def test_engines_join_and_leave_a_run(tmp_path):
    """The run begins with one engine and gains two.

    It loses one by command and one with its launcher. It gains another, and loses it to SIGTERM.
    """
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    overrides = [
        "max_steps=100000",
        "checkpoint.every=0",
        "observe.probe_every=2",
        "eval.limit=1",
        "timeouts.silence_s=8",
    ]
    overrides += [
        "async.capacity=1",
        "async.partial_rollout=in_flight",
        "rollout.name=slow_rollouts:after_a_second",
    ]
    model = make_model(tmp_path / "model")
    process = start(quickstart(model, run_dir, *overrides), log)
    driver_log = run_dir / "logs/generator.0.log"
    joined: dict[int, subprocess.Popen] = {}

    def add(number: int) -> None:
        joined[number] = start(["engines", "add", str(run_dir), "1"], tmp_path / f"add.{number}")

    def steps(count: int = 3) -> int:
        """Waits for that many more steps.

        Returns the number of engines that served after the last one.
        """
        return wait_for_more_steps(process, run_dir, count)[-1]["engines/serving"]

    try:
        wait_for_steps(process, run_dir, 2)
        assert steps(1) == 1
        refused = run(["engines", "remove", str(run_dir), "0"])
        assert (
            refused.returncode == 2
            and refused.stderr
            == "megarl: one engine at least must go on serving, and engine 0 would be gone\n"
        )
        for number in (1, 2):
            add(number)
            wait_for_text(process, driver_log, f"engine {number} at")
        for number in (1, 2):
            wait_for_text(process, tmp_path / f"add.{number}", f"engine {number} serves")
        assert steps() == 3
        assert [engine["serving"] for engine in engines(run_dir).values()] == [True] * 3

        removed = run(["engines", "remove", str(run_dir), "1"])
        assert (removed.returncode, removed.stdout) == (0, "engine 1 has left: by command\n"), (
            removed.stderr
        )
        assert joined[1].wait(60) == 0, "its launcher ends with it"
        assert steps() == 2
        kill(joined[2])
        wait_for_text(process, driver_log, "engine 2 is lost, 1 are left")
        assert steps() == 1
        wait_for_text(
            process,
            driver_log,
            "engine 2 has left, 1 serve: its launcher has given no sign of life for 8 s",
        )

        for number in (3, 4):
            add(number)
            wait_for_text(process, driver_log, f"engine {number} at")
        for number in (3, 4):
            wait_for_text(process, tmp_path / f"add.{number}", f"engine {number} serves")
        joined[3].send_signal(signal.SIGTERM)
        assert joined[3].wait(60) == 0, (tmp_path / "add.3").read_text()
        assert "engine 3 has left: its launcher ends" in (tmp_path / "add.3").read_text()
        # also one that the run itself has started
        succeed(["engines", "remove", str(run_dir), "0"])
        wait_for_text(process, log, "engine.0 has left the run, and is ended")
        assert steps() == 1
        assert not any("megarl.generator.server" in title(child) for child in descendants(process))

        process.terminate()
        assert process.wait(120) == 143
        assert (
            joined[4].wait(60) == 0
            and f"the run in {run_dir} has ended" in (tmp_path / "add.4").read_text()
        )
        late = run(["engines", "add", str(run_dir)])
        assert late.returncode == 2 and "no run is under way there" in late.stderr
    finally:
        for launcher in (process, *joined.values()):
            if launcher.poll() is None:
                kill(launcher)
        print(
            driver_log.read_text(),
            log.read_text(),
            *((tmp_path / f"add.{number}").read_text() for number in joined),
        )
    table = rows(run_dir)
    assert all(row["sync/audit_ok"] for row in table if "sync/audit_ok" in row)
    assert [row["step"] for row in table] == list(range(len(table)))
    assert exactly_once(run_dir, len(table))
    assert {path.name for path in (run_dir / "logs").glob("engine.*")} == {
        f"engine.{number}.log" for number in range(5)
    }


ADAPTERS = {  # settings, and the largest difference of log-probs between trainer and engines
    "alone": ([], 1e-5),
    "merged, what has changed": (["weights.delta=auto", "lora.targets=[down_proj]"], 1e-5),
    "on fp8 weights": (["generator.quantization=fp8_block"], 0.2),
}


@pytest.mark.parametrize(("overrides", "limit"), ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_reach_an_engine_that_joins(overrides, limit, tmp_path):
    """A new engine first gets everything, as the first engine did.

    Afterwards both get only adapters.
    """
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    settings = [
        "max_steps=100000",
        "checkpoint.every=0",
        "observe.probe_every=1",
        "eval.limit=1",
        "lora.rank=4",
    ]
    settings += [
        "trainer.optimizer.lr=1e-2",
        "rollout.name=slow_rollouts:after_a_second",
        "reward.name=reward_functions:by_chance",
        *overrides,
    ]
    model = make_model(tmp_path / "model", head_dim=64)  # fp8 blocks need it
    process = start(["train", "configs/examples/lora.yaml", f"model.path={model}",
        "model.random_init=false", f"run_dir={run_dir}",
                     *OVERRIDES, *settings], log)  # fmt: skip
    joining = None

    try:
        wait_for_steps(process, run_dir, 3)
        joining = start(["engines", "add", str(run_dir), "1"], tmp_path / "add")
        wait_for_text(process, tmp_path / "add", "engine 1 serves")
        last = wait_for_more_steps(process, run_dir, 3)
        process.terminate()
        assert process.wait(120) == 143 and joining.wait(60) == 0
    finally:
        for launcher in (process, joining):
            if launcher is not None and launcher.poll() is None:
                kill(launcher)
        print((run_dir / "logs/generator.0.log").read_text(), log.read_text())
    table = rows(run_dir)
    assert all(row["sync/audit_ok"] for row in table if "sync/audit_ok" in row)
    assert last[-1]["engines/serving"] == 2
    everything = table[0]["sync/bytes"]
    assert 0 < last[-1]["sync/bytes"] < everything, "to two engines"
    assert (
        0
        < max(row["logprob/abs_diff_mean"] for row in table if "logprob/abs_diff_mean" in row)
        < limit
    )
    assert exactly_once(run_dir, len(table))


def test_where_no_run_is_nothing_joins(tmp_path):
    for command in (
        ["add", str(tmp_path)],
        ["remove", str(tmp_path), "1"],
        ["list", str(tmp_path)],
    ):
        result = run(["engines", *command])
        assert (result.returncode, result.stderr) == (
            2,
            f"megarl: {tmp_path}: megarl train has never run there\n",
        )
