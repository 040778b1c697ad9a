"""Paths of models: a local folder, or a hub name, `owner/name`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def missing_folder(key: str, path: str) -> Iterable[str]:
    """A problem if there is no such folder. A path whose first folder exists here is taken for a local one."""
    is_hub_name = HUB_NAME.fullmatch(path) and not Path(path.split("/")[0]).is_dir()
    if Path(path).is_file():
        yield f"{key}={path}: must be a folder, not a file"
    elif not is_hub_name and not Path(path).is_dir():
        where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        yield f"{key}={path}: no such folder{where}{did_you_mean(Path(path))}"


def did_you_mean(path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names)
    return f"; did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""
