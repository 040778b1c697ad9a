"""The rollout stream keeps rollouts in flight, and sends each group as soon as it is finished."""

from __future__ import annotations

import heapq
import time
from collections.abc import Awaitable, Callable, Collection, Iterable

from megarl.base.rollout_types import Group, Ordinal, Version
from megarl.data.order import Curriculum, Mixture, Verdict
from megarl.messaging.messages import GroupReady
from megarl.messaging.waiting import Background, Pulse
from megarl.rollouts.channel import RolloutsSender, pack
from megarl.rollouts.idle import FurtherSamples


class Admission:
    """The generator's decisions on prompts: which begins next, and when, and which rests. It never
    waits.

    This is the sending end of the rollouts channel. The prompts of each source begin in the order
    of their ordinals, rejected ones first.

    Depth bound: a run has one place for each prompt that it trains on, and `mixture` assigns each
    place to a source. With c = `run_ahead`, place j (j = 0, 1, …) may be taken under weights of
    version v if j < (v + c + 1) * prompts_per_step. So the prompts of step s begin under version s
    - c or newer: c = 0 is the synchronous loop, 1 is LlamaRL's one step behind, K a bounded queue.
    A dropped prompt leaves its place to the next prompt of its source, which may begin at once. So
    does a prompt that `curriculum` rests before it has begun. The run has `end` places, however
    many prompts it takes to fill them.
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
        self._prompts_per_step = prompts_per_step
        self._run_ahead = run_ahead
        self._end = end
        self.max_in_flight = max_in_flight  # it may change at any time
        self._mixture = mixture or Mixture()
        self._curriculum = curriculum
        sources = len(self._mixture.names)
        # [source] heaps of prompts to generate again
        self._again: list[list[Ordinal]] = [[] for _ in range(sources)]
        self._draws = [0] * sources  # [source] its next prompt
        self._places_taken = [0] * sources  # [source] places that it has taken
        self._skip: Collection[Ordinal] = ()
        self._rested: list[Ordinal] = []
        self._in_flight = [0] * sources

    def generate_from(
        self,
        first: Ordinal,
        skip: Iterable[Ordinal],
        dropped: Collection[Ordinal] = (),
        outside: Iterable[Ordinal] = (),
        scored: Iterable[Ordinal] = (),
    ) -> None:
        """Generates every ordinal from `first` on, except those in `skip`, until the run has all
        prompts that it trains on. `dropped`: the ordinals in `skip` or below `first` that were
        dropped or have rested. `outside`, `scored`: see `Curriculum.resume`.
        """
        if self._curriculum:
            self._curriculum.resume(outside, frozenset(scored))
        self._skip = frozenset(skip)
        self._draws = self._mixture.counts(0, first)
        self._places_taken = list(self._draws)
        for ordinals, places in ((self._skip, 1), (dropped, -1)):
            for ordinal in ordinals:
                self._places_taken[self._mixture.source(ordinal)] += places

    @property
    def in_flight(self) -> int:
        return sum(self._in_flight)

    @property
    def begun(self) -> int:
        """How many prompts have begun, without rejected and dropped ones."""
        return sum(self._places_taken)

    @property
    def exhausted(self) -> bool:
        """Whether every prompt of the run has begun."""
        return self._place() >= self._end

    @property
    def empty_share(self) -> float:
        """The share of the places in flight that are empty."""
        return max(0.0, 1 - self.in_flight / self.max_in_flight)

    def held_back(self, version: Version) -> bool:
        """Whether prompts are left to begin, but need weights newer than `version`."""
        return not self.exhausted and not self._deep_enough(version)

    def is_idle(self, version: Version) -> bool:
        """Whether places stay empty until newer weights come, and the trainer has the groups for
        the batch that makes these weights.
        """
        if not self.held_back(version):
            return False
        needed = self._mixture.counts(0, (version + 1) * self._prompts_per_step)
        for places, in_flight, count in zip(self._places_taken, self._in_flight, needed):
            if places - in_flight < count:
                return False
        return True

    def begin(self, version: Version) -> list[Ordinal]:
        """Returns the prompts that may begin now, under weights `version`, and counts them as
        begun.
        """
        ordinals = []
        while (
            self.in_flight < self.max_in_flight
            and not self.exhausted
            and self._deep_enough(version)
        ):
            source = self._mixture.source(self._place())
            ordinal = self._pop(source)
            if ordinal is None:
                break
            ordinals.append(ordinal)
            self._places_taken[source] += 1
            self._in_flight[source] += 1
        return ordinals

    def take_rested(self) -> list[Ordinal]:
        """The prompts that the curriculum has rested before they began. Returns each once."""
        rested = self._rested
        self._rested = []
        return rested

    def finish(self, ordinal: Ordinal, outside: bool = False, dropped: bool = False) -> None:
        """A prompt has finished. If it was `dropped`, another one will replace it. `outside`:
        whether its pass rate was outside the curriculum's band.
        """
        source = self._mixture.source(ordinal)
        self._in_flight[source] -= 1
        if self._curriculum:
            self._curriculum.finish(ordinal, outside)
        if dropped:
            self._places_taken[source] -= 1

    def again(self, ordinals: Iterable[Ordinal]) -> None:
        """Queues prompts to be generated again, since their groups were too old."""
        for ordinal in ordinals:
            source = self._mixture.source(ordinal)
            heapq.heappush(self._again[source], ordinal)
            self._places_taken[source] -= 1

    def _place(self) -> Ordinal:
        """The first place that no prompt has taken."""
        next_ordinals = []
        for source, places in enumerate(self._places_taken):
            next_ordinals.append(self._mixture.ordinal(source, places))
        return min(next_ordinals)

    def _deep_enough(self, version: Version) -> bool:
        if version < 0:  # the engines do not have weights of the run yet
            return False
        return (
            self._run_ahead is None
            or self._place() < (version + self._run_ahead + 1) * self._prompts_per_step
        )

    def _pop(self, source: int) -> Ordinal | None:
        """The source's next prompt.

        None while its row is still being generated for an earlier epoch, which decides whether it
        rests.
        """
        if self._again[source]:
            return heapq.heappop(self._again[source])
        while True:
            ordinal = self._mixture.ordinal(source, self._draws[source])
            if ordinal not in self._skip:
                verdict = self._curriculum.begin(ordinal) if self._curriculum else Verdict.BEGINS
                if verdict is Verdict.WAITS:
                    return None
                if verdict is Verdict.BEGINS:
                    self._draws[source] += 1
                    return ordinal
                self._rested.append(ordinal)
            self._draws[source] += 1


class RolloutStream:
    """Begins a prompt whenever `admission` allows it, under the weights that the engines serve
    then.

    It waits for a free place in flight, and for weights that are new enough (`put_version`). It
    sends groups in the order in which they finish; `sent` counts them. Further prompts replace
    those that `judge` drops. Idle time is the integral of the share of idle places. A place in
    flight is idle while it needs newer weights to begin a prompt, or while an update keeps prompts
    from beginning or engines from running.
    """

    def __init__(
        self,
        admission: Admission,
        roll_out: Callable[[Ordinal], Awaitable[Group]],
        channel: RolloutsSender,
        background: Background,
        pulse: Pulse,
        judge: Callable[[GroupReady], GroupReady] = lambda group: group,
        scoring_s: Callable[[], float] = lambda: 0.0,
        now_s: Callable[[], float] = time.monotonic,
        further: FurtherSamples | None = None,
        max_staleness: int | None = None,
    ):
        """`scoring_s` returns how long rollouts have waited for scores so far (ScoringClock).
        `further`: samples more responses to a prompt while places would be idle, unless the trainer
        waits for the prompt because of `max_staleness` (RolloutBuffer).
        """
        self.admission = admission
        self._roll_out = roll_out
        self._channel = channel
        self._judge = judge
        self._background = background
        self._pulse = pulse
        self._scoring_s = scoring_s
        self._now_s = now_s
        self._further = further
        self._max_staleness = max_staleness
        self.version: Version = -1
        self.sent = 0
        self._idle_s = 0.0
        self._idle_share = 0.0
        self._idle_since = now_s()
        self._draining = False
        self._still = False

    async def run(self, timeout_s: float) -> None:
        """Runs until its task is cancelled. `timeout_s` bounds the wait for the ledger."""
        start = await self._channel.first(timeout_s)
        self.admission.generate_from(
            start.first, start.skip, start.dropped, start.outside, start.scored
        )
        self._background.start(self._take_back(), "rejected groups")
        while True:
            self._begin()
            self._note_idleness()
            state = self._state()
            await self._pulse.until(lambda: self._state() != state)

    def put_version(self, version: Version) -> None:
        """To be called when the engines begin to serve `version`."""
        self.version = version
        self._draining = False
        self._still = False
        self._pulse.beat()

    def put_places(self, max_in_flight: int) -> None:
        """Sets how many prompts may be in flight from now on."""
        self.admission.max_in_flight = max_in_flight
        self._pulse.beat()

    async def drain(self) -> None:
        """Begins no prompts until `put_version`. Returns when nothing is in flight."""
        self._draining = True
        self._pulse.beat()
        await self._pulse.until(lambda: self.admission.in_flight == 0)

    def stand_still(self) -> None:
        """To be called when the engines are paused.

        They count as paused until the next `put_version`.
        """
        self._still = True
        self._pulse.beat()

    @property
    def finished(self) -> int:
        """How many prompts of the run have finished.

        Includes those before a resume, excludes rejected and dropped ones.
        """
        return self.admission.begun - self.admission.in_flight

    @property
    def held_back(self) -> bool:
        """Whether nothing is in flight, and prompts can begin only under newer weights."""
        return self.admission.in_flight == 0 and self.admission.held_back(self.version)

    def __str__(self) -> str:
        reason = ", held back until the trainer sends newer weights" if self.held_back else ""
        return (
            f"{self.sent} groups sent, {self.admission.in_flight} in flight, under version "
            f"{self.version}{reason}"
        )

    def _begin(self) -> None:
        ordinals = [] if self._draining else self.admission.begin(self.version)
        rested = self.admission.take_rested()
        if rested:
            self._channel.rested(rested)
        if ordinals:
            self._channel.begun(ordinals, self.version)
        for ordinal in ordinals:
            self._background.start(self._one(ordinal), f"rollout of prompt {ordinal}")

    async def _one(self, ordinal: Ordinal) -> None:
        version = self.version
        started = self._now_s()
        scoring_s = self._scoring_s()
        group = await self._roll_out(ordinal)
        ended = self._now_s()
        scoring = scoring_s, self._scoring_s()
        if self._further is not None and not self._is_due(version):
            version_now = self.version
            group = await self._further(group, lambda: self._is_idle(version_now), self._pulse)
        ready = self._judge(pack(group, version, started, ended, self._idle_s, scoring))
        self._channel.finished(ready)
        self.admission.finish(ordinal, ready.outside, ready.dropped)
        self.sent += 1
        self._pulse.beat()

    def _is_idle(self, version: Version) -> bool:
        """Whether places have been idle under `version`, and no update of it has begun."""
        is_updated = self._draining or self._still or version != self.version
        return not is_updated and self.admission.is_idle(version)

    def _is_due(self, begun: Version) -> bool:
        """Whether the trainer's next batch waits for a prompt that began under version `begun`."""
        return self._max_staleness is not None and begun <= self.version - self._max_staleness

    async def _take_back(self) -> None:
        while True:
            self.admission.again(await self._channel.rejected())
            self._pulse.beat()

    def _state(self) -> tuple[int, ...]:
        """Everything that decides whether a prompt may begin and how many places are idle."""
        return (
            self.admission.in_flight,
            self.admission.begun,
            self.admission.max_in_flight,
            self.version,
            self._draining,
            self._still,
        )

    def _note_idleness(self) -> None:
        now = self._now_s()
        self._idle_s += self._idle_share * (now - self._idle_since)
        self._idle_share = self._share_idle()
        self._idle_since = now

    def _share_idle(self) -> float:
        """The share of the places in flight that wait for weights."""
        if self._still:
            return 1.0
        drains = self._draining and not self.admission.exhausted
        if drains or self.admission.held_back(self.version):
            return self.admission.empty_share
        return 0.0
