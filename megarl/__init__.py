"""MegaRL: asynchronous RL post-training of large language models (after LlamaRL, Meta 2025).

docs/python.md shows the functions below. They are imported when they are first used, so `import
megarl` takes no time.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.api import (
        CommandResult,
        ConfigError,
        Run,
        RunError,
        Stopped,
        evaluate,
        load,
        plan,
        reshard,
        sft,
        simulate,
        train,
    )

__version__ = "0.1.0"
__all__ = [
    "CommandResult",
    "ConfigError",
    "Run",
    "RunError",
    "Stopped",
    "evaluate",
    "load",
    "plan",
    "reshard",
    "sft",
    "simulate",
    "train",
]


class CallableRoom(types.ModuleType):
    """The class of `megarl.plan` and `megarl.reshard`, which are packages of the code and functions
    of the Python entry.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(
            importlib.import_module("megarl.api"), self.__name__.removeprefix("megarl.")
        )(*arguments, **options)


def __getattr__(name: str) -> Any:
    if name in ("plan", "reshard"):
        return importlib.import_module(f"megarl.{name}")
    if name in __all__:
        return getattr(importlib.import_module("megarl.api"), name)
    raise AttributeError(f"module 'megarl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
