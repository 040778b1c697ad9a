"""Fixtures that several test files use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.base.files import unreachable

MODELS = Path(__file__).parents[2] / "configs" / "models"


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    shutil.copytree(MODELS / "llama-3.1-8b", model)
    (model / "model.safetensors").touch()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "tiny-llama" / name, model)
    rows = tmp_path / "rows.jsonl"
    path = tmp_path / "run.yaml"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    path.write_text(
        f"model: {{path: {model}}}\ndata: {{train: {{source: {rows}}}}}\nrun_dir: {tmp_path}/run\n"
    )
    return path


@pytest.fixture
def hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    unreachable.cache_clear()


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, which must succeed, and returns what it prints."""

    def run(*arguments: str) -> str:
        assert cli.main([*arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def printed_json(printed: Callable[..., str]) -> Callable[..., Any]:
    return lambda *arguments: json.loads(printed(*arguments))


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, which must end with status 2, and returns its messages."""

    def run(*arguments: str) -> str:
        assert cli.main([*arguments]) == 2
        return capsys.readouterr().err

    return run
