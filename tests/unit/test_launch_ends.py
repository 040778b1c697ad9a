"""What a command prints at its start, and how it ends when its folder is full or read-only: it
prints the reason first, and does not wait in vain.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resolving import config

from megarl import cli
from megarl.base.files import write_problem
from megarl.config.errors import ConfigError, tell
from megarl.config.schema import ModelConfig, RunConfig
from megarl.launch import commands, launcher, tracking
from megarl.launch.commands import sampling_lines
from megarl.launch.launcher import Job
from megarl.launch.nodes import Node
from megarl.launch.processes import ProcessFailed
from megarl.launch.resuming import Resume
from megarl.launch.start import trainer_environment
from megarl.launch.tracking import Trackers
from megarl.observe.metrics import MetricsWriter
from megarl.plan.resolve import RunPlan, resolve

READ_ONLY = Path("/proc/self")  # read-only even for root


@pytest.mark.parametrize("mode", ["block", "in_flight", "retract", "resume", "abort"])
def test_run_that_thins_out_long_responses_says_so(tmp_path: Path, mode: str) -> None:
    plan = resolve(config(tmp_path, f"async.partial_rollout={mode}"), "plan")
    lines = [line.partition(" starts")[0] for line in sampling_lines(plan)]
    assert lines == (["Sampling: async.partial_rollout=abort"] if mode == "abort" else [])


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    assert write_problem(tmp_path) == "" and not list(tmp_path.iterdir())
    assert write_problem(READ_ONLY)
    assert write_problem(tmp_path / "gone") == "No such file or directory"
    (tmp_path / "trainer.0.log").write_text("OSError: [Errno 28]\n")
    failure = ProcessFailed("trainer.0", 1, tmp_path / "trainer.0.log", 0)
    failure.begin("run_dir=x: cannot be written to any more: No space left on device")
    assert str(failure).splitlines()[:2] == [
        "run_dir=x: cannot be written to any more: No space left on device",
        f"trainer.0 exited with status 1; the end of {tmp_path / 'trainer.0.log'}:",
    ]


def test_reason_is_printed_once_before_trackers_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed_before_close: list[str] = []

    class SlowTrackers(Trackers):
        """Fake trackers that wait, and record what was printed by then."""

        def close(self) -> None:
            printed_before_close.append(capsys.readouterr().err)

    def fails(*_: object) -> Path:
        raise RuntimeError("trainer.0 exited with status 1")

    monkeypatch.setattr(commands, "Trackers", SlowTrackers)
    monkeypatch.setattr(commands, "launch", fails)
    plan: Any = SimpleNamespace(config=RunConfig(model=ModelConfig(path="none")))
    job = Job("sft", tmp_path / "logs", trainer_role="sft")

    def command(*_: object) -> None:
        commands._launch_showing(plan, job, Node(0, 1, "local"), lambda folder: None, tmp_path, 3)

    monkeypatch.setitem(cli.RUN, "sft", command)
    monkeypatch.setattr(cli, "_resolved", lambda arguments: plan)
    assert cli.main(["sft", "x.yaml"]) == 1
    assert printed_before_close == ["megarl: trainer.0 exited with status 1\n"]
    assert capsys.readouterr().err == ""
    tell(ConfigError(["a: b", "c: d"]))
    assert capsys.readouterr().err == "megarl: a: b\nmegarl: c: d\n"


def test_trackers_of_an_unwritable_folder_are_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake tracker reads for ever. The run's folder is gone, so nothing can be written."""
    monkeypatch.setattr(tracking, "HOPELESS_S", 0.2)
    run_dir = tmp_path / "run"
    messages: list[str] = []
    settings = RunConfig(model=ModelConfig(path="none"))
    settings.observe.trackers = ["tensorboard"]
    settings.timeouts.trackers_s = 600.0
    (tmp_path / "settings.yaml").write_text("{}")
    trackers = Trackers(settings, run_dir, messages.append)
    run_dir.mkdir()
    MetricsWriter(run_dir).close()
    trackers.start(tmp_path / "settings.yaml", 0)
    (process,) = trackers._processes.values()
    process.kill()
    process.wait()
    sleeper = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"], stdin=subprocess.PIPE
    )
    trackers._processes["tensorboard"] = sleeper
    run_dir.rename(tmp_path / "elsewhere")
    start_s = time.monotonic()
    trackers.close()
    assert time.monotonic() - start_s < 60
    assert sleeper.poll() is not None
    assert messages[0].startswith(
        "tracker tensorboard: it had not finished 0.2 s after the run (its folder cannot be "
        "written to: No such file"
    )


def test_unwritable_trace_does_not_hide_the_failure(tmp_path: Path) -> None:
    plan: RunPlan = resolve(config(tmp_path, "cluster.gpu=H100"), "plan")
    with (
        pytest.raises(RuntimeError, match="the disk is full"),
        launcher.traced(plan, Node(0, 1, "x"), Resume()) as trace,
    ):
        trace._file.close()
        trace._file = open("/dev/full", "ab", buffering=0)
        raise RuntimeError("the disk is full")


@pytest.mark.parametrize(("zero", "queues"), [(1, "1"), (3, "8")])
def test_sharded_trainer_has_several_queues(tmp_path: Path, zero: int, queues: str) -> None:
    plan = resolve(config(tmp_path, f"trainer.zero={zero}"), "plan")
    environment = trainer_environment(plan, 0, 0, "127.0.0.1", 1, None)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == queues
