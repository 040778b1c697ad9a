"""An engine ends together with the processes that it started.

Real processes play scheduler and controller.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from loops import has_ended

# Like an engine: a process that waits for ever for a process that it forked, or that this one
# forked.
ENGINE = """
import multiprocessing, os, sys, time
from megarl.generator.hooks import GRACE_S, Children
from megarl.generator.server import _ending_at_the_end
from megarl.base.processes import end_with_parent
children = Children()
children.watch()
os.register_at_fork(after_in_child=lambda: Children().watch())
fork = multiprocessing.get_context("fork")
def scheduler():
    end_with_parent(multiprocessing.parent_process().pid)
    time.sleep(1)
    print("scheduler", os.getpid(), flush=True)
    time.sleep(60)
def controller():
    end_with_parent(multiprocessing.parent_process().pid)
    process = fork.Process(target=scheduler)
    process.start()
    time.sleep(60)
with _ending_at_the_end(children):
    process = fork.Process(target=globals()[sys.argv[1]])
    process.start()
    if sys.argv[2] == "raises":
        process.join()
        raise RuntimeError("a scheduler has died")
    time.sleep(60)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "between, then", [("scheduler", "waits"), ("scheduler", "raises"), ("controller", "waits")]
)
def test_one_that_is_killed_ends_them_all_and_is_named(between, then):
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, between, then],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid = int(engine.stdout.readline().split()[1])
    family = psutil.Process(engine.pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    _, errors = engine.communicate(timeout=30)
    assert engine.returncode == 128 + signal.SIGKILL
    assert f"process {pid} of this engine was killed by SIGKILL" in errors
    assert ("RuntimeError: a scheduler has died" in errors) == (then == "raises")
    assert all(map(has_ended, family))


def test_engine_ends_although_its_children_go_on():
    """Python itself would wait for the started process."""
    code = ENGINE.replace("process.join()", "raise SystemExit('enough')")
    engine = subprocess.run(
        [sys.executable, "-c", code, "scheduler", "raises"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert engine.returncode == 1 and engine.stderr.startswith("enough\n")
