"""Every tracker with its own library, against metrics.jsonl.

The values are read back from the library's local store, also after resumes.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tracker_stores import READERS, Curves, curves_of, read_tensorboard

from megarl.base.rollout_types import Failure, GroupSummary, GroupTexts, Sample
from megarl.config.errors import ConfigError
from megarl.config.load import dump_config
from megarl.config.schema import ModelConfig, RunConfig
from megarl.evaluation.scores import complete_metrics, write_result
from megarl.launch.tracking import Trackers
from megarl.observe.metrics import METRICS_FILE, MetricsWriter
from megarl.observe.samples import SamplesWriter
from megarl.observe.tracking import NewRows, StaleRows, TrackerState, follow
from megarl.trackers.trackers import TrackerSettings, check_trackers

WAIT_S = 240.0  # the import of one library may take a minute on a busy machine


def config_of(name: str) -> RunConfig:
    config = RunConfig(model=ModelConfig(path="none"))
    config.observe.trackers = [name]
    config.timeouts.trackers_s = WAIT_S
    return config


def launch(folder: Path, name: str, first: int, steps: range, mark: float) -> list[str]:
    """A start of a run that writes `steps`.

    The trainer opens its file after the tracker has started.
    """
    messages: list[str] = []
    config_path = folder / "settings.yaml"
    folder.mkdir(exist_ok=True)
    config_path.write_text(dump_config(config_of(name)))
    trackers = Trackers(config_of(name), folder, messages.append)
    trackers.start(config_path, first)
    writer = MetricsWriter(folder, resume_step=first)
    for step in steps:
        values = {
            "loss": mark + step / 4,
            "pass@1": 0.5,
            "sync/audit_ok": True,
            "grad_norm": float("nan"),
            "reward/mean": step,
        }
        writer.write(step, values, {"response_tokens": [1.0, 2.0]})
    writer.close()
    trackers.close()
    return messages


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        "tensorboard",
        *(
            pytest.param(tracker, marks=pytest.mark.long)
            for tracker in ("wandb", "mlflow", "swanlab", "trackio")
        ),
    ],
)
def test_curves_are_those_of_metrics_jsonl_after_every_resume(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    for variable in [
        key for key in os.environ if key.startswith(("WANDB_", "MLFLOW_", "SWANLAB_", "TRACKIO_"))
    ]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # without anyone's credentials
    (tmp_path / "home").mkdir()
    folder = tmp_path / "run"

    def curves() -> Curves:
        tracked = TrackerState.load(folder, name)
        assert tracked.closed and tracked.ended and not tracked.failures
        return READERS[name](folder, tracked.run)

    assert launch(folder, name, 0, range(4), mark=0.0) == []
    assert curves() == curves_of(folder, name)
    run = TrackerState.load(folder, name).run
    # the last weights' evaluation goes into the last row
    write_result(folder, 6, {"pass@1": 0.75, "suites": {"hard": {"pass@1": 0.25}}})
    assert launch(folder, name, 4, range(4, 6), mark=0.0) == []
    assert curves_of(folder)["eval/hard/pass@1"] == [(5, 0.25)]
    assert (TrackerState.load(folder, name).run, curves()) == (run, curves_of(folder, name))
    # resumed from a checkpoint: steps 3 to 5 are repeated
    assert launch(folder, name, 3, range(3, 8), mark=100.0) == []
    assert curves() == curves_of(folder, name) and curves_of(folder)["loss"][2:4] == [
        (2, 0.5),
        (3, 100.75),
    ]


def test_a_killed_tracker_is_told_of_once_and_made_anew(tmp_path: Path) -> None:
    messages: list[str] = []
    (tmp_path / "settings.yaml").write_text(dump_config(config_of("tensorboard")))
    trackers = Trackers(config_of("tensorboard"), tmp_path, messages.append)
    trackers.start(tmp_path / "settings.yaml", 0)
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"loss": 1.0})
    (process,) = trackers._processes.values()
    process.kill()
    process.wait()
    for _ in range(3):
        trackers._looked = 0.0
        trackers.poll()
    assert len(messages) == 1 and messages[0].startswith(
        "tracker tensorboard: its process ended (-9)"
    )
    trackers.close()
    assert "may lack steps; the next start of the run sends them" in messages[1]
    writer.close()
    assert launch(tmp_path, "tensorboard", 1, range(1, 3), mark=0.0) == []
    assert read_tensorboard(tmp_path, "") == curves_of(tmp_path)


@pytest.mark.long
def test_tracker_that_cannot_be_opened_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "tb").write_text("a file where its folder should be")
    messages: list[str] = []
    config = config_of("tensorboard")
    config.timeouts.trackers_s = 6.0
    (tmp_path / "settings.yaml").write_text(dump_config(config))
    trackers = Trackers(config, tmp_path, messages.append)
    trackers.start(tmp_path / "settings.yaml", 0)
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"loss": 1.0})
    writer.close()
    deadline = time.monotonic() + WAIT_S
    while not messages and time.monotonic() < deadline:
        time.sleep(0.2)
        trackers.poll()
    trackers.close()
    assert "it is tried again" in messages[0] and any(
        "may lack steps: " in text for text in messages[1:]
    )
    assert TrackerState.load(tmp_path, "tensorboard").failures > 0
    (tmp_path / "tb").unlink()
    assert launch(tmp_path, "tensorboard", 1, range(1, 2), mark=0.0) == []
    assert read_tensorboard(tmp_path, "") == curves_of(tmp_path)


class FakeWandb:
    """A fake of the library: records how a run is opened, and what it logs."""

    def __init__(self) -> None:
        self.opened: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def login(self, prompt: bool) -> bool:
        return False

    def Settings(self, **_: Any) -> None: ...

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(columns, row, strict=True)) for row in data]

    def init(self, **settings: Any) -> FakeWandb:
        self.opened = settings
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None: ...


def test_wandb_gets_the_runs_owner_and_texts_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setattr("megarl.trackers.trackers._library", lambda name: wandb)
    writer = MetricsWriter(tmp_path)
    samples = SamplesWriter(tmp_path)
    for step in range(12):
        writer.write(step, {"loss": 1.0})
        failures = [Failure("exit", "status 1", part="rollout.program")] * (step == 10)
        sample = Sample([1, 2], [0.0, 0.0], [0, 0], f"said {step}", 0.5, "stop", failures=failures)
        group = (
            GroupSummary(step, 1, [sample.summary()]),
            GroupTexts("a prompt", "4", [(sample.text, [])]),
        )
        samples.write(step, [group])
        samples.write(step, [group], dropped=True)
    beginning = TrackerSettings(tmp_path, "p", "mine", {}, entity="us", tags=["a", "b"])
    follow(
        "wandb",
        beginning,
        NewRows(tmp_path / METRICS_FILE, StaleRows(0, 0, "")),
        0,
        lambda seconds: True,
    )
    settings = {
        key: wandb.opened[key] for key in ("project", "name", "group", "entity", "tags", "mode")
    }
    assert settings == {
        "project": "p",
        "name": "mine",
        "group": "mine",
        "entity": "us",
        "tags": ["a", "b"],
        "mode": "offline",
    }
    steps = [step for step, _ in wandb.logged]
    assert steps == sorted(steps), (
        "a library that has gone on to the next step takes nothing more of this one"
    )
    tables = {step: values["samples"] for step, values in wandb.logged if "samples" in values}
    assert [[row["response"] for row in table] for table in tables.values()] == [
        ["said 0"] * 2,
        ["said 10"] * 2,
    ]
    assert (
        tables[10][0]["failed"] == "exit: status 1"
        and tables[10][0]["reward"] == 0.5
        and tables[0][0]["failed"] == ""
    )


def test_what_rows_get_at_the_end_is_added_to_their_steps(tmp_path: Path) -> None:
    rows = NewRows(tmp_path / METRICS_FILE, StaleRows.from_step(tmp_path / METRICS_FILE, 0))
    calls = []
    writer = MetricsWriter(tmp_path)

    def ended(_: float) -> bool:
        calls.append(len(read_tensorboard(tmp_path, "").get("loss", ())))
        if len(calls) <= 2:
            writer.write(len(calls), {"loss": 0.5})
        elif len(calls) == 4:
            for version in (1, 2):
                write_result(tmp_path, version, {})
            complete_metrics(tmp_path)
        return len(calls) == 4

    follow("tensorboard", TrackerSettings(tmp_path, "project", "name", {}), rows, 0, ended)
    writer.close()
    assert calls == [0, 1, 2, 2]
    assert read_tensorboard(tmp_path, "") == {
        "loss": [(1, 0.5), (2, 0.5)],
        "eval/version": [(1, 1.0), (2, 2.0)],
    }


def test_rows_of_an_earlier_start_count_after_the_trainers_cut(
    tmp_path: Path,
) -> None:
    launch_rows = [(step, mark) for step, mark in ((0, 0.0), (1, 0.0), (2, 0.0))]
    writer = MetricsWriter(tmp_path)
    for step, mark in launch_rows:
        writer.write(step, {"loss": mark})
    writer.close()
    rows = NewRows(tmp_path / METRICS_FILE, StaleRows.from_step(tmp_path / METRICS_FILE, 1))
    rows.poll()
    assert [row["step"] for row in rows.rows] == [0]
    writer = MetricsWriter(tmp_path, resume_step=1)
    for step in (1, 2, 3):  # more steps than before, read at once
        writer.write(step, {"loss": 9.0})
    writer.close()
    rows.poll()
    assert [(row["step"], row["loss"]) for row in rows.rows] == [
        (0, 0.0),
        (1, 9.0),
        (2, 9.0),
        (3, 9.0),
    ]


def test_missing_package_is_refused_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_trackers(["tensorboard"])
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name)
    )
    with pytest.raises(
        ConfigError,
        match=r"observe.trackers=\[tensorboard, wandb\]: wandb cannot be imported here; .* -m pip "
        r"install .*wandb",
    ):
        check_trackers(["tensorboard", "wandb"])
