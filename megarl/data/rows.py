"""One row of a dataset, whatever its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


class RowProblem(Exception):
    """A problem with one row. `kind` is the same for all rows that have such a problem."""

    def __init__(self, problem: str, kind: str = ""):
        super().__init__(problem)
        self.kind = kind or problem


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


@dataclass
class Reading:
    """What else is done with rows while they are read, and what it finds. With `drop` rows with problems are left out (data.bad_rows)."""

    drop: bool = False
    tokens: Callable[[Any], int] | None = None  # of a row's prompt; raises RowProblem for a row that does not fit model or tokenizer
    lengths: list[int] = field(default_factory=list)  # what `tokens` has returned
    dropped: dict[str, list[str]] = field(default_factory=dict)  # kind of problem -> where
    prompts: dict[int, int] = field(default_factory=dict)  # hash of each prompt -> hash of what is to follow it
    repeated: int = 0  # rows whose prompt an earlier row has
    otherwise: int = 0  # of these, with another answer

    def note(self, row: Row | Pair) -> None:
        """Counts a row that is used."""
        after = row.answer or row.demonstration if isinstance(row, Row) else (row.chosen, row.rejected)
        prompt, now = hash(row.prompt), hash(after)
        self.repeated += prompt in self.prompts
        self.otherwise += self.prompts.setdefault(prompt, now) != now


Answers = Literal[
    "final", "instructions", "tests", "whole", "row", "unused", "none", "final, row", "instructions, row", "tests, row"
]  # fmt: skip
"""What of the answer column becomes the reference: the part marked as final; IFEval's instructions or a program's tests, checked; all of
it, for a user's own reward function or a judge; nothing, where an environment scores by the whole row ("row"), no score needs one
("unused"), or only demonstrations are read ("none"). A user's own function beside a verifier is given the row too ("final, row")."""
WITH_ROW: dict[Answers, Answers] = {"final": "final, row", "instructions": "instructions, row", "tests": "tests, row"}
