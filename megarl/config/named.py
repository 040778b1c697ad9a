"""Finds functions and classes that a configuration names, as package.module:name or as /folder/file.py:name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from megarl.config.errors import ConfigError


def find_callable(path: str, setting: str, built_in: Iterable[str] = ()) -> Callable[..., Any]:
    """The function or class `package.module:name` or `/folder/file.py:name`, of a module as `import_module` finds it.

    Args: setting, "key=value" as the user wrote it, for messages. Raises: ConfigError.
    """
    module_name, colon, name = path.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{setting}: must be {', '.join([*built_in, 'package.module:function, ./file.py:function'])}")
    module = find_module(module_name, setting)
    found = getattr(module, name, None)
    if not callable(found):
        near = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)], n=1)
        raise ConfigError(f"{setting}: {module_name} has no function or class {name}" + (f"; did you mean {near[0]}?" if near else ""))
    return found


def find_module(name: str, setting: str) -> ModuleType:
    """Imports a module of the user's own, as `find_callable` does. Raises: ConfigError."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"{setting}: cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # raised by the user's module while it is imported
        raise ConfigError(f"{setting}: importing {name} failed: {type(error).__name__}: {error}") from error


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it must be awaited: an async function, or an object whose class has an async __call__."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def import_module(name: str) -> ModuleType:
    """The module `package.module`, from the working directory too, or that of the file /folder/file.py, which may import its neighbours.
    Raises ImportError, also if Python finds another module under the file's name."""
    is_file = name.endswith(".py")
    folder, file = os.path.split(os.path.abspath(name)) if is_file else (os.getcwd(), "")
    if is_file and not os.path.isfile(name):
        raise ImportError("no such file")
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.import_module(file.removesuffix(".py") if is_file else name)
    if is_file and (module.__file__ is None or not os.path.samefile(module.__file__, name)):
        raise ImportError(f"Python finds another module of that name, {module.__file__}; rename {name}")
    return module


def attribute(path: str) -> Any:
    """What `find_callable` has found before, in another process."""
    module, _, name = path.rpartition(":")
    return getattr(import_module(module), name)
