"""Limits on the values of settings.

The text of a limit follows "must be" in messages, and is a column of docs/config.md.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from megarl.config.errors import ConfigError

# of a function or class: package.module:name, or /folder/file.py:name
IMPORT_PATH = r"(?:[A-Za-z_][\w.]*|/.*\.py):[A-Za-z_]\w*"
INPUT = "input"
OUTPUT = "output"
MODULE = "module"  # kinds of path: read by the run, written by it, or imported as Python
_LONGEST_S = 2_000_000
_CLOSE_ENOUGH = 0.6  # difflib's ratio


@dataclass(frozen=True)
class Limit:
    text: str
    accepts: Callable[[Any], bool]
    # other spelling in lower case -> the value it stands for
    spelled: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()  # all allowed values, if they are a few texts
    # wrong value -> the key=value that was probably meant
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def meant(self, value: Any) -> str:
        """The end of the message about a wrong value: "; did you mean …?".

        Empty if no name resembles the value or an item of it.
        """
        names = dict.fromkeys([*self.names, *self.elsewhere])
        suggestions: list[str] = []
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text not in self.names:
                suggestions += [
                    self.elsewhere.get(name, name) for name in similar_names(text, names)
                ]
        return did_you_mean(suggestions)


def similar_names(text: str, names: Collection[str]) -> list[str]:
    """The names that `text` may be a misspelling of.

    Case is ignored, and transposed letters count as a small difference.
    """

    def likeness(name: str) -> float:
        first = text.lower()
        second = name.lower()
        ratio = difflib.SequenceMatcher(None, first, second).ratio()
        if sorted(first) == sorted(second):
            return ratio + 0.2
        return ratio

    best = max(map(likeness, names), default=0.0)
    return [name for name in names if best >= _CLOSE_ENOUGH and likeness(name) == best]


def did_you_mean(names: Collection[str]) -> str:
    """The end of a message that suggests `names`; empty without names."""
    if names:
        return f"; did you mean {' or '.join(names)}?"
    return ""


def at_least(low: float) -> Limit:
    return Limit(f"at least {low}", lambda value: value >= low)


def above(low: float) -> Limit:
    return Limit(f"above {low}", lambda value: value > low)


def between(low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> Limit:
    """An interval, which includes its ends unless they are marked as open."""
    brackets = "(" if open_low else "[", ")" if open_high else "]"

    def accepts(value: float) -> bool:
        if (open_low and value == low) or (open_high and value == high):
            return False
        return low <= value <= high

    return Limit(f"in {brackets[0]}{low}, {high}{brackets[1]}", accepts)


def seconds(least: float = 0) -> Limit:
    """The limit of a timeout: at least `least`, above 0, and at most 2**31 milliseconds, the most
    that system calls accept.
    """
    lowest = f"at least {least}" if least else "above 0"
    return Limit(
        f"{lowest}, at most {_LONGEST_S}", lambda value: value >= least and 0 < value <= _LONGEST_S
    )


def each_item(limit: Limit) -> Limit:
    return Limit(f"{limit.text}, each", lambda values: all(map(limit.accepts, values)))


def one_of(
    *values: Any,
    or_like: str | None = None,
    written: str = "",
    spelled: Mapping[str, str] = {},
    elsewhere: Mapping[str, str] = {},
) -> Limit:
    """One of `values`, or a text that fully matches the regular expression `or_like`.

    `written` describes `or_like` in messages.
    """
    names = [*map(str, values), *([written] if or_like else [])]
    text = names[0] if len(names) == 1 else "one of " + ", ".join(names)

    def accepts(value: Any) -> bool:
        return value in values or (or_like is not None and re.fullmatch(or_like, value) is not None)

    return Limit(
        text,
        accepts,
        spelled,
        tuple(value for value in values if isinstance(value, str)),
        elsewhere,
    )


def setting(default: Any, meaning: str, limit: Limit | None = None, path: str = "") -> Any:
    """A field of a config dataclass, with its meaning and its limit.

    `path` is INPUT, OUTPUT or MODULE if the value is a path.
    """
    return field(default=default, metadata={"meaning": meaning, "limit": limit, "path": path})


def find_callable(path: str, setting: str, built_in: Iterable[str] = ()) -> Callable[..., Any]:
    """The function or class that a configuration names: `package.module:name` or
    `/folder/file.py:name`.

    `import_module` finds the module.

    Args: setting, "key=value" as the user wrote it, for messages. Raises: ConfigError.
    """
    module_name, colon, name = path.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(
            f"{setting}: must be "
            f"{', '.join([*built_in, 'package.module:function, ./file.py:function'])}"
        )
    module = find_module(module_name, setting)
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value)]
        near = did_you_mean(difflib.get_close_matches(name, names, n=1))
        raise ConfigError(f"{setting}: {module_name} has no function or class {name}{near}")
    return function


def path_of(function: object, key: str) -> str:
    """The path at which `find_callable` finds `function` in other processes.

    Raises: ConfigError if they cannot import it.
    """
    name = getattr(function, "__name__", type(function).__name__)
    setting = f"{key}={name}"
    if not callable(function):
        raise ConfigError(f"{key}={function!r}: must be a function, or a text")
    module, attribute_name = _home_of(function)
    if module is None:
        raise ConfigError(
            f"{setting}: the run's own processes cannot import what a notebook, a script or "
            "another function defines: put it at the top "
            "level of a file, such as graders.py (in a notebook, begin the cell with %%writefile "
            "graders.py), and write: from graders "
            f"import {name if name.isidentifier() else 'reward'}"
        )
    file = module.__file__ or ""
    if "." not in module.__name__ and not hasattr(module, "__path__") and file.endswith(".py"):
        return f"{os.path.abspath(file)}:{attribute_name}"
    package = sys.modules[module.__name__.partition(".")[0]]
    origin = subprocess.run(
        [sys.executable, "-P", "-c", _WHERE, package.__name__],
        capture_output=True,
        encoding="utf-8",
    ).stdout.strip()
    if origin != (package.__file__ or NAMESPACE):
        raise ConfigError(
            f"{setting}: the run's own processes find {origin} as package {package.__name__}, not "
            f"{package.__file__}: install "
            "it, set PYTHONPATH, or start in its folder"
        )
    return f"{module.__name__}:{attribute_name}"


NAMESPACE = "a folder without __init__.py"
# A program that prints where the processes of a run find a package, as `import_module` does.
_WHERE = f"""if True:
    import importlib.util, os, sys
    sys.path.append(os.getcwd())
    spec = importlib.util.find_spec(sys.argv[1])
    print(spec.origin or {NAMESPACE!r} if spec else "none")
