"""`make gpu-kit` and `make gpu` on a machine without a GPU.

The kit's Python has PyTorch, Triton and NumPy, and nothing else of this environment; for a whole
run also Transformers and common packages. All parts of the kit run, at toy sizes: kernels in
Triton's interpreter, the trainer over gloo, and writes through shared memory instead of CUDA IPC.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PYTHON = ".".join(map(str, sys.version_info[:2]))


def run(
    *command: str | Path, cwd: Path = ROOT, timeout_s: float = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "MAKE", "MFLAGS"))
    }
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit") / "gpu-kit"
    process = run("make", "gpu-kit", f"KIT={folder}")
    assert process.returncode == 0, process.stdout + process.stderr
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with PyTorch, Triton, NumPy, and their dependencies."""
    return linked(tmp_path_factory.mktemp("bare"), {"torch", "triton", "numpy"})


# What an engine imports and the kit does not have.
COMMON = set(
    "aiohttp cloudpickle httpx jinja2 msgpack ninja numba numpy pandas pillow prometheus-client "
    "psutil pyarrow regex requests rich "
    "safetensors scipy sentencepiece setuptools tensorboard tiktoken tokenizers torch tqdm "
    "transformers triton uvloop xxhash".split()
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with what a machine for machine learning has."""
    return linked(tmp_path_factory.mktemp("machine"), COMMON)


def linked(folder: Path, names: set[str]) -> Path:
    for distribution in closure(names):
        for top in {
            file.parts[0]
            for file in distribution.files or ()
            if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder


def closure(names: set[str]) -> Iterator[importlib.metadata.Distribution]:
    pending = sorted(names)
    visited = set()
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # a dependency for CUDA
            continue
        yield distribution
        needs = [need for need in distribution.requires or () if "extra ==" not in need]
        pending += [re.split(r"[\s<>=!~;\[(]", need, maxsplit=1)[0] for need in needs]


def test_kit_has_pieces_of_at_most_60_mib(kit):
    for piece in ("wheels", "engine"):
        assert sum(path.stat().st_size for path in (kit / piece).iterdir()) < 60 << 20
    wheels = sorted(path.name.split("-")[0] for path in (kit / "wheels").iterdir())
    assert wheels == [
        "einops",
        "megarl",
        "megatron_core",
        "msgspec",
        "omegaconf",
        "packaging",
        "pyyaml",
    ]
    assert {path.name for path in kit.iterdir()} == {"wheels", "engine", "run.py", "commit"}
    assert any(path.name.startswith("sglang-") for path in (kit / "engine").iterdir())


PARTS = [
    "trainer-1B",
    *(pytest.param(part, marks=pytest.mark.long) for part in ("kernels", "writes", "writes-fp8")),
]


@pytest.mark.parametrize("part", PARTS)
def test_kit_needs_only_torch_triton_and_numpy(part, kit, bare, tmp_path):
    python = sys._base_executable  # type: ignore[attr-defined]  # it does not see this environment's packages
    process = run(
        python,
        kit / "run.py",
        "--rehearse",
        "--parts",
        part,
        "--output",
        tmp_path / "out",
        cwd=tmp_path,
        PYTHONPATH=str(bare),
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert report["parts"][part]["status"] == "ok" and report["parts"][part]["rows"]
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert all(row["what"] in page for row in report["parts"][part]["rows"])
    assert f"torch {torch.__version__}" in page and report["date"] in page


@pytest.mark.long
def test_kit_runs_engine_and_trainer_on_a_common_machine(kit, machine, tmp_path):
    python = sys._base_executable  # type: ignore[attr-defined]
    parts = "environment,loop,loop-moe"
    process = run(
        python,
        kit / "run.py",
        "--rehearse",
        "--parts",
        parts,
        "--output",
        tmp_path,
        timeout_s=580,
        PYTHONPATH=str(machine),
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    results = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    for part in ("loop", "loop-moe"):
        rows = {row["what"]: row for row in results[part]["rows"]}
        assert rows["steps done"]["measured"] == rows["steps done"]["planned"]
        assert rows["updates whose audit is equal"]["measured"] > 0
    rows = {row["what"]: row for row in results["loop"]["rows"]}
    assert rows["engine killed after step"]["measured"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kit_without_a_gpu_says_what_is_missing(kit, bare, tmp_path):
    of_checkout = run("make", "gpu")
    assert of_checkout.returncode == 2
    assert re.search(
        r"make gpu lacks:\n- (PyTorch .* is built without CUDA|no NVIDIA GPU can be used "
        r"here|torch cannot)",
        of_checkout.stderr,
    )
    python = sys._base_executable  # type: ignore[attr-defined]
    of_kit = run(python, kit / "run.py", cwd=tmp_path, PYTHONPATH=str(bare))
    assert (
        of_kit.returncode == 2
        and "make gpu lacks" in of_kit.stderr
        and "Traceback" not in of_kit.stderr
    )
    assert not list(tmp_path.iterdir())


def test_failed_part_is_shown_and_later_parts_run(monkeypatch, tmp_path, capsys):
    from megarl.bench.gpu import __main__ as program

    monkeypatch.setattr(program, "REHEARSED_SLOWER", 1)
    # even its imports take longer
    late = program.KitPart("Late", "megarl.bench.gpu.kernels:run", 0.3)
    broken = program.KitPart("Broken", "megarl.bench.gpu.nowhere:run", 60)
    monkeypatch.setattr(program, "PARTS", {"late": late, "broken": broken})
    monkeypatch.setattr(sys, "argv", ["megarl.bench.gpu", "--rehearse", "--output", str(tmp_path)])
    assert program.main() == 1
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts["late"]["status"] == "late" and "not done within 0 s" in parts["late"]["error"]
    assert parts["broken"]["status"] == "failed" and parts["broken"]["error"]
    assert "Broken: failed" in (tmp_path / "gpu.md").read_text()


def test_unknown_parts_are_refused(monkeypatch, capsys):
    from megarl.bench.gpu import __main__ as program

    monkeypatch.setattr(sys, "argv", ["megarl.bench.gpu", "--parts", "kernel"])
    assert program.main() == 2
    assert "--parts kernel: choose from environment, loop, writes" in capsys.readouterr().err
