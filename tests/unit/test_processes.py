import os
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest
from loops import has_ended

from megarl.base.files import log_tail, write_whole
from megarl.launch.engines import EngineKeeper
from megarl.launch.meeting import Meeting
from megarl.launch.nodes import Node
from megarl.launch.processes import (
    ProcessFailed,
    ProcessGroup,
    ProcessSpec,
    occupied_ports,
    raise_limits,
)
from megarl.launch.watch import RunWatch, StopOrder, watch


def python(name: str, code: str) -> ProcessSpec:
    return ProcessSpec(name, [sys.executable, "-S", "-c", code])


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        pytest.param(
            "import sys; print('out of memory'); sys.exit(3)",
            "(?s)engine.1 exited with status 3.*out of memory",
            id="fails",
        ),
        pytest.param("pass", "engine.1 exited with status 0", id="ends well too early"),
    ],
)
def test_an_engine_that_ends_fails_the_run(code, message, tmp_path):
    """With its last words."""
    with ProcessGroup(tmp_path) as group:
        group.start(python("trainer.0", "import time; time.sleep(60)"))
        group.start(python("engine.1", code))
        with pytest.raises(ProcessFailed, match=message):
            watch(group, {"trainer.0"}, poll=lambda: None)


def test_a_killed_process_is_named_by_its_signal(tmp_path):
    with ProcessGroup(tmp_path) as group:
        group.start(python("engine.0", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
        wait_for(lambda: not group.running())
        with pytest.raises(ProcessFailed, match="engine.0 was killed by SIGKILL"):
            group.check()


def test_process_ended_by_the_stack_signal_is_not_the_cause(tmp_path):
    with ProcessGroup(tmp_path) as group:
        group.start(python("trainer.0", "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"))
        wait_for(lambda: not group.running())
        group.start(python("trainer.1", "print('disk full', flush=True); raise SystemExit(1)"))
        wait_for(lambda: not group.running())
        with pytest.raises(ProcessFailed, match="(?s)trainer.1 exited with status 1.*disk full"):
            group.check()


def test_leaving_ends_descendants_too(tmp_path):
    child = "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])"
    code = (
        f"import subprocess, sys, time; child = {child}; print(child.pid, flush=True); "
        "time.sleep(60)"
    )
    with ProcessGroup(tmp_path) as group:
        group.start(python("engine.0", code))
        wait_for(lambda: group.log_path("engine.0").read_text().strip())
        grandchild = int(group.log_path("engine.0").read_text())
        process = psutil.Process(grandchild)
    wait_for(lambda: has_ended(process))


EXPLAINS = """
import errno, os, sys, time
from megarl.launch import worker, worker_roles
from megarl.config.errors import RunError

def fail(rank, folder):
    time.sleep(float(rank))
    raise %s

worker_roles.ROLES["export"] = fail
sys.argv[1:] = ["export", "1", "folder"]
worker.main()
"""


@pytest.mark.parametrize(
    "error, message",
    [
        (
            'RunError("step_000004 is damaged; move it away")',
            "step_000004 is damaged; move it away",
        ),
        (
            "OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'rollouts/7.txt')",
            "the disk is full ([Errno 28] No space left on device: 'rollouts/7.txt'); the "
            "complete checkpoints in run_dir can be used",
        ),
    ],
)
def test_rank_that_explains_its_end_is_named_with_that_alone(tmp_path, error, message):
    """Also if another rank ended before it."""
    with ProcessGroup(tmp_path) as group:
        group.start(ProcessSpec("trainer.0", [sys.executable, "-c", EXPLAINS % error]))
        group.start(python("trainer.1", "raise RuntimeError('connection closed by peer')"))
        wait_for(lambda: not group.running(), seconds=60)
        with pytest.raises(ProcessFailed) as failed:
            group.check()
    log = tmp_path / "trainer.0.log"
    assert str(failed.value) == f"{message}\n(trainer.0 exited with status 1; its log is {log})"
    assert "Traceback" in log.read_text()


def test_workers_that_end_well_end_the_watch(tmp_path):
    polls = []
    with ProcessGroup(tmp_path) as group:
        group.start(python("engine.0", "import time; time.sleep(60)"))
        group.start(python("trainer.0", "pass"))
        watch(group, {"trainer.0"}, poll=lambda: polls.append(os.getpid()))
    assert polls


def test_the_end_of_a_log_is_told_however_long_the_log_is(tmp_path):
    (tmp_path / "log").write_bytes(b"\xc3\xa9" * 100_000 + b"\nlast but one\nlast\n")
    assert log_tail(tmp_path / "log", 2) == "last but one\nlast"
    assert len(log_tail(tmp_path / "log")) < 1 << 16
    assert log_tail(tmp_path / "none") == "(no log)"


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path):
    path = tmp_path / "config.yaml"
    write_whole(path, "seed: 1")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))  # like a full disk
        with pytest.raises(OSError):
            write_whole(path, "seed: 2" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
        ("config.yaml", "seed: 1")
    ]


