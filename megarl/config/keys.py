"""The settings of a run as a tree of dotted keys, derived from the dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config.foreign import ForeignSetting, find_foreign_setting
from megarl.config.limits import Limit
from megarl.config.schema import RunConfig

NEAREST = 3  # how many suggestions there are at most
# least similarity of the last names of two keys (difflib's ratio) for a suggestion
CLOSE_ENOUGH = 0.7
TIE = 0.01  # a suggestion whose score is this close to the best one's is shown too
# in the key of a section that may occur several times, stands for the name that the user chooses
NAME = "NAME"


@dataclass(frozen=True)
class Setting:
    """One leaf of the tree. `key` is what people write: `async.capacity`, not `async_.capacity`."""

    key: str
    type: Any  # without Optional
    optional: bool
    default: Any
    meaning: str
    limit: Limit | None
    path: str  # INPUT, OUTPUT or MODULE of megarl.config.limits; empty if the value is not a path


@dataclass(frozen=True)
class Section:
    """An inner node of the tree.

    If `optional`, it may be null. If `many`, there may be several, each under a name that the user
    chooses.
    """

    key: str
    type: type
    optional: bool
    meaning: str
    many: bool = False


@functools.cache
def settings() -> dict[str, Setting]:
    """Every setting by its dotted key, in the order of the dataclasses."""
    return {node.key: node for node in _walk(RunConfig, "") if isinstance(node, Setting)}


@functools.cache
def sections() -> dict[str, Section]:
    """Every section by its dotted key."""
    return {node.key: node for node in _walk(RunConfig, "") if isinstance(node, Section)}


def setting_of(key: str) -> Setting | None:
    """The setting that `key` sets.

    The user's names match NAME: `eval.suites.algebra.source` is an `eval.suites.NAME.source`.
    """
    setting = settings().get(general(key))
    if setting:
        return dataclasses.replace(setting, key=key)
    return None


def section_of(key: str) -> Section | None:
    section = sections().get(general(key))
    if section:
        return dataclasses.replace(section, key=key)
    return None


def concrete(tree: Mapping[str, Any]) -> Iterator[Setting]:
    """Every setting of the configuration `tree` (nested mappings).

    A setting below NAME comes once for each name in the tree.
    """
    for key, setting in settings().items():
        for concrete_key in _named("", key, tree):
            yield dataclasses.replace(setting, key=concrete_key)


def _named(prefix: str, key: str, config: RunConfig | Mapping[str, Any]) -> Iterator[str]:
    """`prefix` with `key` behind it, once for each choice of the names in `config` for the NAMEs of
    `key`.
    """
    parent, _, inner_key = key.partition(f".{NAME}.")
    if not inner_key:
        yield f"{prefix}{key}"
        return
    for name, section in (value_at(config, f"{prefix}{parent}") or {}).items():
        if section is not None:
            yield from _named(f"{prefix}{parent}.{name}.", inner_key, config)


def outer_sections(key: str) -> list[Section]:
    """The sections that contain `key`, outermost first. If `key` names a section, it comes last."""
    names = key.split(".")
    prefixes = [".".join(names[:length]) for length in range(1, len(names) + 1)]
    return [section for section in map(section_of, prefixes) if section]


def general(key: str) -> str:
    """`key` with NAME in place of the user's names."""
    for section in sections().values():  # outer sections come before inner ones
        if section.many and key.startswith(f"{section.key}."):
            _, *inner_names = key[len(section.key) + 1 :].split(".")
            key = ".".join([section.key, NAME, *inner_names])
    return key


Settings = Mapping[str, Any]  # dotted key -> value


def field_path(key: str) -> str:
    """The path of `key` in RunConfig. It differs only for `async`, which is a Python keyword."""
    if key == "async" or key.startswith("async."):
        return "async_" + key[len("async") :]
    return key


def value_at(config: RunConfig | Mapping[str, Any], key: str) -> Any:
    """The value of `key`, or None if an optional section above it is null or missing."""

    def below(node: Any, name: str) -> Any:
        if isinstance(node, dict):
            return node.get(name)
        return getattr(node, name, None)

    return functools.reduce(below, field_path(key).split("."), config)


def with_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """`config` with these settings."""
    for key, value in settings.items():
        config = _with_value(config, field_path(key).split("."), value)
    return config


def _with_value(node: Any, path: list[str], value: Any) -> Any:
    """`node`, a section or a mapping, with `value` at `path` below it."""
    name, *subpath = path
    is_mapping = isinstance(node, dict)
    if subpath:
        value = _with_value(node[name] if is_mapping else getattr(node, name), subpath, value)
    return node | {name: value} if is_mapping else dataclasses.replace(node, **{name: value})


def keys_of(config: RunConfig) -> list[str]:
    """The keys of all settings. A key with NAME comes once for each name in `config`."""
    keys = []
    for key in settings():
        keys += _named("", key, config)
    return keys


def yaml_text(value: Any) -> str:
    """`value` in YAML, on one line."""
    if isinstance(value, bool | dict | list | tuple | None):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def nearest(key: str) -> list[str]:
    """The known keys that `key` may mean, best first: what another program's setting is called
    here, or those with a similar last name, in the same section or another.
    """
    foreign_setting = foreign_setting_of(key)
    if foreign_setting is not None:
        if foreign_setting.key:
            return [foreign_setting.key]
        return []
    candidates = [
        (_likeness(key, candidate), candidate)
        for candidate in settings()
        if _ratio(_name(key), _name(candidate)) >= CLOSE_ENOUGH
    ]
    candidates.sort(reverse=True)
    best = candidates[0][0] if candidates else 0.0
    return [candidate for score, candidate in candidates[:NEAREST] if score >= best - TIE]


def foreign_setting_of(key: str) -> ForeignSetting | None:
    """The meaning of `key` in other programs, if one has it."""
    return find_foreign_setting(key, frozenset(sections()))


def _likeness(key: str, candidate: str) -> float:
    key_ratio = _ratio(key, candidate)
    name_ratio = _ratio(_name(key), _name(candidate))
    return max(key_ratio, 0.9 * name_ratio + 0.1 * key_ratio) + 0.1 * _common_start(key, candidate)


def _common_start(key: str, candidate: str) -> float:
    """The share of `key` that both begin with."""
    length = 0
    for first, second in zip(key, candidate):
        if first != second:
            break
        length += 1
    return length / len(key)


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _walk(cls: type, prefix: str) -> Iterator[Setting | Section]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key = prefix + ("async" if field.name == "async_" else field.name)
        hint, optional = _without_optional(hints[field.name])
        meaning = field.metadata.get("meaning", "")
        named = typing.get_args(hint)[1] if typing.get_origin(hint) is dict else None
        named, _ = _without_optional(named)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield Section(key, hint, optional, meaning)
            yield from _walk(hint, key + ".")
        elif isinstance(named, type) and dataclasses.is_dataclass(named):
            yield Section(key, dict, False, meaning, many=True)
            yield Section(f"{key}.{NAME}", named, True, meaning)
            yield from _walk(named, f"{key}.{NAME}.")
        else:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            yield Setting(
                key,
                hint,
                optional,
                default,
                meaning,
                field.metadata.get("limit"),
                field.metadata.get("path", ""),
            )


def _without_optional(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None)), True
    return hint, False
