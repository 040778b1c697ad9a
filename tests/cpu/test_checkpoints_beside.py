"""Checkpoints and exports written during training hold the state at which they were begun."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_cases import save_model
from trainer_processes import saved, spawn

from megarl.plan.checkpoints import complete_checkpoints


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("tied", folder)
    return folder


def test_saving_beside_training_saves_the_values_before_it(model: Path, tmp_path: Path) -> None:
    """Two ranks make steps meanwhile. A disk fails one checkpoint; a later one succeeds."""
    spawn(
        2,
        tmp_path,
        [{"run": "saved_beside", "name": "beside", "model": str(model), "topology": {"dp": 2}}],
    )
    for rank in saved(tmp_path, "beside"):
        assert rank["there_before_finish"] == []
        assert rank["moved"], "the steps made meanwhile changed the weights"
        assert rank["loaded"] == rank["held"]
        assert "rank 1: " in rank["message"] and "could not be written" in rank["message"]
        assert rank["left"] == ["after", "alone", "beside", "beside.hf", "alone.hf"]
    files = [
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("alone", "beside")
    ]
    assert files[0] == files[1], "byte for byte as if training had waited"
    exports = [
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("alone.hf", "beside.hf")
    ]
    assert exports[0] == exports[1] and "model.safetensors" in exports[0]


def test_files_not_made_again_precede_the_checkpoint(model: Path, tmp_path: Path) -> None:
    """What a resumed run would not make again is complete before the checkpoint.

    If rank 0's own part fails, all ranks say so, and none waits for it."""
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{path: {model}}}\ndata: {{train: {{source: rows.jsonl}}}}\n")
    spawn(
        2,
        tmp_path,
        [
            {
                "run": "saving",
                "name": "saving",
                "model": str(model),
                "topology": {"dp": 2},
                "config": str(config),
            }
        ],
    )
    for rank in saved(tmp_path, "saving"):
        assert not rank["old_export"], "another run's weights under the name of this one's"
        assert not rank["checkpoint_before_export"] and rank["there"] == [True, True, True]
        assert (
            rank["no_folder"].startswith("WriteError: ")
            and "step could not be written" in rank["no_folder"]
        )
        assert (
            rank["no_configuration"].startswith("WriteError: ")
            and "neither a folder nor reachable" in rank["no_configuration"]
        )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_run_goes_on_from_a_complete_checkpoint(model: Path, tmp_path: Path) -> None:
    """The run is killed at 20 random moments.

    Each life checks that its checkpoint holds the trainer's state at that step, and repeats
    later steps exactly.
    """
    command = [
        sys.executable,
        str(Path(__file__).with_name("saving_worker.py")),
        str(model),
        str(tmp_path),
        "20",
        "0",
    ]
    completed = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=840,
    )
    lives = [json.loads(line) for line in completed.stdout.splitlines()]
    assert [life["failure"] for life in lives] == [""] * 20, completed.stderr
    starts = [life["began"] for life in lives]
    assert starts == sorted(starts) and starts[-1] > 5, "it never went back"
    for life, after in itertools.pairwise(lives):
        assert after["began"] in (0, *range(life["steps"] - 2, life["steps"] + 1)), (
            "at most the step in flight and its save are lost"
        )
    assert [step for step, _ in complete_checkpoints(tmp_path)][-1] >= lives[-1]["steps"] - 2
