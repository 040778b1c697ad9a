"""Decides which finished groups make up the batch of a step. This is the receiving end of the
rollouts channel.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from megarl.base.rollout_types import Ordinal, Version
from megarl.data.order import Mixture
from megarl.messaging.messages import GroupReady

LEDGER_FILE = "ledger.msgpack"


class Ledger(msgspec.Struct, frozen=True):
    """The state of every prompt of a run: trained on, dropped, rested, finished but not yet trained
    on, or none of these.

    Each checkpoint holds the ledger and the weights of the same step. After a resume, the prompts
    that the ledger lacks are generated, some of them again. So the ledger is all that a run must
    save to train on, drop or rest each prompt exactly once.
    """

    consumed_below: Ordinal = 0  # every prompt below this has been trained on, dropped or rested
    # further prompts that have been trained on, dropped or rested
    consumed_beyond: list[Ordinal] = []
    groups: list[GroupReady] = []  # finished, but not yet trained on
    dropped: list[Ordinal] = []  # all dropped prompts of the run
    untold: list[GroupReady] = []  # dropped groups that no batch has reported yet
    rested: list[Ordinal] = []  # all prompts of the run that the curriculum has left out
    # all prompts of the run whose pass rate was outside the curriculum's band
    outside: list[Ordinal] = []
    rejected: list[Ordinal] = []  # finished, found too old, and not yet trained on or dropped
    rested_untold: int = 0  # number of rested prompts that no batch has reported yet

    def trained(self) -> set[Ordinal]:
        """All prompts that have been trained on."""
        return {*range(self.consumed_below), *self.consumed_beyond}.difference(
            self.dropped, self.rested
        )

    def reported_drops(self) -> set[Ordinal]:
        """The dropped prompts that batches have reported."""
        return set(self.dropped).difference(group.ordinal for group in self.untold)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def load(cls, checkpoint: Path | str) -> Ledger:
        """Loads the ledger of a checkpoint folder.

        Raises RuntimeError if it is missing or cannot be read.
        """
        path = Path(checkpoint) / LEDGER_FILE
        try:
            return msgspec.msgpack.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise RuntimeError(f"{path}: no ledger of a run: {error}") from error


class Consumed:
    """The set of ordinals that have been trained on, dropped or rested.

    It takes little memory, since ordinals are added nearly in order.
    """

    def __init__(self, below: Ordinal = 0, beyond: Sequence[Ordinal] = ()):
        self.below = below
        self.beyond = set(beyond)

    def __contains__(self, ordinal: Ordinal) -> bool:
        return ordinal < self.below or ordinal in self.beyond

    def add(self, ordinal: Ordinal) -> None:
        self.beyond.add(ordinal)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1


class RolloutBuffer:
    """The trainer's decisions on prompts: makes batches from finished groups, and rejects groups
    that are too old.

    Never waits: the caller reports which groups began and finished.

    The batch of step s consists of `prompts_per_step` finished groups, chosen when the trainer asks
    for it. Each source contributes as many groups as `mixture` assigns to it among prompts s *
    prompts_per_step to (s + 1) * prompts_per_step - 1. Within a source, the groups with the lowest
    ordinals come first. The age of a group is s minus the oldest weight version among its tokens.

    With `max_staleness` m, a finished group older than m is rejected (`reject`): it is discarded
    and generated again. A group of age m or more is due, finished or not: if it is not used now, it
    will be too old at the next step. Due groups go first, and a batch waits for a due group that is
    still being generated (`take` returns None). So short rollouts cannot keep long ones out of the
    batch, and a rollout is not discarded merely for being long. If more groups of a source are due
    than fit into a batch, the next step rejects the rest.

    If it `masks` old tokens instead (async.too_old), the age of a group is s minus the newest version
    among its tokens: it is rejected only if the loss could use none of them. No batch waits for a
    group that is still being generated, since that one goes on with tokens of newer weights.

    Every batch fills up. While the trainer waits for a batch, its version does not change. Groups
    that begin from then on have age 0, so they are neither rejected nor due. Every group that the
    batch waits for is already being generated. So the batch is full after finitely many rollouts,
    whatever was rejected before.

    A group that the generator has dropped (`GroupReady.dropped`) is done: it is neither in a batch
    nor generated again. `report_dropped` returns it once a prompt with a higher ordinal has been
    trained on, so that each step reports the prompts dropped between its own. Every dropped group
    is reported: the last prompt of a run is never a dropped one, since another prompt would follow
    it.

    Each event takes time for its own group only: a heap keeps the order, and nothing is scanned.
    """

    def __init__(
        self,
        prompts_per_step: int,
        max_staleness: int | None,
        ledger: Ledger = Ledger(),
        judge: Callable[[GroupReady], GroupReady] = lambda group: group,
        mixture: Mixture | None = None,
        masks: bool = False,
    ):
        """`judge`: the rule by which the generator drops groups.

        It is applied again to the ledger's groups, since settings may have changed.
        """
        self._prompts_per_step = prompts_per_step
        self._max_staleness = max_staleness
        self._mixture = mixture or Mixture()
        self._masks = masks
        self._consumed = Consumed(ledger.consumed_below, ledger.consumed_beyond)
        self._running: dict[Ordinal, Version] = {}
        self._running_by_version: dict[Version, set[Ordinal]] = defaultdict(set)
        self._finished: dict[Ordinal, GroupReady] = {}
        self._finished_by_version: dict[Version, set[Ordinal]] = defaultdict(set)
        sources = len(self._mixture.names)
        self._finished_counts = [0] * sources
        # heaps; some ordinals may be removed
        self._order: list[list[Ordinal]] = [[] for _ in range(sources)]
        self._rejected: set[Ordinal] = set()  # ordinals that have not begun again
        # ordinals that have not been trained on or dropped
        self._ever_rejected = set(ledger.rejected)
        self._dropped = list(ledger.dropped)
        self._rested = list(ledger.rested)
        self._outside = list(ledger.outside)
        self._rested_since = ledger.rested_untold  # rested prompts since the last batch
        # heap of dropped groups that no batch has reported
        self._untold = [(group.ordinal, group) for group in ledger.untold]
        heapq.heapify(self._untold)
        self._highest: Ordinal = max(ledger.trained(), default=-1)
        self._dropped_since = 0  # dropped groups since the last batch
        for group in ledger.groups:
            self._take_in(judge(group))

    def begin(self, ordinals: Iterable[Ordinal], version: Version) -> None:
        """Notes that the rollouts of `ordinals` have begun under `version`."""
        for ordinal in ordinals:
            if ordinal in self._consumed or ordinal in self._finished or ordinal in self._running:
                raise RuntimeError(
                    f"prompt {ordinal} was begun a second time; it is {self._state(ordinal)}"
                )
            self._rejected.discard(ordinal)
            self._running[ordinal] = version
            self._running_by_version[version].add(ordinal)

    def finish(self, group: GroupReady) -> None:
        version = self._running.pop(group.ordinal, None)
        if version is None:
            raise RuntimeError(
                f"prompt {group.ordinal} came without having been begun; it is "
                f"{self._state(group.ordinal)}"
            )
        _discard(self._running_by_version, version, group.ordinal)
        # only a prompt's first scores count (data/order.py)
        if group.outside and group.ordinal not in self._ever_rejected:
            self._outside.append(group.ordinal)
        self._take_in(group)

    def rest(self, ordinals: Iterable[Ordinal]) -> None:
        """Notes that the curriculum has left out `ordinals`."""
        for ordinal in ordinals:
            self._consumed.add(ordinal)
            self._rested.append(ordinal)
            self._rested_since += 1

    def take_rested(self) -> int:
        """How many prompts have rested since the last call."""
        rested = self._rested_since
        self._rested_since = 0
        return rested

    def reject(self, step: int) -> list[Ordinal]:
        """Discards the finished groups that are too old for the batch of `step`.

        Returns their ordinals, which must be generated again.
        """
        if self._max_staleness is None:
            return []
        rejected = []
        for version in list(self._finished_by_version):
            if version < step - self._max_staleness:
                rejected += self._finished_by_version.pop(version)
        rejected.sort()
        for ordinal in rejected:
            self._remove(ordinal)
        self._rejected.update(rejected)
        self._ever_rejected.update(rejected)
        return rejected

    def full(self, step: int) -> bool:
        """Whether enough groups have finished for the batch of `step`."""
        quotas = self._quotas(step)
        return all(count >= quota for count, quota in zip(self._finished_counts, quotas))

    def take(self, step: int) -> list[GroupReady] | None:
        """The batch of `step`, sorted by ordinal, or None while it is not complete.

        Call `reject` first.
        """
        if not self.full(step):
            return None
        quotas = self._quotas(step)
        due = self._due(self._finished_by_version, step)
        due_in_flight = self._due({} if self._masks else self._running_by_version, step)
        for source, quota in enumerate(quotas):
            if due_in_flight[source] and len(due[source]) < quota:
                return None
        batch_ordinals: set[Ordinal] = set()
        for source, quota in enumerate(quotas):
            source_ordinals = set(heapq.nsmallest(quota, due[source]))
            while len(source_ordinals) < quota:
                ordinal = heapq.heappop(self._order[source])
                if ordinal in self._finished:
                    source_ordinals.add(ordinal)
            batch_ordinals |= source_ordinals
        self._highest = max(self._highest, *batch_ordinals)
        self._dropped_since = 0
        return list(map(self._consume, sorted(batch_ordinals)))

    def report_dropped(self) -> list[GroupReady]:
        """The dropped groups with ordinals below the highest prompt that was trained on, sorted by
        ordinal. Returns each group once.
        """
        groups = []
        while self._untold and self._untold[0][0] < self._highest:
            groups.append(heapq.heappop(self._untold)[1])
        return groups

    def give_up(self, step: int, most: int | None) -> list[GroupReady]:
        """If at least `most` prompts were generated for the batch of `step` and did not fill it,
        the dropped groups that no batch has reported; otherwise none.
        """
        generated = len(self._finished) + self._dropped_since
        if most is None or not self._dropped_since or self.full(step) or generated < most:
            return []
        return [group for _, group in sorted(self._untold)]

    def ledger(self) -> Ledger:
        """The ledger for a checkpoint taken now."""
        return Ledger(
            consumed_below=self._consumed.below,
            consumed_beyond=sorted(self._consumed.beyond),
            groups=list(map(_without_times, self._finished.values())),
            dropped=sorted(self._dropped),
            untold=[_without_times(group) for _, group in self._untold],
            rested=sorted(self._rested),
            outside=sorted(self._outside),
            rejected=sorted(self._ever_rejected),
            rested_untold=self._rested_since,
        )

    @property
    def finished(self) -> int:
        return len(self._finished)

    def __str__(self) -> str:
        parts = [
            f"{len(self._finished)} of {self._prompts_per_step} groups finished",
            f"{len(self._running)} in flight",
        ]
        if self._dropped_since:
            parts[0] += f", and {self._dropped_since} dropped"
        if self._running:
            ordinal = min(self._running, key=lambda ordinal: (self._running[ordinal], ordinal))
            parts[1] += (
                f", the oldest being prompt {ordinal}, begun under version {self._running[ordinal]}"
            )
        if self._rejected:
            parts.append(f"{len(self._rejected)} rejected and not begun again")
        return "; ".join(parts)

    def _quotas(self, step: int) -> list[int]:
        """How many groups of each source the batch of `step` has."""
        return self._mixture.counts(
            step * self._prompts_per_step, (step + 1) * self._prompts_per_step
        )

    def _due(self, by_version: dict[Version, set[Ordinal]], step: int) -> list[list[Ordinal]]:
        """[source][…] the ordinals that would be too old for the step after `step`."""
        due_ordinals: list[list[Ordinal]] = [[] for _ in self._mixture.names]
        if self._max_staleness is None:
            return due_ordinals
        for version, ordinals in by_version.items():
            if version <= step - self._max_staleness:
                for ordinal in ordinals:
                    due_ordinals[self._mixture.source(ordinal)].append(ordinal)
        return due_ordinals

    def _take_in(self, group: GroupReady) -> None:
        if group.dropped:
            self._consumed.add(group.ordinal)
            self._ever_rejected.discard(group.ordinal)
            self._dropped.append(group.ordinal)
            self._dropped_since += 1
            heapq.heappush(self._untold, (group.ordinal, group))
            return
        source = self._mixture.source(group.ordinal)
        self._finished[group.ordinal] = group
        self._finished_counts[source] += 1
        self._finished_by_version[self._version(group)].add(group.ordinal)
        heapq.heappush(self._order[source], group.ordinal)

    def _version(self, group: GroupReady) -> Version:
        """The version from which its age counts."""
        return group.newest if self._masks else group.oldest

    def _consume(self, ordinal: Ordinal) -> GroupReady:
        group = self._remove(ordinal)
        _discard(self._finished_by_version, self._version(group), ordinal)
        self._consumed.add(ordinal)
        self._ever_rejected.discard(ordinal)
        return group

    def _remove(self, ordinal: Ordinal) -> GroupReady:
        self._finished_counts[self._mixture.source(ordinal)] -= 1
        return self._finished.pop(ordinal)

    def _state(self, ordinal: Ordinal) -> str:
        states = {
            "dropped": self._dropped,
            "left out to rest": self._rested,
            "trained on": self._consumed,
            "finished": self._finished,
            "in flight": self._running,
            "rejected": self._rejected,
        }
        for state, ordinals in states.items():
            if ordinal in ordinals:
                return state
        return "unknown"


def _without_times(group: GroupReady) -> GroupReady:
    return msgspec.structs.replace(
        group, started_s=0.0, ended_s=0.0, idle_s=0.0, scoring_s=(0.0, 0.0)
    )


def _discard(by_version: dict[Version, set[Ordinal]], version: Version, ordinal: Ordinal) -> None:
    """Removes `ordinal`, and also its version if no ordinal is left there.

    A run has many versions.
    """
    by_version[version].discard(ordinal)
    if not by_version[version]:
        del by_version[version]
