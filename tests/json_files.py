"""Files with a JSON value in each line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_json_lines(path: Path, values: Iterable[Any]) -> Path:
    lines = [json.dumps(value) + "\n" for value in values]
    path.write_text("".join(lines), encoding="utf-8")
    return path
