"""Arguments of installed packages, read from their source, and values for them checked before anything starts.

Importing SGLang takes ten seconds and Megatron two; reading their source takes a twentieth of one.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import importlib.util
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megarl.config.limits import alike, did_you_mean

_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


@dataclass(frozen=True)
class Argument:
    """One field. If its annotation refers to the package's own names, the type is Any; if its choices do, they are None."""

    type: Any
    annotation: str
    choices: tuple[Any, ...] | None = None
    aliases: tuple[str, ...] = ()  # other names of its flag


def package_folder(name: str) -> Path | None:
    """None if the package is not installed, as on a machine that only plans."""
    found = importlib.util.find_spec(name)
    return Path(next(iter(found.submodule_search_locations))) if found and found.submodule_search_locations else None


def fields_of(block: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """(name, annotation) of the public fields of a dataclass."""
    for field in block.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and not field.target.id.startswith("_"):
            yield field.target.id, field.annotation


def as_type(annotation: ast.expr) -> Any:
    try:
        return eval(ast.unparse(annotation), vars(builtins) | vars(typing))
    except (NameError, TypeError, AttributeError):
        return Any


def misfits(argument: Argument, value: Any) -> Iterator[str]:
    """What is wrong with `value`, each completing "must be …"."""
    try:
        msgspec.convert(value, argument.type)
    except msgspec.ValidationError:
        yield f"must be {_type_name(argument.type)}"
        return
    except TypeError:
        return  # only the package's own code can check this type
    if argument.choices is not None and value is not None:
        wrong = [str(choice) for choice in (value if isinstance(value, list) else [value]) if choice not in argument.choices]
        if wrong:
            known = sorted(map(str, argument.choices))
            yield f"must be one of {', '.join(known)}{did_you_mean(alike(wrong[0], known))}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=1)
    return near[0] if near else None


def _type_name(type_: Any) -> str:
    if type_ in _KINDS:
        return _KINDS[type_]
    choices, null = _literals(type_)
    if choices:
        return f"one of {', '.join(map(str, choices))}" + (" or null" if null else "")
    text = str(type_).replace("typing.", "").replace("NoneType", "None")
    for kind, name in _KINDS.items():
        if text == f"Optional[{kind.__name__}]":
            return f"{name} or null"
    return text


def _literals(type_: Any) -> tuple[tuple[Any, ...], bool]:
    """(the values of a Literal, or of an optional one; whether it is optional); no values for other types."""
    if typing.get_origin(type_) is typing.Literal:
        return typing.get_args(type_), False
    parts = [part for part in typing.get_args(type_) if part is not type(None)]
    if typing.get_origin(type_) is typing.Union and len(parts) == 1 and typing.get_origin(parts[0]) is typing.Literal:
        return typing.get_args(parts[0]), True
    return (), False


def mapping_of(names: Mapping[str, Argument]) -> dict[str, str]:
    """The argument's name by each name of its flag."""
    return {alias: name for name, argument in names.items() for alias in (name, *argument.aliases)}
