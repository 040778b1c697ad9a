import os
import sys
import time

import psutil
import pytest

from megarl.launch.processes import ProcessFailed, ProcessGroup, ProcessSpec
from megarl.launch.watch import watch


def python(name: str, code: str) -> ProcessSpec:
    return ProcessSpec(name, [sys.executable, "-S", "-c", code])


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_dead_process_fails_the_run_with_its_last_words(tmp_path):
    with ProcessGroup(tmp_path) as group:
        group.start(python("trainer.0", "import time; time.sleep(60)"))
        group.start(python("engine.1", "import sys; print('out of memory'); sys.exit(3)"))
        with pytest.raises(ProcessFailed, match="(?s)engine.1 exited with status 3.*out of memory"):
            watch(group, {"trainer.0"}, poll=lambda: None)


def test_an_engine_that_ends_well_too_early_fails_the_run(tmp_path):
    with ProcessGroup(tmp_path) as group:
        group.start(python("trainer.0", "import time; time.sleep(60)"))
        group.start(python("engine.0", "pass"))
        with pytest.raises(ProcessFailed, match="engine.0 exited with status 0"):
            watch(group, {"trainer.0"}, poll=lambda: None)


def test_a_killed_process_is_named_by_its_signal(tmp_path):
    with ProcessGroup(tmp_path) as group:
        group.start(python("engine.0", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
        wait_for(lambda: not group.running())
        with pytest.raises(ProcessFailed, match="engine.0 was killed by SIGKILL"):
            group.check()


def test_one_that_ended_of_being_asked_for_its_stack_is_not_the_cause(tmp_path):
    with ProcessGroup(tmp_path) as group:
        group.start(python("trainer.0", "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"))
        wait_for(lambda: not group.running())
        group.start(python("trainer.1", "print('disk full', flush=True); raise SystemExit(1)"))
        wait_for(lambda: not group.running())
        with pytest.raises(ProcessFailed, match="(?s)trainer.1 exited with status 1.*disk full"):
            group.check()


def test_leaving_ends_descendants_too(tmp_path):
    code = "import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']); print(c.pid, flush=True); time.sleep(60)"
    with ProcessGroup(tmp_path) as group:
        group.start(python("engine.0", code))
        wait_for(lambda: group.log_path("engine.0").read_text().strip())
        grandchild = int(group.log_path("engine.0").read_text())
        assert psutil.pid_exists(grandchild)
    wait_for(lambda: not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE)


def test_workers_that_end_well_end_the_watch(tmp_path):
    polls = []
    with ProcessGroup(tmp_path) as group:
        group.start(python("engine.0", "import time; time.sleep(60)"))
        group.start(python("trainer.0", "pass"))
        watch(group, {"trainer.0"}, poll=lambda: polls.append(os.getpid()))
    assert polls


def test_a_process_does_not_take_itself_for_one_that_torchrun_started(tmp_path, monkeypatch):
    """With its variables torch.distributed would wait for a store that nobody serves."""
    told = dict(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="r1", GROUP_RANK="1", RANK="1", WORLD_SIZE="2", MASTER_PORT="9")
    for name, value in {**told, "OTHER": "kept"}.items():
        monkeypatch.setenv(name, value)
    code = "import os; print(sorted(name for name in os.environ if name in %r), os.environ['RANK'])" % [*told, "OTHER"]
    with ProcessGroup(tmp_path) as group:
        group.start(ProcessSpec("trainer.0", [sys.executable, "-S", "-c", code], env={"RANK": "0"}))
        wait_for(lambda: not group.running())
        assert group.log_path("trainer.0").read_text() == "['OTHER', 'RANK'] 0\n"
