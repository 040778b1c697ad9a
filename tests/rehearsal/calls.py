"""Checks MegaRL's calls into vendor packages, including the calls on GPUs, against the packages'
sources. These are parsed, not imported.

    python tests/rehearsal/calls.py [SITE_PACKAGES]

A call is checked if its function was imported by name, or is an attribute of a module that was
imported. The check is that the name exists, and that its parameters take the arguments. Methods of
objects are not checked, because their classes are unknown without running the code. PyTorch can be
imported without a GPU, so calls of torch.cuda and torch.distributed are checked against the
functions themselves.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VENDORS = ("megatron", "sglang", "mooncake", "transformer_engine")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Sources:
    """The vendor modules in a folder of packages."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.module = functools.cache(self._module)
        self.find = functools.cache(self._find)

    def path(self, module: str) -> Path | None:
        place = self.folder / module.replace(".", "/")
        return next(
            (path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()),
            None,
        )

    def _module(self, module: str) -> ast.Module | None:
        path = self.path(module)
        return ast.parse(path.read_text()) if path else None

    def is_module(self, module: str) -> bool:
        return self.path(module) is not None or (self.folder / module.replace(".", "/")).is_dir()

    def is_compiled(self, module: str) -> bool:
        place = self.folder / module.replace(".", "/")
        return any(place.parent.glob(f"{place.name}*.so"))

    def _find(self, module: str, name: str) -> Any:
        """The definition of `name` in `module`; or a statement, or "module", if the name is that;
        None if there is no such name.
        """
        tree = self.module(module)
        definition = None
        if self.is_module(f"{module}.{name}"):
            definition = "module"
        for node in reversed(_top(tree)) if tree else ():
            if isinstance(node, Definition) and node.name == name:
                definition = node
            elif isinstance(node, ast.ImportFrom) and (
                alias := next((a for a in node.names if (a.asname or a.name) == name), None)
            ):
                origin = _absolute(module, node, self.path(module))
                if origin.split(".")[0] not in VENDORS or (origin, alias.name) == (module, name):
                    return definition or node
                return self.find(origin, alias.name) or (node if self.is_compiled(origin) else None)
            elif (
                isinstance(node, ast.ImportFrom)
                and any(a.name == "*" for a in node.names)
                and definition is None
            ):
                definition = self.find(_absolute(module, node, self.path(module)), name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and definition is None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [
                    leaf.id
                    for target in targets
                    for leaf in ast.walk(target)
                    if isinstance(leaf, ast.Name)
                ]
                definition = node if name in names else None
        return definition


def _top(tree: ast.Module) -> list[ast.stmt]:
    """The statements of a module, and of its `if` and `try`."""
    statements: list[ast.stmt] = []
    pending = [*tree.body]
    while pending:
        node = pending.pop()
        statements.append(node)
        for part in (
            ("body", "orelse", "finalbody") if isinstance(node, (ast.If, ast.Try, ast.With)) else ()
        ):
            pending += getattr(node, part, [])
        pending += [
            statement for handler in getattr(node, "handlers", []) for statement in handler.body
        ]
    return statements


def _absolute(module: str, node: ast.ImportFrom, path: Path | None) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (path is not None and path.name == "__init__.py")]
    return ".".join([*parts, *([node.module] if node.module else [])])


def signature(sources: Sources, module: str, definition: Any) -> inspect.Signature | None:
    """The signature of a function, or of a class by its own __init__ or fields.

    None if the source does not tell it.
    """
    if isinstance(definition, ast.ClassDef):
        init = next(
            (
                node
                for node in definition.body
                if isinstance(node, ast.FunctionDef) and node.name == "__init__"
            ),
            None,
        )
        if init is None:
            return _fields(definition)
        return _of_function(init, skip=1)
    if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if copied_from := [
            decorator.args[0]
            for decorator in definition.decorator_list
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "copy_signature"
        ]:
            return signature(sources, module, sources.find(module, ast.unparse(copied_from[0])))
        harmless = ("torch.no_grad", "jit_fuser", "internal_api", "nvtx", "lru_cache", "overload")
        changed = [
            ast.unparse(decorator)
            for decorator in definition.decorator_list
            if not any(name in ast.unparse(decorator) for name in harmless)
        ]
        return None if changed else _of_function(definition)
    return None


