"""One row of a dataset, whatever it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    prompt: str  # what the model sees, template applied
    answer: str  # the reference that the verifier compares with
    demonstration: str | tuple[str, ...]  # what supervised learning teaches; several texts: the policy's and the environment's in turn
    where: str  # file and line, for messages


Rows = Sequence[Row]
