"""Whole runs in which one process is stopped for good.

A process that waits for it says so at its deadline, and the run names the stopped one.
"""

from __future__ import annotations

import re

import psutil
import pytest
from run_tools import (
    descendants,
    quickstart,
    started,
    title,
    wait_for_steps,
)

pytestmark = pytest.mark.timeout(900)
WAIT_S = 20
# which deadline comes first depends on the moment
WAITED = r"(trainer\.[01]|generator\.0) waited \d+ s for "
STOPPED = r"; it is stopped \(SIGSTOP, or a debugger\)   <- not waiting"


def process_of(process, *words: str) -> psutil.Process:
    return next(
        child for child in descendants(process) if all(word in title(child) for word in words)
    )


CASES = [
    pytest.param(("launch.worker", "trainer 1"), WAITED, r"trainer\.1: .*" + STOPPED,
    id="a trainer rank"),
    pytest.param(
        ("launch.worker", "generator 0"), WAITED, r"generator\.0: .*" + STOPPED, id="the generator",
        marks=pytest.mark.matrix,
    ),
    pytest.param(
        ("sglang::scheduler",), r"engine\.0 has answered nothing for \d+ s; it is ended",
        r"engine\.0 was killed by SIGKILL",
        id="a scheduler", marks=pytest.mark.matrix,
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("process_name, message, named", CASES)
def test_a_process_that_is_stopped_is_found_and_named(
    model, tmp_path, process_name, message, named
):
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    limits = [f"timeouts.collective_s={WAIT_S}", f"generator.health_s={WAIT_S}"]
    # the engine's own deadline comes before those of the waiting processes
    if "scheduler" in process_name[0]:
        limits += [f"timeouts.rollouts_s={4 * WAIT_S}", f"timeouts.weights_s={4 * WAIT_S}"]
    else:
        limits += [f"timeouts.rollouts_s={WAIT_S}", "timeouts.weights_s=15"]
    overrides = [
        *limits,
        "generator.max_restarts=0",
        "max_steps=100000",
        "checkpoint.every=0",
        "eval.limit=1",
    ]
    with started(quickstart(model, run_dir, *overrides), log) as process:
        wait_for_steps(process, run_dir, 2)
        process_of(process, *process_name).suspend()
        process.wait(timeout=6 * WAIT_S)
    output = log.read_text()
    assert process.returncode == 1, output
    assert re.search(message, output) and re.search(named, output), output
