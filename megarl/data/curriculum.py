"""Prompts that are too easy or too hard rest for some epochs, then come again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from megarl.config.data import CurriculumConfig
from megarl.types import Ordinal


class Place(NamedTuple):
    """What an ordinal stands for: the number of its source, that of the pass over it, and that of the row."""

    source: int
    epoch: int
    row: int


class Verdict(Enum):
    BEGINS = "begins"
    RESTS = "rests"
    WAITS = "waits"


class Curriculum:
    """Pure logic, at the generator. A row rests in epoch e of its source if its pass rate was outside the band when it was drawn in one of
    the `rest_epochs` epochs before e.

    Which knowledge may an ordinal use? What a row's earlier draws scored, and nothing else. These are fixed before the ordinal begins: if
    one of them is still in flight, the ordinal waits for it (`Verdict.WAITS`), which finishes by itself, as it needs nothing of the
    trainer. So neither the capacity of the channel, nor the order in which rollouts finish, nor the step that the trainer is at changes
    which rows rest. Knowledge of "what has been trained on by now" would, and waiting for training could wait for ever: a batch may need
    the very ordinal that waits for it.

    A resumed run decides alike, because the link keeps the order: whatever an ordinal that a checkpoint knows of was decided by has reached
    the checkpoint before it. Where a group is generated again since it was too old, its first score counts, which may have been used.
    """

    def __init__(self, locate: Callable[[Ordinal], Place], rest_epochs: int):
        self._locate, self._rest_epochs = locate, rest_epochs
        self._running: dict[tuple[int, int], Ordinal] = {}  # row → its draw that is still to be scored
        self._outside: dict[tuple[int, int], int] = {}  # row → the last epoch in which it was outside the band
        self._scored: Collection[Ordinal] = ()

    def resume(self, outside: Iterable[Ordinal], scored: Collection[Ordinal]) -> None:
        """`outside`: all draws of the run that were outside the band. `scored`: those whose first scores count, though they come again."""
        self._scored = scored
        for ordinal in outside:
            source, epoch, row = self._locate(ordinal)
            self._outside[source, row] = max(epoch, self._outside.get((source, row), -1))

    def begin(self, ordinal: Ordinal) -> Verdict:
        source, epoch, row = self._locate(ordinal)
        if (source, row) in self._running:
            return Verdict.WAITS
        last = self._outside.get((source, row))
        if last is not None and last < epoch <= last + self._rest_epochs:
            return Verdict.RESTS
        if ordinal not in self._scored:
            self._running[source, row] = ordinal
        return Verdict.BEGINS

    def finish(self, ordinal: Ordinal, outside: bool) -> None:
        source, epoch, row = self._locate(ordinal)
        if self._running.get((source, row)) == ordinal:
            del self._running[source, row]
            if outside:
                self._outside[source, row] = epoch


def outside_band(rewards: Sequence[float], config: CurriculumConfig) -> bool:
    passed = sum(reward >= config.pass_reward for reward in rewards) / len(rewards)
    return not config.min_pass_rate <= passed <= config.max_pass_rate
