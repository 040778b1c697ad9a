"""A configuration of Llama-3.1-8B, and the problems of a configuration, for tests of resolving."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.plan.resolve import resolve

CONFIGS = Path(__file__).parents[2] / "configs"
# 32 layers, 32 heads, 8 kv heads, ffn 14336, context 131072
MODEL = CONFIGS / "models" / "llama-3.1-8b"


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: {MODEL}}}\ndata: {{train: {{source: rows.jsonl}}}}\nrun_dir: "
        f"{tmp_path}/run\n"
    )
    return load_config(path, list(overrides))


def with_weights(folder: Path) -> str:
    """An override that names a model folder with weights."""
    shutil.copytree(MODEL, folder)
    (folder / "model.safetensors").touch()
    return f"model.path={folder}"


def problems_of(tmp_path: Path, *overrides: str, command: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(config(tmp_path, *overrides), command)
    return caught.value.problems
