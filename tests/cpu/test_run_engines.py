"""A whole run that loses its engines, one after the other, and continues."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path

import psutil
import pytest
from run_tools import (
    PROMPTS,
    descendants,
    make_model,
    quickstart,
    rows,
    started,
    title,
    trained_ordinals,
    wait_for_more_steps,
    wait_for_steps,
    wait_for_text,
    wait_until,
)
from waiting_transport import ASK, FOLDER, REACHED, settings

from megarl.generator.seeds import seed_of
from megarl.plan.checkpoints import complete_checkpoints
from megarl.weight_sync.transports import mooncake

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]


def engine(process, number: int) -> psutil.Process:
    """The engine's process, recognised by its random seed. The run's seed is 0."""
    seed = seed_of(0, f"engine.{number}", 0, bits=31)
    lines = {child: title(child) for child in descendants(process)}
    return next(
        child
        for child, line in lines.items()
        if "megarl.generator.server" in line and f'"random_seed": {seed}' in line
    )


def kill_in_the_middle_of_an_update(process, run_dir: Path, folder: Path) -> None:
    """Kills engine 0 in an update after two steps.

    `folder`: where the waiting transport has its files.
    """
    wait_for_steps(process, run_dir, 2)
    (folder / ASK).touch()
    wait_until((folder / REACHED).exists, process, "an update in its middle")
    engine(process, 0).kill()
    (folder / ASK).unlink()


WITH_MOONCAKE = pytest.mark.skipif(not mooncake.imports(), reason="Mooncake does not import")
CASES = [
    pytest.param("WaitingTransport", False, marks=pytest.mark.sample, id="killed"),
    pytest.param("WaitingTransport", True, id="killed, then stopped"),
    pytest.param("WaitingMooncake", True, marks=WITH_MOONCAKE, id="by Mooncake"),
]


@pytest.mark.parametrize("transport, hangs", CASES)
def test_engines_that_die_or_hang_are_replaced_and_serve_again(
    transport, hangs, tmp_path, monkeypatch
):
    """Of two engines the first is killed in the middle of an update; then the second is made to
    hang. Each comes back with the current weights. At the end a trainer rank hangs too: the first
    SIGTERM waits for it, and a second one ends the run at once.

    Rollouts are slow, so that an engine can start while the run lasts.
    """
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    overrides = [
        "generator.engines=2",
        "generator.health_s=15",
        "max_steps=100000",
        "checkpoint.every=0",
        "observe.probe_every=0",
    ]
    overrides += ["async.capacity=2", "async.partial_rollout=in_flight", "eval.limit=1"]
    overrides += [
        "rollout.name=slow_rollouts:after_a_second",
        *settings(transport),
        "weights.relay=off",
    ]
    monkeypatch.setenv(FOLDER, str(tmp_path))
    model = make_model(tmp_path / "model")
    driver_log = run_dir / "logs/generator.0.log"
    with started(quickstart(model, run_dir, *overrides), log) as process:
        kill_in_the_middle_of_an_update(process, run_dir, tmp_path)
        wait_for_text(process, driver_log, "engine 0 is lost, 1 are left")
        wait_for_text(process, driver_log, "engines [0] serve version")
        if hangs:
            engine(process, 1).suspend()
            wait_for_text(process, driver_log, "engine 1 is lost, 1 are left")
            wait_for_text(process, driver_log, "engines [1] serve version")
        wait_for_more_steps(process, run_dir, 4)
        next(child for child in descendants(process) if "trainer 1" in title(child)).suspend()
        process.terminate()
        wait_until(lambda: any(run_dir.glob(".launch/train/*/stop")), process, "the order to stop")
        time.sleep(0.5)
        assert process.poll() is None, "it waits for the step"
        process.terminate()
        process.wait(timeout=15)
    output = log.read_text()
    assert process.returncode == 143 and complete_checkpoints(run_dir) == [], output
    assert "engine.0 was killed by SIGKILL; started again (1 of generator.max_restarts=3)" in output
    assert ("engine.1 has answered nothing for" in output) == hangs
    table = rows(run_dir)
    assert all(row["sync/audit_ok"] for row in table if "sync/audit_ok" in row)
    assert [row["step"] for row in table] == list(range(len(table)))
    parts = ("time/train_s", "time/trainer_wait_s", "time/sync_s")
    assert all(sum(row[part] for part in parts) <= row["time/step_s"] for row in table), (
        "also where weights were sent again"
    )
    assert exactly_once(run_dir, len(table))


@WITH_MOONCAKE
def test_the_loss_of_a_relay_ends_the_engines_behind_it(tmp_path, monkeypatch):
    """Over Mooncake, the engines of one host pass weights on to each other by default.

    The engine that waits for the dead one's part is ended, and comes back too.
    """
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    overrides = [
        "generator.engines=2",
        "max_steps=100000",
        "checkpoint.every=0",
        "observe.probe_every=0",
        "eval.limit=1",
    ]
    overrides += ["async.partial_rollout=in_flight", *settings("WaitingMooncake")]
    monkeypatch.setenv(FOLDER, str(tmp_path))
    model = make_model(tmp_path / "model")
    driver_log = run_dir / "logs/generator.0.log"
    with started(quickstart(model, run_dir, *overrides), log) as process:
        kill_in_the_middle_of_an_update(process, run_dir, tmp_path)
        for number in range(2):
            lost = f"engine {number} is lost"
            wait_for_text(process, driver_log, lost)
        wait_for_more_steps(process, run_dir, 4)
    text = driver_log.read_text()
    output = log.read_text()
    assert (
        "was lost before it passed weights on to engine" in text
        and " bytes an update are passed on by engines" in text
    )
    assert "engine.0 was killed by SIGKILL; started again" in output and re.search(
        "engine.1 .*; started again", output
    )
    assert all(row["sync/audit_ok"] for row in rows(run_dir) if "sync/audit_ok" in row)


def exactly_once(run_dir: Path, steps: int) -> bool:
    """Without rejections, every prompt up to the last trained one was trained on, except those
    still in flight.
    """
    trained = list(itertools.chain(*trained_ordinals(run_dir)))
    in_flight = 3 * PROMPTS
    return len(trained) == len(set(trained)) == steps * PROMPTS and set(
        range(len(trained) - in_flight)
    ) <= set(trained)
