"""Checks the arguments of functions and classes that a configuration names, before anything starts."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from megarl.config.errors import ConfigError


def check_arguments(function: Callable[..., Any], positional: int, arguments: dict[str, Any], setting: str, key: str) -> dict[str, Any]:
    """Converts `arguments` strictly to the annotated types of the keyword-only parameters of `function`.

    Args: positional, how many positional arguments it must take; setting, "key=value" of the function; key, that of its arguments.
    Raises: ConfigError with all problems: unknown and missing arguments, wrong types, a signature that does not fit.
    """
    parameters = list(inspect.signature(function).parameters.values())
    before = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    if len(before) != positional or len(before) + len(keywords) != len(parameters):
        shape = f"{positional} positional argument{'s' * (positional > 1)}, and all others by keyword only"
        raise ConfigError(f"{setting}: must take {shape}; see docs/environments.md")
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    problems = [f"{setting}: its argument {name} has no type annotation" for name in keywords if name not in hints]
    problems += [_unknown(str(name), keywords, f"{key}.{name}={value}") for name, value in arguments.items() if name not in keywords]
    problems += [f"{key}.{name}: must be set" for name, p in keywords.items() if p.default is p.empty and name not in arguments]
    converted = {}
    for name in keywords.keys() & arguments.keys() & hints.keys():
        try:
            converted[name] = msgspec.convert(arguments[name], hints[name])
        except msgspec.ValidationError as error:
            problems.append(f"{key}.{name}={arguments[name]}: {str(error)[:1].lower()}{str(error)[1:]}")
    if problems:
        raise ConfigError(problems)
    return converted


def _unknown(name: str, keywords: Iterable[str], shown: str) -> str:
    near = difflib.get_close_matches(name, list(keywords), n=1)
    hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(keywords) or 'none'}"
    return f"{shown}: unknown argument; {hint}"
