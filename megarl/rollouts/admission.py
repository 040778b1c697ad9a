"""Decides which prompt begins next, and when: the sending end of the rollouts channel."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from megarl.types import Ordinal, Version


class Admission:
    """Pure logic: nothing waits here. Prompts begin in the order of their ordinals, rejected ones first.

    Depth bound: with c = `run_ahead`, the j-th prompt (j = 0, 1, …; rejected and dropped ones do not count) may begin under weights of
    version v if j < (v + c + 1) * prompts_per_step. So the prompts of step s begin under version s - c or newer: c = 0 is the synchronous
    loop, 1 is LlamaRL's one step behind, K a bounded queue. A dropped prompt gives its place to the next one, which may begin at once,
    and the run ends one prompt later: `end` is where it would end without any.
    """

    def __init__(self, prompts_per_step: int, run_ahead: int | None, max_in_flight: int, end: Ordinal):
        self._prompts_per_step, self._run_ahead, self._max_in_flight, self._end = prompts_per_step, run_ahead, max_in_flight, end
        self._again: list[Ordinal] = []  # heap
        self._next: Ordinal = end
        self._skip: frozenset[Ordinal] = frozenset()
        self.begun = 0  # prompts, not counting rejected and dropped ones
        self.in_flight = 0

    def generate_from(self, first: Ordinal, skip: Iterable[Ordinal], dropped: int = 0) -> None:
        """Generates every ordinal from `first` to the end of the run, except those in `skip`. `dropped`: how many of the others were."""
        self._skip = frozenset(skip)
        self.begun = first + len(self._skip) - dropped
        self._end += dropped
        self._next = self._after(first)

    @property
    def exhausted(self) -> bool:
        """Whether every prompt of the run has begun."""
        return not self._again and self._next >= self._end

    @property
    def empty_share(self) -> float:
        """The share of places in flight that are empty."""
        return 1 - self.in_flight / self._max_in_flight

    def held_back(self, version: Version) -> bool:
        """Whether a prompt is left to begin, but needs newer weights."""
        return not self.exhausted and not self._deep_enough(version)

    def begin(self, version: Version) -> list[Ordinal]:
        """Returns the prompts that may begin now, under weights `version`, and counts them as begun."""
        begun = []
        while self.in_flight < self._max_in_flight and not self.exhausted and self._deep_enough(version):
            begun.append(self._pop())
            self.begun += 1
            self.in_flight += 1
        return begun

    def finish(self) -> None:
        self.in_flight -= 1

    def drop(self) -> None:
        """A prompt has finished, but is not trained on: another is to replace it."""
        self.in_flight -= 1
        self.begun -= 1
        self._end += 1

    def again(self, ordinals: Iterable[Ordinal]) -> None:
        """Queues prompts to be generated again, because they finished too late."""
        for ordinal in ordinals:
            heapq.heappush(self._again, ordinal)
            self.begun -= 1

    def _deep_enough(self, version: Version) -> bool:
        if version < 0:  # the engines have no weights of the run yet
            return False
        return self._run_ahead is None or self.begun < (version + self._run_ahead + 1) * self._prompts_per_step

    def _pop(self) -> Ordinal:
        if self._again:
            return heapq.heappop(self._again)
        ordinal, self._next = self._next, self._after(self._next + 1)
        return ordinal

    def _after(self, ordinal: Ordinal) -> Ordinal:
        while ordinal in self._skip:
            ordinal += 1
        return ordinal
