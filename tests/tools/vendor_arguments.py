"""`python tests/tools/vendor_arguments.py`: writes megarl/plan/vendor_arguments.json, the settings
of the pinned Megatron and SGLang with their types, from the sources of the installed packages.

Run it when a pin changes. Importing SGLang takes ten seconds; reading its sources takes 0.05 s.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.plan.vendor_settings import CLASSES, VENDOR_ARGUMENTS

# the names of megatron.core.transformer.enums.AttnBackend
ATTENTION_BACKENDS = ["flash", "fused", "unfused", "local", "auto"]
# one class for each namespace of sglang.srt.server_args.ServerArgs
DECLARED_IN = "srt/arg_groups/fields"
CHOICES_IN = "srt/arg_groups/choices.py"


def table() -> dict[str, Any]:
    """Name of a package -> its version and its arguments."""
    return {
        "megatron-core": {
            "version": importlib.metadata.version("megatron-core"),
            **{key: dict(megatron_fields(key)) for key in CLASSES},
        },
        "sglang": {
            "version": importlib.metadata.version("sglang"),
            "generator.server_args": dict(sglang_fields()),
        },
    }


def text_of(vendors: dict[str, Any]) -> str:
    """JSON with one line for each argument."""
    text = json.dumps(vendors, indent=1)
    for depth in (5, 4):
        text = text.replace("\n" + " " * depth, " ")
    return text.replace("\n   }", "}").replace("{ ", "{") + "\n"


def megatron_fields(key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    root = package_folder("megatron.core")
    for file, name in CLASSES[key]:
        for block in ast.parse((root / file).read_text(encoding="utf-8")).body:
            if isinstance(block, ast.ClassDef) and block.name == name:
                for field, hint in fields_of(block):
                    argument: dict[str, Any] = {"annotation": ast.unparse(hint)}
                    if argument["annotation"] == "AttnBackend":
                        argument["choices"] = ATTENTION_BACKENDS
                    yield field, argument


def sglang_fields() -> Iterator[tuple[str, dict[str, Any]]]:
    """Parses `name: A[type, help]`, `name: A[type, Arg(help, choices, …)]`, or `name: type`."""
    root = package_folder("sglang")
    named_choices = dict(assigned(root / CHOICES_IN))
    for file in sorted((root / DECLARED_IN).glob("*.py")):
        for block in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(block, ast.ClassDef):
                for name, hint in fields_of(block):
                    yield name, sglang_argument(hint, named_choices)


def sglang_argument(hint: ast.expr, named_choices: dict[str, Any]) -> dict[str, Any]:
    details = None
    if (
        isinstance(hint, ast.Subscript)
        and isinstance(hint.slice, ast.Tuple)
        and ast.unparse(hint.value) == "A"
    ):
        hint, details = hint.slice.elts[:2]
    keywords = {}
    if isinstance(details, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in details.keywords}
    argument: dict[str, Any] = {"annotation": ast.unparse(hint)}
    choices = literal(keywords.get("choices"), named_choices)
    if choices is not None:
        argument["choices"] = list(choices)
    flags = list(literal(keywords.get("aliases"), named_choices) or ())
    cli_name = literal(keywords.get("cli_name"), named_choices)
    if cli_name:
        flags.append(cli_name)
    if flags:
        argument["aliases"] = [flag.lstrip("-").replace("-", "_") for flag in flags]
    return argument


def package_folder(name: str) -> Path:
    """Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def fields_of(block: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """(name, annotation) of the public fields of a dataclass."""
    for field in block.body:
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and not field.target.id.startswith("_")
        ):
            yield field.target.id, field.annotation


def assigned(file: Path) -> Iterator[tuple[str, Any]]:
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                yield statement.targets[0].id, ast.literal_eval(statement.value)
            except ValueError:
                continue  # not a plain list


def literal(node: ast.expr | None, named_values: dict[str, Any]) -> Any:
    """The value of a literal or of a named list; None for anything else."""
    if isinstance(node, ast.Name):
        return named_values.get(node.id)
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


if __name__ == "__main__":
    VENDOR_ARGUMENTS.write_text(text_of(table()), encoding="utf-8")
