"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], text_columns: int = 1) -> list[str]:
    """A line for each row: the first `text_columns` columns to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        texts = map(str.ljust, row[:text_columns], widths)
        numbers = map(str.rjust, row[text_columns:], widths[text_columns:])
        lines.append("  ".join([*texts, *numbers]).rstrip())
    return lines