def _fields(definition: ast.ClassDef) -> inspect.Signature | None:
    """The fields of a dataclass without bases."""
    if definition.bases or not any(
        "dataclass" in ast.unparse(decorator) for decorator in definition.decorator_list
    ):
        return None
    fields = [
        node
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    parameters = [(field.target.id, field.value is not None) for field in fields]  # type: ignore[union-attr]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = [
        inspect.Parameter(name, kind) for name, has_default in parameters if not has_default
    ]
    optional = [
        inspect.Parameter(name, kind, default=None)
        for name, has_default in parameters
        if has_default
    ]
    return inspect.Signature(required + optional)


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, skip: int = 0) -> inspect.Signature:
    arguments = node.args
    parameters = []
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    for place, argument in enumerate(positional):
        kind = (
            inspect.Parameter.POSITIONAL_ONLY
            if argument in arguments.posonlyargs
            else inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        parameters.append(
            inspect.Parameter(
                argument.arg, kind, default=inspect.Parameter.empty if place < required else None
            )
        )
    parameters = parameters[skip:]
    if arguments.vararg:
        parameters.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        empty = inspect.Parameter.empty if default is None else None
        parameters.append(
            inspect.Parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default=empty)
        )
    if arguments.kwarg:
        parameters.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def imports(tree: ast.Module) -> Iterator[tuple[str, str, str | None, int]]:
    """What a file of MegaRL imports from vendors: (name here, module, name there or None for the
    module itself, line).
    """
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] in VENDORS
        ):
            yield from (
                (alias.asname or alias.name, node.module or "", alias.name, node.lineno)
                for alias in node.names
            )
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in VENDORS and (alias.asname or "." not in alias.name):
                    yield alias.asname or alias.name, alias.name, None, node.lineno


def check(sources: Sources, path: Path) -> tuple[int, list[str]]:
    """(checked calls, problems) of one file."""
    tree = ast.parse(path.read_text())
    imported = {}
    problems = []
    checked = 0
    file = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    for name, module, attribute, line in imports(tree):
        if attribute is None:
            imported[name] = module, None
            continue
        definition = sources.find(module, attribute)
        imported[name] = (
            (f"{module}.{attribute}", None) if definition == "module" else (module, definition)
        )
        if definition is None and not sources.is_compiled(module) and sources.is_module(module):
            problems.append(f"{file}:{line}: {module} has no {attribute}")
        if not sources.is_module(module) and not sources.is_compiled(module):
            problems.append(f"{file}:{line}: there is no {module}")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = call.func
        module = ""
        definition = None
        if isinstance(function, ast.Name) and function.id in imported:
            module, definition = imported[function.id]
        elif (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Name)
            and imported.get(function.value.id, ("", 0))[1] is None
        ):
            module = imported.get(function.value.id, ("", None))[0]
            definition = sources.find(module, function.attr) if module else None
            if module and definition is None and not sources.is_compiled(module):
                problems.append(f"{file}:{call.lineno}: {module} has no {function.attr}")
        takes = signature(sources, module, definition) if definition is not None else None
        if takes is not None:
            checked += 1
            if problem := misfit(takes, call):
                problems.append(f"{file}:{call.lineno}: {ast.unparse(function)}: {problem}")
    return checked, problems


def misfit(takes: inspect.Signature, call: ast.Call) -> str:
    positional = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    open_ended = len(positional) < len(call.args) or len(keywords) < len(call.keywords)
    try:
        (takes.bind_partial if open_ended else takes.bind)(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return ""


# PyTorch's calls of NCCL and of CUDA's runtime
OF_TORCH = ("torch.cuda.", "torch.distributed.", "torch.multiprocessing.")


def check_torch(path: Path) -> tuple[int, list[str]]:
    """Like `check`, for calls by dotted names of PyTorch's modules."""
    import torch

    tree = ast.parse(path.read_text())
    problems = []
    checked = 0
    file = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    modules = {
        a.asname or a.name.split(".")[0]: a.name if a.asname else "torch"
        for a in _imported(tree)
        if a.name.split(".")[0] == "torch"
    }
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        first, _, attributes = ast.unparse(call.func).partition(".")
        name = f"{modules.get(first)}.{attributes}"
        if not name.startswith(OF_TORCH) or not re.fullmatch(r"[\w.]+", name):
            continue
        function: Any = torch
        try:
            for part in name.split(".")[1:]:
                function = getattr(function, part)
        except AttributeError as error:
            problems.append(f"{file}:{call.lineno}: {error}")
            continue
        try:
            takes = inspect.signature(function)
        except (TypeError, ValueError):  # a function in C++
            continue
        checked += 1
        if problem := misfit(takes, call):
            problems.append(f"{file}:{call.lineno}: {name}: {problem}")
    return checked, problems


def _imported(tree: ast.Module) -> list[ast.alias]:
    return [
        alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    ]


def check_all(folder: Path) -> tuple[int, list[str]]:
    sources = Sources(folder)
    total = 0
    problems = []
    for path in sorted(
        [
            *(ROOT / "megarl").rglob("*.py"),
            *(ROOT / "kernels").glob("*.py"),
            *(ROOT / "launch").glob("*.py"),
        ]
    ):
        if any(vendor in path.read_text() for vendor in VENDORS):
            count, of_file = check(sources, path)
            total = total + count
            problems = problems + of_file
        if "torch" in path.read_text():
            count, of_file = check_torch(path)
            total = total + count
            problems = problems + of_file
    return total, problems


if __name__ == "__main__":
    count, problems = check_all(
        Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("purelib"))
    )
    print(*problems, f"{count} calls checked, {len(problems)} do not fit", sep="\n")
    sys.exit(int(bool(problems)))
