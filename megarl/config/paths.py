"""What a path in a configuration is relative to.

One that begins with ./ or ../ is relative to the folder of the YAML file that it stands in, any other to the working directory, and so is
every path on the command line. The loader makes the first kind absolute, so that records of the run mean the same wherever they are read.
Nothing is guessed: where only the other folder has such a file, or both have one, the configuration is refused, and the message says what
to write.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config.data import MIXED
from megarl.config.keys import setting_of
from megarl.config.limits import INPUT, MODULE
from megarl.config.roles import flat

_OF_ROLLOUTS = {"rollout.args.tool": MODULE, "rollout.args.folder": INPUT, "rollout.args.readable": INPUT}  # arguments of ours


def located(key: str, value: Any, file: Path | None, problems: list[str]) -> Any:
    """`value` of the setting `key`, with paths that begin with ./ or ../ made absolute. Adds what is doubtful to `problems`.

    Args: file: the YAML file that the value stands in; None: it is from the command line.
    """
    if isinstance(value, Mapping):
        inner = flat(value) if key.endswith(".sft") else value
        return {name: located(f"{key}.{name}", item, file, problems) for name, item in inner.items()}
    if isinstance(value, list) and key in _OF_ROLLOUTS:
        return [located(key, item, file, problems) for item in value]
    kind = _kind(key.partition(".sft.")[2] if key.startswith("roles.") and ".sft." in key else key)
    if not kind or not isinstance(value, str) or value == MIXED or (kind == MODULE and key != "model.family" and ":" not in value):
        return value
    path, _, name = value.rpartition(":") if kind == MODULE and ":" in value else (value, "", "")
    end = f":{name}" if name else ""
    is_file = kind != MODULE or path.endswith(".py")
    of_file = path.startswith(("./", "../")) or path in (".", "..")
    if file is not None and kind in (INPUT, MODULE):
        problems += [f"{key}={value}: {problem}" for problem in _doubts(path, end, of_file, is_file, file)]
    if of_file or (kind == MODULE and is_file):
        return os.path.abspath(os.path.join(file.parent if file is not None and of_file else "", path)) + end
    return value


def _kind(key: str) -> str:
    setting = setting_of(key)
    return _OF_ROLLOUTS.get(key) or (setting.path if setting else "")


def _doubts(path: str, end: str, of_file: bool, is_file: bool, file: Path) -> Iterator[str]:
    """Says what to write where the folder that was not meant has such a file too, or alone."""
    if os.path.isabs(path) or "${" in path or file.parent.resolve() == Path.cwd():
        return
    if not is_file:
        yield from _doubtful_module(path, end, file)
        return
    beside, here = file.parent / path, Path(path)
    plain = os.path.normpath(path)
    if of_file and not beside.exists() and here.exists():
        yield f"there is none at {beside}, as ./ is the folder of {file.name}; for the one in the working directory write {plain}{end}"
    elif not of_file and beside.exists() and not here.exists():
        yield f"there is none in the working directory {Path.cwd()}; for the one beside {file.name} write ./{plain}{end}"
    elif not of_file and beside.exists() and here.exists() and not beside.samefile(here):
        yield (
            f"there is one in the working directory and another beside {file.name}: write ./{plain}{end} for the latter, or "
            f"{here.absolute()}{end}"
        )


def _doubtful_module(module: str, end: str, file: Path) -> Iterator[str]:
    top, *inner = module.split(".")
    beside = next((path for path in (file.parent / f"{top}.py", file.parent / top / "__init__.py") if path.exists()), None)
    if beside is None:
        return
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    found = importlib.util.find_spec(top)
    if found is None or found.origin is None or not Path(found.origin).exists() or not beside.samefile(found.origin):
        which = "none in the working directory" if found is None else f"another module of this name, {found.origin or 'a folder'}"
        yield f"there is {which}; for the one beside {file.name} write ./{'/'.join([top, *inner])}.py{end}"
