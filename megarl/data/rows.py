"""One row of a dataset, whatever it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    prompt: str  # what the model sees, template applied
    answer: str  # the reference that the verifier compares with, empty if none is read
    demonstration: str | tuple[str, ...]  # what supervised learning teaches; several texts: the policy's and the environment's in turn
    where: str  # file and line, for messages
    record: dict[str, Any] = field(default_factory=dict)  # the whole row, for a reward function of the user's own


Rows = Sequence[Row]

Answers = Literal["final", "whole", "none"]
"""What of the answer column the reference is: what it marks as final; all of it, for a reward function of the user's own; nothing, since
only demonstrations are read."""
