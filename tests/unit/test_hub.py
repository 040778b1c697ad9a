"""Names on the hub when the hub cannot be reached: the cache serves them, or one message comes at once. The hub's own client talks to a
port without a server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.messaging.rendezvous import free_ports

TINY = Path(__file__).parents[2] / "configs/models/tiny-llama"


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    (port,) = free_ports(1)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name.lower()}
    return {**kept, "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "hf")}


def megarl(command: str, folder: Path, environment: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    config = folder / "run.yaml"
    config.write_text("model: {path: owner/model, dtype: float32}\ndata: {train: {source: owner/rows}}\ncluster: {gpu: cpu}\n")
    argv = [sys.executable, "-P", "-m", "megarl", *command.split(), str(config), f"run_dir={folder / 'run'}", *overrides]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment, cwd=folder)


def in_cache(folder: Path, environment: dict[str, str]) -> None:
    repository = Path(environment["HF_HOME"], "hub", "models--owner--model")
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0123")
    shutil.copytree(TINY, repository / "snapshots/0123")


def test_a_model_that_is_not_in_the_cache_fails_at_once(tmp_path: Path, offline: dict[str, str]) -> None:
    done = megarl("plan", tmp_path, offline)
    assert (done.returncode, done.stdout) == (2, "")
    wanted = f"config.json is not in the hub's cache, and {offline['HF_ENDPOINT']} cannot be reached ([Errno 111] Connection refused)"
    assert done.stderr == f"megarl: model.path=owner/model: no local folder; {wanted}; to plan without the checkpoint, set model.spec\n"


def test_rows_that_are_not_in_the_cache_fail_at_once(tmp_path: Path, offline: dict[str, str]) -> None:
    in_cache(tmp_path, offline)
    load = "load_rows(DatasetConfig('owner/rows'), 'data.train', 0)"
    code = f"from megarl.data.datasets import load_rows; from megarl.config.schema import *; {load}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=offline)
    assert "Retry" not in done.stderr
    assert "data.train.source=owner/rows, split train: cannot be loaded: it is not in the cache, and http" in done.stderr.splitlines()[-1]


def test_one_that_is_in_the_cache_is_taken_from_there(tmp_path: Path, offline: dict[str, str]) -> None:
    in_cache(tmp_path, offline)
    done = megarl("plan", tmp_path, offline, "rollout.max_tokens=64")
    assert done.returncode == 0 and "llama" in done.stdout and done.stderr == ""
