"""Names on the hub when the hub cannot be reached: the cache serves them, or one message comes at
once. The hub's own client talks to a port without a server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stand_in import hub_stand_in

from megarl.messaging.rendezvous import free_ports

TINY = Path(__file__).parents[2] / "configs/models/tiny-llama"


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    (port,) = free_ports(1)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HF_") and "proxy" not in name.lower()
    }
    environment["HF_ENDPOINT"] = f"http://127.0.0.1:{port}"
    environment["HF_HOME"] = str(tmp_path / "hf")
    return environment


def megarl(
    command: str, folder: Path, environment: dict[str, str], *overrides: str
) -> subprocess.CompletedProcess[str]:
    config = folder / "run.yaml"
    config.write_text(
        "model: {path: owner/model, dtype: float32}\ndata: {train: {source: "
        "owner/rows}}\ncluster: {gpu: cpu}\n"
    )
    argv = [
        sys.executable,
        "-P",
        "-m",
        "megarl",
        *command.split(),
        str(config),
        f"run_dir={folder / 'run'}",
        *overrides,
    ]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=60, env=environment, cwd=folder
    )


def in_cache(folder: Path, environment: dict[str, str]) -> None:
    repository = Path(environment["HF_HOME"], "hub", "models--owner--model")
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0123")
    shutil.copytree(TINY, repository / "snapshots/0123")


def test_model_not_in_the_cache_fails_at_once(tmp_path: Path, offline: dict[str, str]) -> None:
    completed = megarl("plan", tmp_path, offline)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr == (
        "megarl: model.path=owner/model: no local folder; config.json is not in the hub's cache, "
        f"and {offline['HF_ENDPOINT']} cannot be reached ([Errno 111] Connection refused); to "
        "plan without the checkpoint, set model.spec\n"
    )


def test_rows_not_in_the_cache_fail_at_once(tmp_path: Path, offline: dict[str, str]) -> None:
    in_cache(tmp_path, offline)
    load = "load_rows(DatasetConfig('owner/rows'), 'data.train', 0)"
    code = f"from megarl.data.datasets import load_rows; from megarl.config.schema import *; {load}"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=offline
    )
    assert "Retry" not in completed.stderr
    problem = (
        "data.train.source=owner/rows, split train: cannot be loaded: it is not in the cache, and "
        "http"
    )
    assert problem in completed.stderr.splitlines()[-1]


def test_model_in_the_cache_is_read_from_there(tmp_path: Path, offline: dict[str, str]) -> None:
    in_cache(tmp_path, offline)
    completed = megarl("plan", tmp_path, offline, "rollout.max_tokens=64")
    assert completed.returncode == 0 and "llama" in completed.stdout and completed.stderr == ""


def test_dry_run_reads_model_and_rows_of_the_hub(tmp_path: Path, offline: dict[str, str]) -> None:
    """As in README.md, where model and rows are names on the hub."""
    shutil.copytree(TINY, tmp_path / "hub/owner/model")
    rows = tmp_path / "hub/datasets/owner/rows/train.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text('{"question": "1+2=", "answer": "3"}\n{"question": "4+5=", "answer": "9"}\n')
    with hub_stand_in(tmp_path / "hub") as address:
        environment = offline | {"HF_ENDPOINT": address}
        completed = megarl(
            "train --dry-run", tmp_path, environment, "rollout.max_tokens=64", "reward.name=math"
        )
        rows.write_text('{"question": "1+2="}\n')
        shutil.rmtree(environment["HF_HOME"])
        wrong = [
            "data.train.source=owner/none",
            "data.eval.source=owner/rows",
            "data.eval.split=train",
        ]
        refused = megarl("train --dry-run", tmp_path, environment, *wrong, "rollout.max_tokens=64")
    assert completed.returncode == 0, completed.stderr
    lines = completed.stdout.splitlines()
    assert lines[0].startswith(
        "data       data.train: 2 rows of owner/rows, all read; all prompts leave room for a "
        "response; prompts of 5 tokens"
    )
    assert lines[1].startswith(
        "reward     reward.name=math, 2 rows of data.train: the reference answer 1, 1;"
    )
    assert lines[2] == "CPU ranks  2: 1 for the trainer, 1 for engines"
    assert refused.returncode == 2
    assert "data.train.source=owner/none, split train: cannot be loaded: " in refused.stderr
    assert "owner/rows, split train, row 1: no column 'answer'" in refused.stderr


def test_dry_run_says_why_the_hub_was_not_read(tmp_path: Path, offline: dict[str, str]) -> None:
    in_cache(tmp_path, offline)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+2=", "answer": "3"}\n')
    settings = ["rollout.max_tokens=64", "data.eval.source=rows.jsonl"]
    completed = megarl("train --dry-run", tmp_path, offline, *settings)
    assert completed.returncode == 0, completed.stderr
    reason = f"{offline['HF_ENDPOINT']} cannot be reached ([Errno 111] Connection refused)"
    first, second = completed.stdout.splitlines()[:2]
    assert (
        first == "data       data.train: owner/rows, on the hub, is read when the run starts; not "
        f"checked here: {reason}"
    )
    assert "data.eval: 1 rows of rows.jsonl, all read; all prompts leave room" in second, (
        "the cached tokenizer was used"
    )
