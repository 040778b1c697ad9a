"""A real engine that loses a process before it is ready ends at once, and says why.

Engines need no space in /dev/shm.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from run_tools import run
from sglang_engine import make_checkpoint

from megarl.generator.client import EngineClient
from megarl.generator.hooks import LOOK_S
from megarl.generator.server import EngineKeys, EngineSettings, server_command
from megarl.launch.processes import ProcessFailed, ProcessGroup, ProcessSpec
from megarl.messaging.rendezvous import free_ports

pytestmark = pytest.mark.timeout(900)
STARTED_S = 120
ENDED_S = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("start") / "model", 1, torch.float32, tied=False)


def engine(
    model: Path, before: Sequence[str] = (), **sizes: int
) -> tuple[ProcessSpec, str, EngineKeys]:
    """(process, URL, keys) of an engine. `before`: a command that becomes the engine."""
    (port,) = free_ports(1)
    keys = EngineKeys.generate()
    settings = EngineSettings(
        str(model),
        "float32",
        port,
        context_length=96,
        max_running_requests=4,
        device="cpu",
        **sizes,
    )
    argv, environment = server_command(settings, keys)
    return ProcessSpec("engine.0", [*before, *argv], environment), f"http://127.0.0.1:{port}", keys


def schedulers(group: ProcessGroup) -> list[psutil.Process]:
    children = []
    for child in psutil.Process(group._children["engine.0"].pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            children += [child] if "scheduler" in " ".join(child.cmdline()) else []
    return children


def failure(group: ProcessGroup, within_s: float) -> ProcessFailed:
    deadline = time.monotonic() + within_s
    while (reason := group.failure("engine.0")) is None:
        assert time.monotonic() < deadline, (
            f"the engine has not ended: {group.log_path('engine.0').read_text()[-2000:]}"
        )
        time.sleep(0.05)
    return reason


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_engine_ends_if_its_scheduler_is_killed_at_the_start(model, tmp_path, replicas):
    """With replicas of attention, schedulers are children of an intermediate process."""
    if replicas > 1:
        model = make_checkpoint(
            tmp_path / "model", 1, torch.float32, tied=False, family="qwen3_moe"
        )
    with ProcessGroup(tmp_path) as group:
        spec, _, _ = engine(model, tp=replicas, dp_attention=replicas)
        group.start(spec)
        deadline = time.monotonic() + STARTED_S
        earlier: list[psutil.Process] = []
        # the others are still becoming schedulers
        while not (lasting := [process for process in schedulers(group) if process in earlier]):
            assert time.monotonic() < deadline
            earlier = schedulers(group)
            time.sleep(10 * LOOK_S if earlier else 0.01)  # until the engine knows it
        killed = lasting[0]
        processes = {
            child.pid
            for child in psutil.Process(group._children["engine.0"].pid).children(recursive=True)
        }
        killed.kill()
        ended = failure(group, ENDED_S)
        log = group.log_path("engine.0").read_text()
    # SGLang may kill the engine before the engine ends with its child's status. The status is
    # printed in either case.
    endings = (
        "engine.0 exited with status 137: one of its processes was killed by SIGKILL",
        "engine.0 was killed by SIGKILL",
    )
    assert ended.ending in endings and ended.signalled
    # SGLang may kill the intermediate process before it names the scheduler, and the engine before
    # it names either.
    named = {
        int(pid) for pid in re.findall(r"process (\d+) of this engine was killed by SIGKILL", log)
    }
    assert named <= ({killed.pid} if replicas == 1 else processes)
    assert named or ended.ending == endings[1]


@pytest.mark.long
@pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"]).returncode != 0,
    reason="mounts take root",
)
def test_an_engine_starts_where_dev_shm_is_full(model, tmp_path):
    """Its processes share anonymous memory, or files in a folder of the launch.

    (An engine that lacks memory there ends by SIGBUS, and the message tells the free space in
    /dev/shm: tests/unit/test_deaths.py.)
    """
    full = (
        "mount -t tmpfs -o size=64k none /dev/shm && head -c 64k /dev/zero > /dev/shm/full; "
        'exec "$@"'
    )
    spec, url, keys = engine(model, ["unshare", "-m", "sh", "-c", full, "sh"])

    async def ready(group: ProcessGroup) -> None:
        client = EngineClient(url, keys.api, keys.admin)
        died = lambda: str(reason) if (reason := group.failure("engine.0")) else None  # noqa: E731
        await client.wait_ready(STARTED_S, group.log_path("engine.0"), died)
        await client.close()

    with ProcessGroup(tmp_path) as group:
        group.start(spec)
        asyncio.run(ready(group))


@pytest.mark.long
def test_doctor_has_an_engine_compile_without_weights_or_a_run(tmp_path):
    """The compiled code stays in a folder of this host; nothing else is left behind."""
    compiled = tmp_path / "compiled"
    completed = run(
        [
            "doctor",
            "--warm",
            "configs/quickstart.yaml",
            f"launch.compile_cache={compiled}",
            f"run_dir={tmp_path / 'run'}",
        ]
    )
    assert completed.returncode == 0, completed.stderr
    assert (
        "all that a run on CPUs needs is there" in completed.stdout
        and "an engine of generator.tp=1 has compiled and answered in" in completed.stdout
    )
    assert (
        "write by shared_memory" in completed.stdout
        and "every byte as it was sent" in completed.stdout
    )
    assert not (tmp_path / "run").exists() and [path.name for path in compiled.glob("*")] in (
        [],
        [socket.gethostname()],
    )
