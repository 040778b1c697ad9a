"""One row of a dataset, whatever its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


class RowProblem(Exception):
    """A problem with one row."""


@dataclass(frozen=True)
class Row:
    prompt: str  # what the model sees, after the template
    answer: str  # the verifier's reference; empty if none is read
    demonstration: str | tuple[str, ...]  # for supervised learning; several texts are the policy's and the environment's in turn
    where: str  # file and line, for messages
    record: dict[str, Any] = field(default_factory=dict)  # the whole row, for a user's own reward function
    ended: bool = False  # whether the demonstration has its own end-of-text


Rows = Sequence[Row]


@dataclass(frozen=True)
class Pair:
    """Two responses to a prompt, of which `chosen` is preferred."""

    prompt: str  # what the model sees, after the template
    chosen: str
    rejected: str
    margin: float  # the least difference of their scores that is wanted
    where: str  # file and line, for messages


Answers = Literal["final", "instructions", "tests", "whole", "row", "unused", "none"]
"""What of the answer column becomes the reference: the part marked as final; IFEval's instructions or a program's tests, checked; all of
it, for a user's own reward function or a judge; nothing, where an environment scores by the whole row ("row"), no score needs one
("unused"), or only demonstrations are read ("none")."""
