"""The installed package: folders map to names, and pins agree with each other and with the
installed versions.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import find_packages

from megarl.generator.cpu_support import ABSENT

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def lock(file: str = "cpu.txt") -> dict[str, Version]:
    """Name → version, from a file in requirements/."""
    pins: dict[str, Version] = {}
    for line in (ROOT / "requirements" / file).read_text().splitlines():
        if line.strip() and not line.startswith(("#", "    --hash=sha256:")):
            # a line that is not an exact pin fails here
            name, version = line.removesuffix("\\").strip().split("==")
            assert canonicalize_name(name) not in pins, f"{name} is pinned twice"
            pins[canonicalize_name(name)] = Version(version)
    return pins


def test_every_folder_of_the_tree_is_a_package_and_installed() -> None:
    folders = {
        path.parent
        for top in ("megarl", "kernels", "launch")
        for path in (ROOT / top).rglob("*.py")
    }
    assert all((folder / "__init__.py").exists() for folder in folders)
    packages = find_packages(
        str(ROOT), include=PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    )
    inside = {
        folder
        if folder.is_relative_to(ROOT / "megarl")
        else ROOT / "megarl" / folder.relative_to(ROOT)
        for folder in folders
    }
    assert set(packages) == {".".join(folder.relative_to(ROOT).parts) for folder in inside}


def test_top_folders_are_imported_as_parts_of_megarl_alone(
    tmp_path: Path,
) -> None:
    """From any directory, and not under their bare names."""
    code = (
        "import importlib.util, megarl.kernels, megarl.launch\n"
        "print(megarl.kernels.__file__, megarl.launch.__file__)\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "print(spec.origin if spec else None)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    qualified, bare = result.stdout.splitlines()
    assert qualified == f"{ROOT}/megarl/kernels/__init__.py {ROOT}/megarl/launch/__init__.py"
    assert not bare.startswith(str(ROOT))


def test_make_matrix_hands_pytest_what_it_takes() -> None:
    """tests/cpu defines the report's option. pytest knows it only if it takes no argument for the
    path of a test.
    """
    (line,) = [
        line for line in (ROOT / "Makefile").read_text().splitlines() if "pytest -m matrix" in line
    ]
    command = line.strip().removeprefix("@.venv/bin/pytest").removesuffix("$(ARGS)")
    pytest_help = [sys.executable, "-P", "-m", "pytest", *shlex.split(command), "--markers"]
    result = subprocess.run(pytest_help, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_transformers_does_not_mistake_our_kernels_folder() -> None:
    code = (
        "import kernels, importlib.util\n"
        "from transformers.utils import import_utils\n"
        "print(kernels.__file__, importlib.util.find_spec('kernels.quantise'), "
        "import_utils.is_kernels_available())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == f"{ROOT}/kernels/__init__.py None False\n", result.stderr


def test_entry_points_are_installed() -> None:
    entry_points = {
        (point.group, point.name): point.value
        for point in metadata.distribution("megarl").entry_points
    }
    assert entry_points == {
        ("console_scripts", "megarl"): "megarl.cli:main",
        ("sglang.srt.plugins", "megarl"): "megarl.launch.plugin:activate",
    }


def test_the_lock_satisfies_every_declared_dependency() -> None:
    project = PYPROJECT["project"]
    pins = lock()
    declared = project["dependencies"] + project["optional-dependencies"]["test"]
    for requirement in map(Requirement, declared):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), (
            requirement
        )
    for requirement in map(Requirement, declared + project["optional-dependencies"]["gpu"]):
        assert requirement.specifier.contains(
            lock("gpu.txt")[canonicalize_name(requirement.name)]
        ), requirement


def test_both_locks_have_the_same_versions() -> None:
    """So the versions tested without GPUs also run on GPUs.

    `make lock` ensures that as far as SGLang allows.
    """
    cpu = lock()
    gpu = lock("gpu.txt")
    differ = {
        name: (str(cpu[name]), str(gpu[name]))
        for name in cpu.keys() & gpu.keys()
        if cpu[name] != gpu[name]
    }
    assert not differ
    assert cpu["mooncake-transfer-engine-non-cuda"] == gpu["mooncake-transfer-engine-cuda13"]


def test_stand_ins_have_the_versions_of_what_they_stand_for() -> None:
    gpu = lock("gpu.txt")
    assert {name: Version(version) for name, (version, _) in ABSENT.items()} == {
        "sgl_kernel": gpu["sglang-kernel"],
        "torchvision": gpu["torchvision"],
    }


def test_the_gpu_extra_is_for_the_cuda_of_sglang() -> None:
    """Mooncake's wheels link one major version of libcudart.

    With another version they do not import, and weights would silently go over NCCL. Transformer
    Engine has a core package for each version.
    """
    (flashinfer,) = [
        r
        for r in map(Requirement, metadata.requires("sglang"))
        if r.name.startswith("flashinfer") and r.extras
    ]
    (cuda,) = flashinfer.extras  # such as cu13
    gpu_requirements = {
        r.name: r for r in map(Requirement, PYPROJECT["project"]["optional-dependencies"]["gpu"])
    }
    assert f"mooncake-transfer-engine-{cuda.replace('cu', 'cuda')}" in gpu_requirements
    assert gpu_requirements["transformer-engine"].extras == {"pytorch", f"core_{cuda}"}


def test_transformer_engine_has_the_version_of_megatron_core() -> None:
    """Megatron-core silently imports any other version, including the newest."""
    core = Path(str(metadata.distribution("megatron-core").locate_file("megatron/core")))
    version_check = re.compile(r"""is_te_min_version\(["'](\d+\.\d+)""")
    newest = max(
        Version(number)
        for file in core.rglob("*.py")
        for number in version_check.findall(file.read_text())
    )
    assert lock("gpu.txt")["transformer-engine"].release[:2] == newest.release


def test_flash_linear_attention_is_what_megatron_core_requires() -> None:
    """The version is in its development extra.

    Without the package Megatron has no gated delta nets on GPUs.
    """
    requirement = next(
        r
        for r in map(Requirement, metadata.requires("megatron-core") or ())
        if r.name == "flash-linear-attention"
    )
    assert requirement.specifier.contains(lock("gpu.txt")[requirement.name])


def test_installed_packages_have_the_locked_versions() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("the lock is the CPU stack's")
    wrong = {}
    for name, version in lock().items():
        installed = Version(metadata.version(name))
        if Version(installed.public) != version:
            wrong[name] = (str(installed), str(version))
    assert not wrong, f"installed, locked: {wrong}"
