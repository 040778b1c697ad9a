"""The wheel of `make wheel`, installed where no checkout is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from documented import ROOT

PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import megarl
from megarl.cli import main
assert megarl.__file__.startswith(sys.path[0])
sys.exit(main())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a wheel, which is built as the Makefile builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    [recipe] = [
        line.strip() for line in (ROOT / "Makefile").read_text().splitlines() if "uv build" in line
    ]
    build = recipe.replace(".venv/bin/", f"{sys.prefix}/bin/").replace("dist", str(folder / "dist"))
    source = folder / "source"
    source.mkdir()
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "megarl",
        "kernels",
        "launch",
        "configs",
    ):
        subprocess.run(["cp", "-a", ROOT / name, source / name], check=True)
    subprocess.run(["bash", "-c", build], cwd=source, check=True, capture_output=True)
    [wheel] = (folder / "dist").glob("megarl-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def megarl(site: Path, folder: Path, *arguments: str) -> str:
    """What the installed program prints in `folder`, which sees no checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", PROGRAM, str(site), *arguments]
    completed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, f"{arguments}\n{completed.stdout}\n{completed.stderr}"
    return completed.stdout


def test_a_wheel_has_all_files_of_the_package(installed: Path) -> None:
    packed_files = {
        path.relative_to(installed / "megarl")
        for path in (installed / "megarl").rglob("*")
        if path.is_file()
    }
    expected = set()
    for folder, inside in (
        (ROOT / "megarl", ""),
        *((ROOT / name, name) for name in ("kernels", "launch", "configs")),
    ):
        files = [
            path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
        ]
        expected |= {inside / path.relative_to(folder) for path in files}
    assert len(expected) > 300 and expected - packed_files == set()


def test_the_quickstart_is_planned_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    assert json.loads(megarl(installed, tmp_path, "plan", "configs/quickstart.yaml", "--json"))[
        "fits"
    ]


@pytest.mark.long
def test_first_run_and_quickstart_pass_dry_runs_from_a_wheel(
    installed: Path, tmp_path: Path
) -> None:
    megarl(installed, tmp_path, "init", "first")
    for config in ("first/run.yaml", "configs/quickstart.yaml"):
        printed = megarl(installed, tmp_path, "train", config, "--dry-run")
        assert (
            f"before it  megarl sft {config}" in printed
            and "proven: every destination byte" in printed
        )
