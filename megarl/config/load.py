"""Loads settings and dotted overrides into one RunConfig, or raises one ConfigError with all
problems.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import pickle
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationValidationError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from megarl.config.algorithms import PUBLISHED
from megarl.config.dialect import RepeatedKey, read_texts, read_yaml, write_line, write_yaml
from megarl.config.errors import ConfigError
from megarl.config.keys import (
    Setting,
    concrete,
    field_path,
    foreign_setting_of,
    general,
    nearest,
    outer_sections,
    section_of,
    setting_of,
    settings,
    yaml_text,
)
from megarl.config.limits import INPUT, MODULE, did_you_mean
from megarl.config.schema import MIXED, RunConfig, published
from megarl.roles.settings import flat

# paths in the arguments of built-in rollouts
_ROLLOUT_PATHS = {
    f"{section}.args.{name}": kind
    for section in ("rollout", "data.train.sources.NAME.rollout")
    for name, kind in (("tool", MODULE), ("folder", INPUT), ("readable", INPUT))
}


def located(key: str, value: Any, file: Path | None, problems: list[str]) -> Any:
    """The `value` of the setting `key`, with paths that begin with ./ or ../ made absolute.

    In a YAML file, such a path is relative to the folder of that file. Any other path is relative
    to the working directory, and so is every path on the command line. The first kind becomes
    absolute, so that a run's recorded configuration means the same everywhere. A path that begins
    with configs/ and is not in the working directory is that of the folder configs/ which comes
    with MegaRL.

    It never guesses: if the file is only in the other folder, or in both, it adds a problem that
    says what to write.

    Args: file: the YAML file that has the value, or None for the command line.
    """
    if isinstance(value, Mapping):
        inner = flat(value) if key.endswith(".sft") else value
        return {
            name: located(f"{key}.{name}", item, file, problems) for name, item in inner.items()
        }
    if isinstance(value, list) and general(key) in _ROLLOUT_PATHS:
        return [located(key, item, file, problems) for item in value]
    inner_key = _in_sft(key)[1]
    kind = _kind(inner_key or key)
    if not kind or not isinstance(value, str) or value == MIXED:
        return value
    path = value
    end = ""
    if kind == MODULE and ":" in value:
        path, _, name = value.rpartition(":")
        end = f":{name}" if name else ""
    elif kind == MODULE and key != "model.family":
        return value
    is_file = kind != MODULE or path.endswith(".py")
    is_relative = path.startswith(("./", "../")) or path in (".", "..")
    if file is not None and kind in (INPUT, MODULE):
        for problem in _doubts(path, end, is_relative, is_file, file):
            problems.append(f"{key}={value}: {problem}")
    if is_relative or (kind == MODULE and is_file):
        folder = file.parent if file is not None and is_relative else ""
        return os.path.abspath(os.path.join(folder, path)) + end
    if kind == INPUT and value.startswith(f"{SHIPPED.name}/"):
        return str(shipped(Path(value)))
    return value


SHIPPED = Path(__file__).parents[1] / "configs"


def shipped(path: Path) -> Path:
    """`path`, or where nothing is there, the file or folder of this name that comes with MegaRL,
    such as configs/quickstart.yaml.
    """
    inside = SHIPPED.parent / path
    if not path.exists() and path.parts[:1] == (SHIPPED.name,) and inside.exists():
        return inside.resolve()
    return path


def _kind(key: str) -> str:
    if general(key) in _ROLLOUT_PATHS:
        return _ROLLOUT_PATHS[general(key)]
    setting = setting_of(key)
    if setting:
        return setting.path
    return ""


def _doubts(path: str, end: str, is_relative: bool, is_file: bool, file: Path) -> Iterator[str]:
    """If the file is also in the other folder, or only there, says what to write.

    `is_relative`: whether the path is relative to the folder of `file`.
    """
    if os.path.isabs(path) or "${" in path or file.parent.resolve() == Path.cwd():
        return
    if not is_file:
        yield from _doubtful_module(path, end, file)
        return
    beside = file.parent / path
    in_working_directory = Path(path)
    plain = os.path.normpath(path)
    if is_relative and not beside.exists() and in_working_directory.exists():
        yield (
            f"there is none at {beside}, as ./ is the folder of {file.name}; for the one in the "
            f"working directory write {plain}{end}"
        )
    elif is_relative or not beside.exists():
        return
    elif not in_working_directory.exists():
        yield (
            f"there is none in the working directory {Path.cwd()}; for the one beside "
            f"{file.name} write ./{plain}{end}"
        )
    elif not beside.samefile(in_working_directory):
        yield (
            f"there is one in the working directory and another beside {file.name}: write "
            f"./{plain}{end} for the latter, or {in_working_directory.absolute()}{end}"
        )


def _doubtful_module(module: str, end: str, file: Path) -> Iterator[str]:
    top, *inner = module.split(".")
    beside = file.parent / f"{top}.py"
    if not beside.exists():
        beside = file.parent / top / "__init__.py"
    if not beside.exists():
        return
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    spec = importlib.util.find_spec(top)
    origin = spec.origin if spec else None
    if origin is not None and Path(origin).exists() and beside.samefile(origin):
        return
    finding = "none in the working directory"
    if spec is not None:
        finding = f"another module of this name, {origin or 'a folder'}"
    yield (
        f"there is {finding}; for the one beside {file.name} write "
        f"./{'/'.join([top, *inner])}.py{end}"
    )


TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple[float, float]: "a list of two numbers",
    list[str]: "a list of texts",
}


_RECIPE = "algorithm.recipe"
_LARGEST = 10**15  # the largest integer that makes sense for any setting


@dataclass(frozen=True)
class LoadedConfig:
    """What `read_config` returns.

    Where a value has a problem, `config` has the default instead. `config` is None if that too is
    impossible.
    """

    config: RunConfig | None
    problems: list[str]
    doubtful: frozenset[str]  # keys with problems, and the keys that the messages suggest instead

    def concerns(self, problem: str) -> bool:
        """Whether a problem found later is worth showing.

        It is not if it may only follow from a value that was replaced by its default.
        """
        for key in self.doubtful:
            if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", problem):
                return False
        return True


# a YAML file, or the settings that it would have
ConfigSource = str | Path | Mapping[str, Any] | RunConfig


def load_config(source: ConfigSource, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads `source`, applies `overrides` (`dotted.key=value`, the value in YAML), fills in
    defaults, and resolves interpolations.

    Raises ConfigError with all problems: unknown keys, wrong types, values outside their limits,
    missing settings.
    """
    loaded = read_config(source, overrides)
    if loaded.config is None or loaded.problems:
        raise ConfigError(loaded.problems)
    return loaded.config


