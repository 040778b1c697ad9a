"""Reads the arguments of the installed SGLang from its source."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.plan.vendor_arguments import Argument, as_type, fields_of, package_folder

DECLARED_IN = "srt/arg_groups/fields"  # one class for each namespace of sglang.srt.server_args.ServerArgs
CHOICES_IN = "srt/arg_groups/choices.py"


def version() -> str:
    return importlib.metadata.version("sglang")


@functools.cache
def arguments() -> Mapping[str, Argument]:
    """All arguments by name; empty if SGLang is not installed, as on a machine that only plans."""
    root = package_folder("sglang")
    if root is None:
        return {}
    names = dict(_assigned(root / CHOICES_IN)) if (root / CHOICES_IN).is_file() else {}
    return {name: argument for file in sorted((root / DECLARED_IN).glob("*.py")) for name, argument in _declared(file, names)}


def _assigned(file: Path) -> Iterator[tuple[str, Any]]:
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                yield statement.targets[0].id, ast.literal_eval(statement.value)
            except ValueError:
                continue  # no plain list


def _declared(file: Path, names: Mapping[str, Any]) -> Iterator[tuple[str, Argument]]:
    """Parses `name: A[type, help]`, `name: A[type, Arg(help, choices, …)]`, or `name: type`."""
    for block in ast.parse(file.read_text()).body:
        for name, hint in fields_of(block) if isinstance(block, ast.ClassDef) else ():
            details = None
            if isinstance(hint, ast.Subscript) and ast.unparse(hint.value) == "A" and isinstance(hint.slice, ast.Tuple):
                hint, details = hint.slice.elts[:2]
            stated = {word.arg: word.value for word in details.keywords} if isinstance(details, ast.Call) else {}
            choices = _value(stated.get("choices"), names)
            aliases = _value(stated.get("aliases"), names) or ()
            cli_name = _value(stated.get("cli_name"), names)
            flags = [flag.lstrip("-").replace("-", "_") for flag in (*aliases, *([cli_name] if cli_name else ()))]
            yield name, Argument(as_type(hint), ast.unparse(hint), None if choices is None else tuple(choices), tuple(flags))


def _value(node: ast.expr | None, names: Mapping[str, Any]) -> Any:
    """The value of a literal or of a named list; None for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
