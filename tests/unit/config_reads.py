"""Finds the settings that a program reads: it follows the attributes of config sections through the
source, by annotations and assignments.

A section is an expression annotated with its class, `….config` (the whole configuration), or a
name assigned from one of these. A property of a section reads what it names of `self`. `getattr`
with a computed name reads the keys that the function mentions: as text, by a constant of the
module, or as the fields of a class of megarl.base.geometry.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from megarl.base import geometry
from megarl.config import schema
from megarl.config.keys import _without_optional


def _sections(cls: type) -> Iterator[type]:
    yield from (base for base in cls.__mro__ if dataclasses.is_dataclass(base))
    for hint in typing.get_type_hints(cls).values():
        for part in _parts(hint):
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                yield from _sections(part)


def _parts(hint: Any) -> Iterator[Any]:
    """The annotation and its arguments, at any depth."""
    yield hint
    for argument in typing.get_args(hint):
        yield from _parts(argument)


SECTIONS = {cls.__name__: cls for cls in _sections(schema.RunConfig)}
Reads = set[tuple[str, str]]  # (class of the section, field)


def reads(sources: Iterable[str]) -> Reads:
    """All settings that these modules read."""
    return set().union(*(_reads_of(source) for source in sources))


@functools.cache
def _reads_of(source: str) -> Reads:
    return _Module(ast.parse(source)).reads()


def unread(key_root: type, settings_read: Reads) -> list[str]:
    """The dotted keys of the tree under `key_root` that are not in `settings_read`."""
    return [
        key
        for key, cls, field in _leaves(key_root, "")
        if not settings_read & {(base.__name__, field) for base in cls.__mro__}
    ]


def _leaves(cls: type, prefix: str) -> Iterator[tuple[str, type, str]]:
    for name, hint in _fields(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _leaves(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", cls, name  # code that reads a base class reads it


@functools.cache
def _fields(cls: type) -> dict[str, Any]:
    return {name: _without_optional(hint)[0] for name, hint in typing.get_type_hints(cls).items()}


@functools.cache
def _of_property(cls: type, name: str) -> list[str]:
    """The attributes of `self` that a property reads."""
    getter = getattr(getattr(cls, name, None), "fget", None)
    return re.findall(r"self\.(\w+)", inspect.getsource(getter)) if getter else []


class _Module:
    def __init__(self, tree: ast.Module):
        self._tree = tree
        self._settings_read: Reads = set()

    def reads(self) -> Reads:
        self._block(self._tree.body, {}, {})
        return self._settings_read

    def _block(
        self, body: list[ast.stmt], names: dict[str, type], of_self: dict[str, type]
    ) -> None:
        """`names`: sections by variable; `of_self`: by attribute of self."""
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                fields = _annotated_names(statement.body)
                methods = [
                    f
                    for f in statement.body
                    if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
                for _ in range(2):  # a method may read what a later one assigns to self
                    for method in methods:
                        self._function(method, {}, fields)
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self._function(statement, names, of_self)
            else:
                self._statement(statement, names, of_self)

    def _function(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        outer: dict[str, type],
        of_self: dict[str, type],
    ) -> None:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        names = dict(outer)
        for argument in arguments:
            cls = _annotated(argument.annotation)
            if cls is not None:
                names[argument.arg] = cls
        names |= _annotated_names(ast.walk(function))
        mentioned = self._mentioned(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.NamedExpr):
                self._assign(node, names, of_self)
        for node in ast.walk(function):
            self._read(node, names, of_self, mentioned)
        self._block(
            [
                node
                for node in ast.walk(function)
                if node is not function and isinstance(node, ast.FunctionDef)
            ],
            names,
            of_self,
        )

    def _mentioned(self, function: ast.AST) -> set[str]:
        """The words that may be names of settings."""
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        assigned = [(s.targets[0], s.value) for s in self._tree.body if isinstance(s, ast.Assign)]
        constants = [
            value
            for target, value in assigned
            if isinstance(target, ast.Name) and target.id in names
        ]
        words: set[str] = set()
        for root in (function, *constants):
            for node in ast.walk(root):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    words.update(node.value.split())
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "__dataclass_fields__"
                and isinstance(node.value, ast.Name)
            ):
                words |= getattr(geometry, node.value.id).__dataclass_fields__.keys()
        return words

    def _statement(
        self, statement: ast.stmt, names: dict[str, type], of_self: dict[str, type]
    ) -> None:
        for node in ast.walk(statement):
            self._read(node, names, of_self, set())

    def _assign(
        self, node: ast.Assign | ast.NamedExpr, names: dict[str, type], of_self: dict[str, type]
    ) -> None:
        target = node.target if isinstance(node, ast.NamedExpr) else node.targets[0]
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts))
        for to, value in pairs:
            for option in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
                cls = self._section(option, names, of_self)
                if cls is None:
                    continue
                if isinstance(to, ast.Name):
                    names[to.id] = cls
                elif (
                    isinstance(to, ast.Attribute)
                    and isinstance(to.value, ast.Name)
                    and to.value.id == "self"
                ):
                    of_self[to.attr] = cls

    def _read(
        self, node: ast.AST, names: dict[str, type], of_self: dict[str, type], mentioned: set[str]
    ) -> None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            cls = self._section(node.value, names, of_self)
            if cls is not None:
                self._settings_read.add((cls.__name__, node.attr))
                self._settings_read |= {
                    (cls.__name__, name) for name in _of_property(cls, node.attr)
                }
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
        ):
            cls = self._section(node.args[0], names, of_self)
            if cls is not None:
                fields = mentioned & _fields(cls).keys()
                self._settings_read |= {(cls.__name__, name) for name in fields}

    def _section(
        self, node: ast.expr, names: dict[str, type], of_self: dict[str, type]
    ) -> type | None:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in of_self:
            return of_self[node.attr]
        cls = self._section(node.value, names, of_self)
        if cls is not None:
            hint = _fields(cls).get(node.attr)
            return hint if dataclasses.is_dataclass(hint) else None
        return schema.RunConfig if node.attr in ("config", "_config") else None


def _annotated(annotation: ast.expr | None) -> type | None:
    """The section that the annotation names."""
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Name) and node.id in SECTIONS:
            return SECTIONS[node.id]
    return None


def _annotated_names(nodes: Iterable[ast.AST]) -> dict[str, type]:
    """The sections of the annotated variables among these nodes, by their names."""
    sections = {}
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            cls = _annotated(node.annotation)
            if cls is not None:
                sections[node.target.id] = cls
    return sections