def test_processes_may_open_more_files_than_a_shell_begins_with(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        raise_limits()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(65_536, before[1]), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("parent, status", [("its own", 0), ("1", 1), (None, 0)])
def test_a_process_whose_parent_is_gone_ends(parent, status):
    code = (
        "import os; from megarl.launch.worker import die_with_parent as check; check(); "
        "check() if os.fork() == 0 else os.wait()"
    )
    env = {
        **os.environ,
        **(
            {}
            if parent is None
            else {"MEGARL_PARENT": str(os.getpid()) if parent == "its own" else parent}
        ),
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == status
    assert result.stderr == ("process 1, which has started this one, is gone\n" if status else "")


def test_the_parent_may_be_the_first_process_of_a_container():
    """Its id is 1, and elsewhere 1 is the process that adopts orphans."""
    launcher = (
        "import os, subprocess, sys; child = 'from megarl.launch.worker import die_with_parent as "
        "check; check()';"
        "sys.exit(subprocess.run([sys.executable, '-c', child], env={**os.environ, "
        "'MEGARL_PARENT': str(os.getpid())}).returncode)"
    )
    result = subprocess.run(
        ["unshare", "--pid", "--fork", sys.executable, "-c", launcher],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert (result.returncode, result.stderr) == (0, "")


def test_process_does_not_inherit_variables_of_torchrun(tmp_path, monkeypatch):
    """With torchrun's variables, torch.distributed would wait for a store without a server."""
    torchrun = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "r1",
        "GROUP_RANK": "1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_PORT": "9",
    }
    for name, value in {**torchrun, "OTHER": "kept"}.items():
        monkeypatch.setenv(name, value)
    code = (
        "import os; print(sorted(name for name in os.environ if name in %r), os.environ['RANK'])"
        % [*torchrun, "OTHER"]
    )
    with ProcessGroup(tmp_path) as group:
        group.start(ProcessSpec("trainer.0", [sys.executable, "-S", "-c", code], env={"RANK": "0"}))
        wait_for(lambda: not group.running())
        assert group.log_path("trainer.0").read_text() == "['OTHER', 'RANK'] 0\n"


def test_a_thread_that_dies_ends_its_process():
    code = (
        "import threading, time; from megarl.launch.worker import end_with_any_thread; "
        "end_with_any_thread();"
        "threading.Thread(target=lambda: 1 / 0, name='beats', daemon=True).start(); time.sleep(60)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
    )
    assert result.returncode == 1
    assert "Exception in thread beats" in result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_process_that_occupies_a_port_is_named(tmp_path):
    listen = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); time.sleep(60)"
    )
    with (
        ProcessGroup(tmp_path / "ours") as own_group,
        ProcessGroup(tmp_path / "theirs") as other_group,
    ):
        ports = {}
        for group, name in ((own_group, "hub"), (other_group, "engine.0")):
            group.start(python(name, listen))
            wait_for(lambda: group.log_path(name).read_text().strip())
            ports[name] = int(group.log_path(name).read_text())
        lines = list(occupied_ports({**ports, "trainer": 1}, "127.0.0.1", own_group.process_ids()))
        thief = other_group.process_ids()["engine.0"]
    assert len(lines) == 1
    assert lines[0].startswith(
        f"port {ports['engine.0']}, chosen for engine.0 when it was free, has been taken by "
        f"process {thief} ("
    )


def test_serving_node_does_not_fail_once_the_work_is_done(tmp_path, monkeypatch):
    """The node with an engine's first part sees the end first, and ends its part.

    Then this node's part dies.
    """
    monkeypatch.setattr("megarl.launch.meeting.LOOK_S", 3600.0)  # only one look into the folder
    works = Meeting(tmp_path / "meet", Node(0, 2, "x"), timeout_s=5, silence_s=60)
    serves = Meeting(tmp_path / "meet", Node(1, 2, "x"), timeout_s=5, silence_s=60)
    with ProcessGroup(tmp_path) as group:
        order = StopOrder(serves, group, deadline_s=1)
        run = RunWatch(
            group, EngineKeeper(group, "fail", 0, 1.0, 1.0), serves, order, show=lambda: None
        )
        assert not serves.all_finished([0])
        group.start(python("engine.0.1", "raise SystemExit(1)"))
        with pytest.raises(ProcessFailed, match=r"engine.0.1 exited with status 1"):
            run.follow(set(), [0])
        works.finish()
        run.follow(set(), [0])