def read_config(source: ConfigSource, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Like `load_config`, but uses the default for a setting with a problem, and goes on.

    Raises ConfigError if the file cannot be read.
    """
    problems: list[str] = []
    file = shipped(Path(source)) if isinstance(source, str | Path) else None
    text = _read_file(file) if file is not None else _text_of(source)
    name = str(file or "the configuration")
    file_settings = [
        (key, located(key, value, file, problems))
        for key, value in _read_text(text, name, problems)
    ]
    override_settings = [
        (key, located(key, value, None, problems))
        for key, value in _read_overrides(overrides, problems)
    ]
    if not any(key == _RECIPE for key, _ in override_settings):
        file_settings = _with_recipe(file_settings)
    tree: DictConfig = pickle.loads(_defaults())
    wrong_keys: set[str] = set()
    suggested_keys: set[str] = set()
    assignments = file_settings + _with_recipe(override_settings)
    for key, value in assignments:
        key_problems = list(_assign(tree, key, value))
        if key_problems:
            problems.extend(key_problems)
            wrong_keys.add(key)
            if key not in settings():
                suggested_keys.update(nearest(key))
    problems.extend(_mistaken(dict(assignments)))
    for setting, problem in list(_check_values(tree, skip=wrong_keys)):
        problems.append(problem)
        wrong_keys.add(setting.key)
        OmegaConf.update(tree, field_path(setting.key), setting.default)
    try:
        config = OmegaConf.to_object(tree)
    except MissingMandatoryValue:
        config = None
    assert config is None or isinstance(config, RunConfig)
    return LoadedConfig(config, problems, frozenset(wrong_keys | suggested_keys))


def _mistaken(assigned: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem for a key that means something else in another program, unless what it means
    there is set too.
    """
    for key, value in assigned.items():
        elsewhere = foreign_setting_of(key) if key in settings() else None
        if elsewhere is not None and elsewhere.key not in ("", *assigned):
            yield (
                f"{key}={yaml_text(value)}: {elsewhere.key} must be set too. In other programs "
                f"{key} is what MegaRL calls {elsewhere.key} ({elsewhere.note}). Here it is: "
                f"{settings()[key].meaning}"
            )


def _with_recipe(assignments: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """If an assignment sets algorithm.recipe, the settings of that recipe come first, so that the
    assignments override them.
    """
    recipe = dict(assignments).get(_RECIPE)
    if recipe not in PUBLISHED:
        return assignments
    return [*published(recipe).items(), *assignments]


@cache
def _defaults() -> bytes:
    """The pickled tree of defaults.

    To unpickle it takes a thirtieth of the time in which OmegaConf makes a new one.
    """
    return pickle.dumps(OmegaConf.structured(RunConfig))


def dump_config(config: RunConfig) -> str:
    """`config` as YAML. `load_config` reads it back as an equal configuration."""
    tree = escaped(asdict(config))
    return write_yaml({"async" if key == "async_" else key: value for key, value in tree.items()})


def override_text(key: str, value: Any) -> str:
    """The override that sets `key` to `value`, whatever that is."""
    return f"{key}={write_line(escaped(value))}"


def _read_file(path: Path) -> str:
    """The text of the file. Raises ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(_not_found(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a YAML file: {error}") from None


def _text_of(settings: Any) -> str:
    """Settings of a Python program as YAML. Raises ConfigError."""
    if isinstance(settings, RunConfig):
        return dump_config(settings)
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"{settings!r}: a configuration must be the path of a YAML file, a mapping, or what "
            "megarl.load returns"
        )
    try:
        return write_yaml(dict(settings))
    except yaml.representer.RepresenterError as error:
        raise ConfigError(
            f"{error.args[-1]!r}: a setting must be a number, a text, true, false, null, a list "
            "or a mapping"
        ) from None


def _read_text(text: str, name: str, problems: list[str]) -> list[tuple[str, Any]]:
    """The leaves of a YAML text, each with its dotted key.

    Raises ConfigError at once if it is not valid YAML, or no mapping.
    """
    try:
        tree = _as_written(read_yaml(text), read_texts(text))
    except RepeatedKey as error:
        raise ConfigError(
            f"{name}, lines {error.lines[0]} and {error.lines[1]}: {error.problem}"
        ) from None
    except yaml.MarkedYAMLError as error:
        index = error.problem_mark.line if error.problem_mark else 0
        place = f", line {index + 1}" if error.problem_mark else ""
        problem = error.problem
        if "\t" in "".join(text.splitlines()[index : index + 1]):
            problem = "a tab where YAML allows only spaces"
        raise ConfigError(f"{name}{place}: not valid YAML: {problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    if tree is None:
        return []
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: must hold a mapping of keys to values")
    leaves = list(_leaves(tree, "", problems))
    times = Counter(key for key, _ in leaves)
    problems += [
        f"{name}: {key} is set {count} times, with dots and as a section"
        for key, count in times.items()
        if count > 1
    ]
    return leaves


@dataclass(frozen=True)
class _Number:
    """A number in a file or an override, and the text that stands for it there."""

    value: int | float
    text: str


def _as_written(value: Any, text: Any) -> Any:
    """`value` with a _Number for each number, and the written text for each key that is one.

    `text`: the same, read by `read_texts`.
    """
    if isinstance(value, dict):
        # of the keys that are numbers
        written = {read_yaml(name): name for name in text if name not in value}
        return {
            written.get(key, key): _as_written(item, text[written.get(key, key)])
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_as_written(item, inner) for item, inner in zip(value, text, strict=True)]
    if isinstance(text, str) and not isinstance(value, str):
        return _Number(value, text)
    return value


def _read_as(key: str, value: Any) -> Any:
    """The value of the setting `key`: if it is a text or a list of texts, numbers are what was
    written.
    """
    setting = setting_of(_in_sft(key)[1] or key)
    texts = setting is not None and setting.type in (str, list[str])
    if isinstance(value, Mapping):
        return {name: _read_as(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list):
        return [_read_as(key, item) for item in value]
    if isinstance(value, _Number):
        if texts:
            return value.text
        return value.value
    return value


def _not_found(path: Path) -> str:
    message = f"{path}: no such file"
    if "=" in path.name:
        return f"{message}; the configuration file comes before the overrides: CONFIG {path}"
    names = [entry.name for entry in path.parent.glob("*.y*ml")]
    near = difflib.get_close_matches(path.name, names, cutoff=0.3)
    return message + did_you_mean([str(path.parent / name) for name in near])


def _read_overrides(overrides: Sequence[str], problems: list[str]) -> list[tuple[str, Any]]:
    assignments = []
    for override in map(str, overrides):
        key, equals, text = override.partition("=")
        if not equals or not key:
            problems.append(
                f"{override}: an override must be of the form key=value, such as trainer.tp=2"
            )
            continue
        try:
            value = _as_written(read_yaml(text), read_texts(text)) if text else ""
        except RepeatedKey as error:
            problems.append(f"{override}: {error.problem}")
            continue
        except (yaml.YAMLError, ValueError):
            # not valid YAML, so it is plain text: `data.train.prompt_template=Q: {prompt}`
            value = text
        setting = setting_of(_in_sft(key)[1] or key)
        if setting and setting.type is str and not isinstance(value, str | None):
            value = text
        assignments.extend(_leaves({key: value}, "", problems))
    return assignments


def _leaves(tree: Mapping[Any, Any], prefix: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{'on' if name is True else name}"  # YAML reads a bare `on` as true
        section = section_of(key)
        if section is None or (section.optional and value in (None, {})):
            yield key, _read_as(key, value)
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.", problems)
        else:
            problems.append(
                f"{key}={yaml_text(_read_as(key, value))}: is a section; set its keys, such as "
                f"{_children(key)[0]}"
            )


def _children(section: str) -> list[str]:
    return [key for key in settings() if key.startswith(f"{general(section)}.")]


_FREE = tuple(  # mappings whose keys are defined elsewhere
    f"{section}."
    for section in (
        "generator.server_args",
        "generator.groups.NAME.server_args",
        "rollout.args",
        "data.train.sources.NAME.rollout.args",
        "trainer.megatron",
        "trainer.ddp",
        "trainer.optimizer.megatron",
        "roles.NAME.server_args",
        "roles.NAME.verdict_scores",
    )
)


@dataclass(frozen=True)
class Fixed:
    """A setting that only earlier versions had.

    Its fixed value is still accepted, since the config.yaml of an earlier run may have it.
    """

    value: Any
    instead: str


_PAIRS_COLUMNS = "held-out pairs have the columns of reward_model.data"
_SETS = (
    "data.train",
    "data.train.sources.NAME",
    "data.eval",
    "eval.suites.NAME",
    "sft.data",
    "sft.eval",
    "reward_model.data",
)
_HELD_OUT = ("data.eval", "eval.suites.NAME")
FIXED = {
    **{
        f"{name}.tools_key": Fixed("tools", "the column is called tools")
        for name in (*_SETS, "reward_model.eval")
    },
    **{f"{name}.size": Fixed(None, "eval.limit bounds all held-out sets") for name in _HELD_OUT},
    **{
        f"{name}.demonstration_key": Fixed(
            None, "a held-out set is not learned; sft.eval is that of megarl sft"
        )
        for name in _HELD_OUT
    },
    **{
        f"{name}.learn": Fixed(
            "all", "a held-out set is not learned; sft.eval is that of megarl sft"
        )
        for name in _HELD_OUT
    },
    "sft.data.sources": Fixed(
        {}, "only data.train takes several sources, which megarl sft learns if sft.data is null"
    ),
    "reward_model.eval.prompt_key": Fixed(None, _PAIRS_COLUMNS),
    "reward_model.eval.prompt_template": Fixed("{prompt}", _PAIRS_COLUMNS),
    "reward_model.eval.chosen_key": Fixed("chosen", _PAIRS_COLUMNS),
    "reward_model.eval.rejected_key": Fixed("rejected", _PAIRS_COLUMNS),
    "reward_model.eval.margin_key": Fixed(None, _PAIRS_COLUMNS),
    **{
        f"{name}.optimizer.megatron": Fixed(
            {}, "trainer.optimizer.megatron holds for every optimizer"
        )
        for name in ("critic", "sft", "reward_model")
    },
    **{
        f"{name}.max_tokens_per_microbatch": Fixed(
            None, "trainer.max_tokens_per_microbatch holds for every command"
        )
        for name in ("sft", "reward_model")
    },
    "critic.head": Fixed("zeros", "a new head begins with zeros"),
    "roles.NAME.dtype": Fixed(None, "engines of roles compute in model.dtype"),
    "rollout.tool_memory_mib": Fixed(1024, "every tool's process has this memory limit"),
}


def _fixed(key: str, value: Any) -> str | None:
    """For a key that is fixed now, the problem with `value`, or an empty text if it is the fixed
    value. None for any other key.
    """
    name = general(key)
    for fixed_key, fixed in FIXED.items():
        if name == fixed_key and value == fixed.value:
            return ""
        if name == fixed_key or name.startswith(f"{fixed_key}."):
            return f"{key}={yaml_text(value)}: can no longer be set: {fixed.instead}"
    return None


def _assign(tree: DictConfig, key: str, value: Any) -> Iterator[str]:
    """Sets one leaf of `tree`. Yields the problems with its key or its type."""
    role, inner = _in_sft(key)
    if role and (inner or isinstance(value, Mapping)):
        sft_overrides = {inner: value} if inner else value
        yield from _assign_in_sft(tree, role, sft_overrides, replaces_all=not inner)
        return
    setting = setting_of(key)
    free = general(key).startswith(_FREE)
    fixed_problem = _fixed(key, value) if setting is None else None
    if fixed_problem is not None:
        if fixed_problem:
            yield fixed_problem
        return
    if setting is None and not free and section_of(key) is None:
        yield f"{key}={yaml_text(value)}: unknown key; {_hint(key)}"
        return
    if setting is not None and setting.limit is not None:
        value = setting.limit.spelled.get(str(value).lower(), value)
    if setting is not None and not _right_kind(setting, value):
        yield _wrong_type(setting, value)
        return
    if isinstance(value, Mapping):
        unclear = [yaml_text(name) for name in value if isinstance(name, bool | None)]
        if unclear:
            yield (f"{key}={yaml_text(value)}: {_quote(unclear[0])}")
            return
        value = {str(name): item for name, item in value.items()}
    for section in outer_sections(key):
        if section.optional and OmegaConf.select(tree, section.key) is None:
            OmegaConf.update(tree, section.key, section.type)
    if setting is None and value == {}:
        return
    try:
        OmegaConf.update(tree, field_path(key), _internal(value), merge=False, force_add=free)
    except OmegaConfBaseException:
        yield _wrong_type(setting, value) if setting else f"{key}={yaml_text(value)}: cannot be set"


def _in_sft(key: str) -> tuple[str, str]:
    """Splits a key below roles.NAME.sft into (roles.NAME.sft, the setting of megarl sft).

    Two empty texts for any other key.
    """
    names = key.split(".")
    section = ".".join(names[:3])
    if general(section) != "roles.NAME.sft":
        return "", ""
    return section, ".".join(names[3:])


def _assign_in_sft(
    tree: DictConfig, role: str, overrides: Mapping[Any, Any], replaces_all: bool
) -> Iterator[str]:
    """Sets `overrides` in roles.NAME.sft (`role`) under flat names, so that a later override
    replaces an earlier override of the same key. With `replaces_all`, all earlier overrides are
    removed first. Yields the problems.
    """
    for section in outer_sections(role):
        if section.optional and OmegaConf.select(tree, section.key) is None:
            OmegaConf.update(tree, section.key, section.type)
    new = flat(overrides)
    before = {}
    if not replaces_all:
        before = OmegaConf.to_container(OmegaConf.select(tree, role), resolve=False)
    assert isinstance(before, dict)
    for name, value in new.items():
        setting = setting_of(name)
        problems = list(_assign(pickle.loads(_defaults()), name, value))
        if setting and not problems and value is not None and "${" not in str(value):
            problems += _check_value(setting, value)
        yield from (f"{role}.{problem}" for problem in problems)
    OmegaConf.update(tree, role, before | new, merge=False)


def _hint(key: str) -> str:
    near = nearest(key)
    elsewhere = foreign_setting_of(key)
    if elsewhere is not None and elsewhere.note:
        if near:
            return f"did you mean {near[0]} ({elsewhere.note})?"
        return elsewhere.note
    if near:
        return f"did you mean {' or '.join(near)}?"
    siblings = _children(key.rpartition(".")[0]) if "." in key else []
    if siblings:
        return f"its section has {', '.join(siblings)}"
    return "docs/config.md lists every key"


def _right_kind(setting: Setting, value: Any) -> bool:
    """False for values that OmegaConf would convert silently: null if it is not allowed, booleans
    or collections to text, also in a list of texts, and numbers but 0 and 1 to booleans.
    """
    if value is None:
        return setting.optional
    if setting.type is bool and isinstance(value, int | float):
        return value in (0, 1)
    if setting.type == list[str] and isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    if setting.type is str:
        return isinstance(value, str | int | float) and not isinstance(value, bool)
    return True


def _wrong_type(setting: Setting, value: Any) -> str:
    name = TYPE_NAMES.get(setting.type, "a mapping")
    if setting.optional:
        name += " or null"
    problem = f"{setting.key}={yaml_text(value)}: must be {name}"
    items = value if isinstance(value, list) else [value]
    unquoted = [yaml_text(item) for item in items if isinstance(item, bool | None)]
    if unquoted and setting.type in (str, list[str]):
        problem += f"; {_quote(unquoted[0])}"
    return problem


def _quote(word: str) -> str:
    """What to do with a word that YAML reads as a boolean or null."""
    return f"{word} must be in quotes to be a text; so must yes, no, on, off and null"


def _check_values(tree: DictConfig, skip: set[str]) -> Iterator[tuple[Setting, str]]:
    """Resolves interpolations in `tree`, then checks every value against the limit of its
    setting.
    """
    written: Any = OmegaConf.to_container(tree)
    for setting in concrete(written):
        text = _dig(written, setting.key)
        if text is None or setting.key in skip:
            continue
        if text == MISSING:
            yield setting, f"{setting.key}: must be set: {setting.meaning}"
            continue
        # true of most settings; if OmegaConf resolved each, that would take most of the loading
        # time
        if "${" not in str(text):
            yield from ((setting, problem) for problem in _check_value(setting, text))
            continue
        try:
            value = _plain(OmegaConf.select(tree, field_path(setting.key)))
        except (InterpolationValidationError, ValidationError):
            yield setting, _wrong_type(setting, text)
        except OmegaConfBaseException as error:
            yield setting, f"{setting.key}={yaml_text(text)}: {str(error).splitlines()[0]}"
        else:
            yield from ((setting, problem) for problem in _check_value(setting, value))


def _check_value(setting: Setting, value: Any) -> Iterator[str]:
    numbers = value if isinstance(value, list) else [value]
    if value == "":
        yield f"{setting.key}=: must not be empty"
    elif any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        yield f"{setting.key}={yaml_text(value)}: must be finite"
    elif any(isinstance(number, int) and abs(number) > _LARGEST for number in numbers):
        yield f"{setting.key}={yaml_text(value)}: must be at most {_LARGEST}"
    elif setting.limit and not setting.limit.accepts(value):
        yield (
            f"{setting.key}={yaml_text(value)}: must be "
            f"{setting.limit.text}{setting.limit.meant(value)}"
        )


def _dig(tree: Any, key: str) -> Any:
    """The value of a dotted key; None under a section that is null."""
    for name in field_path(key).split("."):
        tree = None if tree is None else tree[name]
    return tree


def _plain(value: Any) -> Any:
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def _internal(value: Any, outermost: bool = True) -> Any:
    """`value` in the form that OmegaConf takes: with the internal name of `async`, and with ??? as
    a text, unless it is the whole value.
    """
    if isinstance(value, Mapping):
        return {key: _internal(item, outermost=False) for key, item in value.items()}
    if isinstance(value, list):
        return [_internal(item, outermost=False) for item in value]
    if not isinstance(value, str):
        return value
    if _ENDS_MISSING.fullmatch(value) and not (outermost and value == MISSING):
        return f"\\{value}"
    return _OF_ASYNC.sub(r"\1${async_.", value)


# not after an odd number of backslashes, which escape it
_OF_ASYNC = re.compile(r"(?<!\\)((?:\\\\)*)\$\{async\.")
_ENDS_MISSING = re.compile(r"\\*\?\?\?")  # with a backslash more, OmegaConf takes it for a text


def escaped(value: Any) -> Any:
    """`value` with each text that looks like an interpolation escaped, so that OmegaConf resolves
    it to itself.
    """
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(escaped, value))
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value