"""


def _home_of(function: object) -> tuple[ModuleType | None, str]:
    """A module that has `function` at its top level, and its name there: the module that defines
    it, or else any other.
    """
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name != "__main__" and getattr(module, "__file__", None)
    ]
    module_name = getattr(function, "__module__", None)
    own_modules = [module for module in modules if module.__name__ == module_name]
    for module in own_modules + modules:
        for name, value in list(vars(module).items()):
            if value is function:
                return module, name
    for module in own_modules:  # which has been loaded again since, as by IPython's autoreload
        name = getattr(function, "__qualname__", "")
        again = getattr(module, name, None)
        if (
            isinstance(again, FunctionType)
            and isinstance(function, FunctionType)
            and again.__code__.co_qualname == name
        ):
            return module, name
    return None, ""


def find_module(name: str, setting: str) -> ModuleType:
    """Imports a module of the user's own, as `find_callable` does. Raises: ConfigError."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"{setting}: cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # raised by the user's module while it is imported
        raise ConfigError(
            f"{setting}: importing {name} failed: {type(error).__name__}: {error}"
        ) from error


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calls must be awaited: `function` is async, or is an object whose class has an async
    __call__.
    """
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def import_module(name: str) -> ModuleType:
    """Imports `package.module`, also from the working directory, or the file `/folder/file.py`,
    which may import files beside it. Raises ImportError, also if Python finds a different module
    under the file's name.
    """
    is_file = name.endswith(".py")
    folder, file = os.path.split(os.path.abspath(name)) if is_file else (os.getcwd(), "")
    if is_file and not os.path.isfile(name):
        raise ImportError("no such file")
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.import_module(file.removesuffix(".py") if is_file else name)
    if is_file and (module.__file__ is None or not os.path.samefile(module.__file__, name)):
        raise ImportError(
            f"Python finds another module of that name, {module.__file__}; rename {name}"
        )
    return module


def attribute(path: str) -> Any:
    """The function or class at `path`, which `find_callable` has already checked in another
    process.
    """
    module, _, name = path.rpartition(":")
    return getattr(import_module(module), name)
