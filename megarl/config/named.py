"""Finds functions and classes that a configuration names as package.module:name."""

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
    """The function or class `package.module:name`. The working directory counts as a place to import from.

    Args: setting, "key=value" as the user wrote it, for messages. Raises: ConfigError.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{setting}: must be {', '.join([*built_in, 'package.module:function'])}")
    module = find_module(module_name, setting)
    found = getattr(module, name, None)
    if not callable(found):
        near = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)], n=1)
        raise ConfigError(f"{setting}: {module_name} has no function or class {name}" + (f"; did you mean {near[0]}?" if near else ""))
    return found


def find_module(name: str, setting: str) -> ModuleType:
    """Imports a module of the user's own, as `find_callable` does. Raises: ConfigError."""
    try:
        return _import(name)
    except ImportError as error:
        raise ConfigError(f"{setting}: cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # raised by the user's module while it is imported
        raise ConfigError(f"{setting}: importing {name} failed: {type(error).__name__}: {error}") from error


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it must be awaited: an async function, or an object whose class has an async __call__."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _import(module: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(module)
