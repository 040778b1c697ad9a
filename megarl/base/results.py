"""What a command finds, as an object of Python, and tables of plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class CommandResult(Mapping[str, Any]):
    """The values that a command prints with --json, as items and as attributes: `result["step_s"]`,
    `result.step_s`.

    Units are in the names, such as `step_s` and `trainer_gib_per_gpu`. As text it is what the
    command prints for people.
    """

    def __init__(self, values: Mapping[str, Any], text: str):
        self._values = dict(values)
        self._text = text

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        values = vars(self).get("_values", {})  # empty while pickle makes the object
        if name not in values:
            raise AttributeError(f"no value named {name}; there are {', '.join(values)}")
        return values[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        return self._text


def aligned(rows: Sequence[Sequence[str]], text_columns: int = 1) -> list[str]:
    """A line for each row: the first `text_columns` columns to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        texts = map(str.ljust, row[:text_columns], widths)
        numbers = map(str.rjust, row[text_columns:], widths[text_columns:])
        lines.append("  ".join([*texts, *numbers]).rstrip())
    return lines
