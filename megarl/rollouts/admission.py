"""Decides which prompt begins next, and when: the sending end of the rollouts channel."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from megarl.data.curriculum import Curriculum, Verdict
from megarl.data.mixture import Mixture
from megarl.types import Ordinal, Version


class Admission:
    """Pure logic: nothing waits here. Each source's prompts begin in the order of their ordinals, rejected ones first.

    Depth bound: a run has a place for each prompt that it trains on, and `mixture` says whose source's. With c = `run_ahead`, place j
    (j = 0, 1, …) may be taken under weights of version v if j < (v + c + 1) * prompts_per_step. So the prompts of step s begin under
    version s - c or newer: c = 0 is the synchronous loop, 1 is LlamaRL's one step behind, K a bounded queue. A dropped prompt gives its
    place to the next one of its source, which may begin at once; so does one that `curriculum` has rest, without having begun. The run has
    `end` places, however many prompts that takes.
    """

    def __init__(
        self,
        prompts_per_step: int,
        run_ahead: int | None,
        max_in_flight: int,
        end: Ordinal,
        mixture: Mixture | None = None,
        curriculum: Curriculum | None = None,
    ):
        self._prompts_per_step, self._run_ahead, self._end = prompts_per_step, run_ahead, end
        self.max_in_flight = max_in_flight  # it may change at any time
        self._mixture, self.curriculum = mixture or Mixture(), curriculum
        sources = len(self._mixture.names)
        self._again: list[list[Ordinal]] = [[] for _ in range(sources)]  # heaps
        self._draws = [0] * sources  # the next one of each source
        self._taken = [0] * sources  # places of each source
        self._skip: Collection[Ordinal] = ()
        self._rested: list[Ordinal] = []
        self.in_flight = 0

    def generate_from(self, first: Ordinal, skip: Iterable[Ordinal], dropped: Collection[Ordinal] = ()) -> None:
        """Generates every ordinal from `first` on, except those in `skip`, until the run has as many as it trains on. `dropped`: which of
        the others were dropped, or have rested."""
        self._skip = frozenset(skip)
        self._draws = self._mixture.counts(0, first)
        self._taken = list(self._draws)
        for ordinals, places in ((self._skip, 1), (dropped, -1)):
            for ordinal in ordinals:
                self._taken[self._mixture.source(ordinal)] += places

    @property
    def begun(self) -> int:
        """Prompts that have begun, not counting rejected and dropped ones."""
        return sum(self._taken)

    @property
    def exhausted(self) -> bool:
        """Whether every prompt of the run has begun."""
        return self._place() >= self._end

    @property
    def empty_share(self) -> float:
        """The share of places in flight that are empty."""
        return max(0.0, 1 - self.in_flight / self.max_in_flight)

    def held_back(self, version: Version) -> bool:
        """Whether a prompt is left to begin, but needs newer weights."""
        return not self.exhausted and not self._deep_enough(version)

    def begin(self, version: Version) -> list[Ordinal]:
        """Returns the prompts that may begin now, under weights `version`, and counts them as begun."""
        begun = []
        while self.in_flight < self.max_in_flight and not self.exhausted and self._deep_enough(version):
            source = self._mixture.source(self._place())
            ordinal = self._pop(source)
            if ordinal is None:
                break
            begun.append(ordinal)
            self._taken[source] += 1
            self.in_flight += 1
        return begun

    def take_rested(self) -> list[Ordinal]:
        """The prompts that have not begun, since they rest; each is given out once."""
        rested, self._rested = self._rested, []
        return rested

    def finish(self) -> None:
        self.in_flight -= 1

    def drop(self, ordinal: Ordinal) -> None:
        """A prompt has finished, but is not trained on: another is to replace it."""
        self.in_flight -= 1
        self._taken[self._mixture.source(ordinal)] -= 1

    def again(self, ordinals: Iterable[Ordinal]) -> None:
        """Queues prompts to be generated again, because they finished too late."""
        for ordinal in ordinals:
            source = self._mixture.source(ordinal)
            heapq.heappush(self._again[source], ordinal)
            self._taken[source] -= 1

    def _place(self) -> Ordinal:
        """The first place that no prompt has taken."""
        return min(self._mixture.ordinal(source, taken) for source, taken in enumerate(self._taken))

    def _deep_enough(self, version: Version) -> bool:
        if version < 0:  # the engines have no weights of the run yet
            return False
        return self._run_ahead is None or self._place() < (version + self._run_ahead + 1) * self._prompts_per_step

    def _pop(self, source: int) -> Ordinal | None:
        """The source's next prompt; None if its row is still being generated for an earlier epoch, on which it depends whether it rests."""
        if self._again[source]:
            return heapq.heappop(self._again[source])
        while True:
            ordinal = self._mixture.ordinal(source, self._draws[source])
            if ordinal not in self._skip:
                verdict = self.curriculum.begin(ordinal) if self.curriculum else Verdict.BEGINS
                if verdict is Verdict.WAITS:
                    return None
                if verdict is Verdict.BEGINS:
                    self._draws[source] += 1
                    return ordinal
                self._rested.append(ordinal)
            self._draws[source] += 1
