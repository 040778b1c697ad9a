"""The import rules: a file imports only its own tier and lower ones; no folders import each other;
only some folders import megatron or sglang.

Every import counts: relative ones, ones inside functions, ones under `if TYPE_CHECKING`, and
`importlib.import_module("…")` with a literal name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"megarl": "megarl", "megarl.kernels": "kernels", "megarl.launch": "launch"}

# The tiers of folders, from the lowest. A capability is one folder. Its files that the trunk calls
# have a lower tier than the rest of it, and are listed one by one. A new folder must be added here.
TIERS = {
    name: tier
    for tier, names in enumerate(
        (
            "base config lora.settings roles.settings simulation.settings speculative.settings",
            "kernels messaging models sandbox controller",
            "generator reshard rewards lora.layout",
            "algorithms data critic.losses teachers.loss trainer.hf_files",
            "plan critic.plan lora.files lora.plan roles.plan speculative.plan teachers.plan",
            "agents evaluation.scores lora observe roles rollouts speculative teachers trackers "
            "trainer weight_sync",
            "critic estimate evaluation executors labels lora.estimate report roles.training starter",
            "launch simulation train_loop",
            "bench",
            "api",
            "cli",
            "__main__",
        )
    )
    for name in names.split()
}
ONLY_IN = {
    "megatron": ["megarl.trainer", "megarl.lora.trainer"],
    "sglang": ["megarl.generator", "megarl.weight_sync.engine", "megarl.lora.engine"],
}


def modules() -> dict[str, Path]:
    """Dotted module name → file, for every Python file of the package."""
    files = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return files


def imports(module: str, is_package: bool, source: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of all imports in `source`.

    `from a import b` yields a.b, which also names a.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            stem = base + (node.module.split(".") if node.module else [])
            yield from ((node.lineno, ".".join([*stem, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", None))
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def tier(name: str) -> int | None:
    """The tier of a dotted name under megarl, by its longest prefix with a tier.

    None for the bare package and for other packages.
    """
    top, _, part = name.partition(".")
    while top == "megarl" and part:
        if part in TIERS:
            return TIERS[part]
        part = part.rpartition(".")[0]
    return None


def violations(module: str, is_package: bool, source: str) -> list[str]:
    problems = []
    module_tier = tier(module)
    for line, name in imports(module, is_package, source):
        name_tier = tier(name)
        if module_tier is not None and name_tier is not None and name_tier > module_tier:
            problems.append(
                f"{module}:{line} (tier {module_tier}) imports {name} (tier {name_tier})"
            )
        is_python_entry = f"{name}.".startswith("megarl.api.")
        if module == "megarl" and name_tier is not None and not is_python_entry:
            problems.append(
                f"{module}:{line}: the package itself imports nothing of its own but its Python "
                "entry"
            )
        homes = ONLY_IN.get(name.split(".")[0], [module])
        if not any(module == home or module.startswith(home + ".") for home in homes):
            problems.append(f"{module}:{line} imports {name}, which only {' and '.join(homes)} may")
    return problems


def test_every_file_keeps_the_import_rule() -> None:
    problems = []
    for module, path in sorted(modules().items()):
        if module != "megarl" and tier(module) is None:
            problems.append(f"{module} has no tier")
        problems += violations(module, path.name == "__init__.py", path.read_text())
    assert not problems, "\n".join(problems)


def test_few_files_import_lora() -> None:
    """Other files ask the run's plan (docs/architecture.md)."""
    importers = set()
    for module, path in modules().items():
        names = [name for _, name in imports(module, path.name == "__init__.py", path.read_text())]
        uses_lora = any(name.startswith("megarl.lora.") for name in names)
        if uses_lora and not module.startswith("megarl.lora."):
            importers.add(module.removeprefix("megarl."))
    assert importers == {
        "config.schema",
        "plan.checks",
        "plan.resolve",
        "executors.policy",
        "weight_sync.content",
        "weight_sync.engine.hooks",
        "estimate.command",
        "estimate.estimate",
    }


def circles(uses: dict[str, set[str]]) -> list[list[str]]:
    """Files that import each other, directly or through others."""
    order = TopologicalSorter(uses)
    try:
        order.prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


# A kernel's reference imports the compiled form when it is called, and the compiled form imports
# constants and types from the reference.
COMPILED = ("_numba", "_triton")


def test_no_files_import_each_other() -> None:
    files = modules()
    uses: dict[str, set[str]] = {module: set() for module in files}
    for module, path in files.items():
        for _, name in imports(module, path.name == "__init__.py", path.read_text()):
            while name.startswith("megarl.") and name not in files:
                name = name.rpartition(".")[0]
            if name.startswith("megarl.") and name != module and not name.endswith(COMPILED):
                uses[module].add(name)
    assert "megarl.reshard.map" in uses["megarl.weight_sync.writing"] and circles(uses) == []


def test_circles_are_detected() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not circles({"a": {"b", "c"}, "b": {"c"}})


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megarl.base.geometry", "from megarl.models import ModelSpec"),
        ("megarl.models.spec", "from megarl.plan.resolve import RunPlan"),
        ("megarl.config.load", "from megarl import plan"),
        ("megarl.config.load", "from ..plan import resolve"),
        ("megarl.config.load", "from .. import cli"),
        ("megarl.plan.memory", "def f():\n    import megarl.estimate.memory as b"),
        ("megarl.plan.memory", "import importlib\nimportlib.import_module('megarl.trainer.step')"),
        ("megarl.weight_sync.sender", "from megatron.core import parallel_state"),
        ("megarl.trainer.step", "def f():\n    from sglang.srt import server_args"),
        ("megarl.trainers", "import megatron.core"),
        ("megarl", "from megarl import base"),
    ],
)
def test_imports_of_higher_tiers_are_violations(module: str, source: str) -> None:
    assert violations(module, module == "megarl", source)


@pytest.mark.parametrize(
    ("module", "is_package", "source"),
    [
        (
            "megarl.plan",
            True,
            "from .topology import TrainerTopology\nfrom ..config.errors import ConfigError",
        ),
        (
            "megarl.plan.memory",
            False,
            "from . import topology\nfrom ..models import spec\nimport torch",
        ),
        (
            "megarl.trainer.step",
            False,
            "from megatron.core import parallel_state\nfrom megarl.reshard import map",
        ),
    ],
)
def test_imports_of_lower_tiers_are_allowed(module: str, is_package: bool, source: str) -> None:
    assert violations(module, is_package, source) == []
