"""Decides which finished groups make up the batch of a step: the receiving end of the rollouts channel."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec

from megarl.messaging.messages import GroupReady
from megarl.rollouts.ledger import Consumed, Ledger
from megarl.types import Ordinal, Version


class RolloutBuffer:
    """Pure logic: nothing waits here. It is told which groups have begun and finished; it makes batches and rejects groups.

    The batch of step s consists of `prompts_per_step` finished groups, chosen when the trainer asks for it: those of the lowest ordinals.
    The age of a group is then s minus the oldest weight version among its tokens.

    With `max_staleness` m, a finished group older than m is rejected (`reject`): it is dropped and generated again. A group of age m or
    more, finished or not, is due: if it is not used now, it will be too old at the next step. Due groups go first, and a batch waits for a
    due group that is still being generated (`take` returns None). So long rollouts are neither starved by short ones nor thrown away for
    their length. If more groups are due than fit into a batch, the rest is rejected at the next step.

    Progress: while the trainer waits for a batch its version does not change. Groups that begin from then on have age 0, are neither
    rejected nor due, and every group that is waited for is already being generated. So a batch is full after finitely many rollouts,
    whatever was rejected before.

    A group that the generator has dropped (`GroupReady.dropped`) is done: it is neither in a batch nor generated again. `report_dropped`
    gives it out once a prompt beyond it has been trained on, so that each step reports the prompts dropped between its own. (None stays
    unreported, since the last prompt of a run is not dropped: another would follow it.)

    Time: each event costs one look at its group, and a heap keeps the order; nothing is scanned.
    """

    def __init__(
        self,
        prompts_per_step: int,
        max_staleness: int | None,
        ledger: Ledger = Ledger(),
        judge: Callable[[GroupReady], GroupReady] = lambda group: group,
    ):
        """`judge`: what the generator judges by, for the groups in the ledger, of which earlier settings may have held another opinion."""
        self._prompts_per_step, self._max_staleness = prompts_per_step, max_staleness
        self._consumed = Consumed(ledger.consumed_below, ledger.consumed_beyond)
        self._running: dict[Ordinal, Version] = {}
        self._running_by_version: dict[Version, set[Ordinal]] = defaultdict(set)
        self._finished: dict[Ordinal, GroupReady] = {}
        self._finished_by_version: dict[Version, set[Ordinal]] = defaultdict(set)
        self._order: list[Ordinal] = []  # heap of finished ordinals; may hold some that were removed since
        self._rejected: set[Ordinal] = set()  # until they begin again
        self._dropped = list(ledger.dropped)
        self._untold = [(group.ordinal, group) for group in ledger.untold]  # heap
        heapq.heapify(self._untold)
        self._highest: Ordinal = max(ledger.trained(), default=-1)
        self._dropped_since = 0  # the last batch
        for group in ledger.groups:
            self._take_in(judge(group))

    def begin(self, ordinals: Iterable[Ordinal], version: Version) -> None:
        """Notes that the rollouts of `ordinals` have begun under `version`."""
        for ordinal in ordinals:
            if ordinal in self._consumed or ordinal in self._finished or ordinal in self._running:
                raise RuntimeError(f"prompt {ordinal} was begun a second time; it is {self._state(ordinal)}")
            self._rejected.discard(ordinal)
            self._running[ordinal] = version
            self._running_by_version[version].add(ordinal)

    def finish(self, group: GroupReady) -> None:
        version = self._running.pop(group.ordinal, None)
        if version is None:
            raise RuntimeError(f"prompt {group.ordinal} came without having been begun; it is {self._state(group.ordinal)}")
        _discard(self._running_by_version, version, group.ordinal)
        self._take_in(group)

    def reject(self, step: int) -> list[Ordinal]:
        """Drops the finished groups that are too old for the batch of `step`. Returns their ordinals, to be generated again."""
        if self._max_staleness is None:
            return []
        stale = [version for version in self._finished_by_version if version < step - self._max_staleness]
        rejected = sorted(ordinal for version in stale for ordinal in self._finished_by_version.pop(version))
        for ordinal in rejected:
            del self._finished[ordinal]
        self._rejected.update(rejected)
        return rejected

    def full(self) -> bool:
        """Whether enough groups have finished for a batch."""
        return len(self._finished) >= self._prompts_per_step

    def take(self, step: int) -> list[GroupReady] | None:
        """The batch of `step`, sorted by ordinal; None while it must wait. Call `reject` first."""
        due = self._due(self._finished_by_version, step)
        if not self.full() or (sum(map(len, due)) < self._prompts_per_step and self._due(self._running_by_version, step)):
            return None
        chosen = set(heapq.nsmallest(self._prompts_per_step, itertools.chain(*due)))
        while len(chosen) < self._prompts_per_step:
            ordinal = heapq.heappop(self._order)
            if ordinal in self._finished:
                chosen.add(ordinal)
        self._highest, self._dropped_since = max(self._highest, *chosen), 0
        return [self._consume(ordinal) for ordinal in sorted(chosen)]

    def report_dropped(self) -> list[GroupReady]:
        """The dropped groups below the highest prompt that was trained on, each once, sorted by ordinal."""
        found = []
        while self._untold and self._untold[0][0] < self._highest:
            found.append(heapq.heappop(self._untold)[1])
        return found

    def give_up(self, most: int | None) -> list[GroupReady]:
        """The dropped groups that no batch has reported, if at least `most` prompts were generated for the next batch and are not enough
        for it; otherwise none."""
        generated = len(self._finished) + self._dropped_since
        if most is None or not self._dropped_since or self.full() or generated < most:
            return []
        return [group for _, group in sorted(self._untold)]

    def ledger(self) -> Ledger:
        """The ledger for a checkpoint taken now."""
        groups, untold = (
            [msgspec.structs.replace(group, started_s=0.0, ended_s=0.0, idle_s=0.0) for group in some]
            for some in (self._finished.values(), (group for _, group in self._untold))
        )
        return Ledger(self._consumed.below, sorted(self._consumed.beyond), groups, sorted(self._dropped), untold)

    @property
    def finished(self) -> int:
        return len(self._finished)

    def __str__(self) -> str:
        parts = [f"{len(self._finished)} of {self._prompts_per_step} groups finished", f"{len(self._running)} in flight"]
        if self._dropped_since:
            parts[0] += f", and {self._dropped_since} dropped"
        if self._running:
            ordinal = min(self._running, key=lambda ordinal: (self._running[ordinal], ordinal))
            parts[1] += f", the oldest being prompt {ordinal}, begun under version {self._running[ordinal]}"
        if self._rejected:
            parts.append(f"{len(self._rejected)} rejected and not begun again")
        return "; ".join(parts)

    def _due(self, by_version: dict[Version, set[Ordinal]], step: int) -> list[set[Ordinal]]:
        """The ordinals that would be too old for the step after `step`."""
        if self._max_staleness is None:
            return []
        return [ordinals for version, ordinals in by_version.items() if version <= step - self._max_staleness]

    def _take_in(self, group: GroupReady) -> None:
        if group.dropped:
            self._consumed.add(group.ordinal)
            self._dropped.append(group.ordinal)
            self._dropped_since += 1
            heapq.heappush(self._untold, (group.ordinal, group))
            return
        self._finished[group.ordinal] = group
        self._finished_by_version[group.oldest].add(group.ordinal)
        heapq.heappush(self._order, group.ordinal)

    def _consume(self, ordinal: Ordinal) -> GroupReady:
        group = self._finished.pop(ordinal)
        _discard(self._finished_by_version, group.oldest, ordinal)
        self._consumed.add(ordinal)
        return group

    def _state(self, ordinal: Ordinal) -> str:
        done = "dropped" if ordinal in self._dropped else "trained on"
        states = {done: self._consumed, "finished": self._finished, "in flight": self._running, "rejected": self._rejected}
        return next((state for state, ordinals in states.items() if ordinal in ordinals), "unknown")


def _discard(by_version: dict[Version, set[Ordinal]], version: Version, ordinal: Ordinal) -> None:
    """Removes an ordinal, and its version when that has none left: a run has many versions."""
    by_version[version].discard(ordinal)
    if not by_version[version]:
        del by_version[version]
