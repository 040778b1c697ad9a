"""The import rule: a file imports its own tier and lower ones only; megatron and sglang each live in one folder.

Every import statement counts, wherever it stands: relative ones, ones inside functions, ones under `if TYPE_CHECKING`,
and `importlib.import_module("…")` with a literal name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"megarl": "megarl", "megarl.kernels": "kernels", "megarl.launch": "launch"}

# Every module or package directly under megarl must be listed: a new one takes its tier here, on purpose.
TIERS = {
    "types": 0,
    "protocols": 0,
    "files": 0,
    "deaths": 0,
    "hub": 1,
    "config": 1,
    "topology": 1,
    "models": 2,
    "plan": 3,
    "reshard": 3,
    "algorithms": 3,
    "rewards": 3,
    "data": 3,
    "kernels": 3,
    "messaging": 3,
    "workers": 3,
    "planner": 4,
    "transports": 4,
    "channels": 4,
    "trainer": 4,
    "generator": 4,
    "environments": 4,
    "executors": 5,
    "controller": 5,
    "observe": 5,
    "bench": 5,
    "launch": 5,
    "cli": 6,
    "__main__": 6,
}
ONLY_IN = {"megatron": "megarl.trainer", "sglang": "megarl.generator"}


def modules() -> dict[str, Path]:
    """Dotted module name -> file, for every Python file of the package."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


def imports(module: str, is_package: bool, source: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything `source` imports; `from a import b` yields a.b, which names a too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            stem = base + (node.module.split(".") if node.module else [])
            yield from ((node.lineno, ".".join([*stem, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def tier(name: str) -> int | None:
    """Tier of a dotted name under megarl; None for the bare package and for other people's packages."""
    top, _, rest = name.partition(".")
    return TIERS.get(rest.split(".")[0]) if top == "megarl" and rest else None


def violations(module: str, is_package: bool, source: str) -> list[str]:
    found = []
    own = tier(module)
    for line, name in imports(module, is_package, source):
        theirs = tier(name)
        if own is not None and theirs is not None and theirs > own:
            found.append(f"{module}:{line} (tier {own}) imports {name} (tier {theirs})")
        if own is None and theirs is not None:
            found.append(f"{module}:{line}: the package itself imports nothing of its own")
        home = ONLY_IN.get(name.split(".")[0])
        if home is not None and module != home and not module.startswith(home + "."):
            found.append(f"{module}:{line} imports {name}, which only {home} may")
    return found


def test_every_file_keeps_the_import_rule() -> None:
    found = []
    for module, path in sorted(modules().items()):
        if module != "megarl" and tier(module) is None:
            found.append(f"{module} has no tier")
        found += violations(module, path.name == "__init__.py", path.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megarl.topology", "from megarl.models import ModelSpec"),
        ("megarl.models.spec", "from megarl.plan.resolve import RunPlan"),
        ("megarl.config.load", "from megarl import plan"),
        ("megarl.config.load", "from ..plan import resolve"),
        ("megarl.config.load", "from .. import cli"),
        ("megarl.plan.memory", "def f():\n    import megarl.estimate.sizes as b"),
        ("megarl.plan.memory", "import importlib\nimportlib.import_module('megarl.trainer.step')"),
        ("megarl.channels.weights", "from megatron.core import parallel_state"),
        ("megarl.trainer.step", "def f():\n    from sglang.srt import server_args"),
        ("megarl.trainers", "import megatron.core"),
        ("megarl", "from megarl import types"),
    ],
)
def test_the_rule_can_be_broken(module: str, source: str) -> None:
    assert violations(module, module == "megarl", source)


@pytest.mark.parametrize(
    ("module", "is_package", "source"),
    [
        ("megarl.plan", True, "from .topology import TrainerTopology\nfrom ..config.errors import ConfigError"),
        ("megarl.plan.memory", False, "from . import topology\nfrom ..models import spec\nimport torch"),
        ("megarl.trainer.step", False, "from megatron.core import parallel_state\nfrom megarl.channels import samples"),
    ],
)
def test_the_rule_lets_lower_tiers_through(module: str, is_package: bool, source: str) -> None:
    assert violations(module, is_package, source) == []
