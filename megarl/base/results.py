"""What a command finds, as an object of Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
