"""The rollout stream keeps rollouts in flight, and sends each group as soon as it has finished."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from megarl.messaging.background import Background
from megarl.messaging.messages import GroupReady
from megarl.messaging.pulse import Pulse
from megarl.rollouts.admission import Admission
from megarl.rollouts.channel import RolloutsSender
from megarl.rollouts.packing import pack
from megarl.types import Group, Ordinal, Version


class RolloutStream:
    """Begins a prompt whenever `admission` allows it, under the weights that the engines serve then.

    It waits for a free place in flight, and for weights that are new enough (`put_version`). It sends groups in the order in which they
    finish; `sent` counts them. Those that `judge` drops are replaced by further prompts. Idle time is measured by place: a place in flight
    is idle while a prompt could begin there only under newer weights, or while an update keeps prompts from beginning or engines from
    running. It counts by its share of all places.
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
    ):
        """`scoring_s`: how long rollouts have waited for scores by now (see ScoringClock)."""
        self.admission, self._roll_out, self._channel, self._judge = admission, roll_out, channel, judge
        self._background, self._pulse, self._scoring_s = background, pulse, scoring_s
        self.version: Version = -1
        self.sent = 0
        self._idle_s = 0.0
        self._idle_share, self._idle_since = 0.0, time.monotonic()
        self._held = self._still = False

    async def run(self, timeout_s: float) -> None:
        """Runs until its task is cancelled. `timeout_s` bounds the wait for the ledger."""
        start = await self._channel.first(timeout_s)
        self.admission.generate_from(start.first, start.skip, start.dropped)
        if self.admission.curriculum:
            self.admission.curriculum.resume(start.outside, frozenset(start.scored))
        self._background.start(self._take_back(), "rejected groups")
        while True:
            self._begin()
            self._note_idleness()
            seen = self._state()
            await self._pulse.until(lambda: self._state() != seen)

    def put_version(self, version: Version) -> None:
        """Called when the engines serve `version` from now on."""
        self.version, self._held, self._still = version, False, False
        self._pulse.beat()

    def put_places(self, max_in_flight: int) -> None:
        """Called when so many prompts may be in flight from now on."""
        self.admission.max_in_flight = max_in_flight
        self._pulse.beat()

    async def drain(self) -> None:
        """Begins no prompts until `put_version`. Returns when nothing is in flight."""
        self._held = True
        self._pulse.beat()
        await self._pulse.until(lambda: self.admission.in_flight == 0)

    def stand_still(self) -> None:
        """Called when the engines are paused, until the next `put_version`."""
        self._still = True
        self._pulse.beat()

    @property
    def finished(self) -> int:
        """How many prompts of the run have finished, including those before a resume, but not rejected and dropped ones."""
        return self.admission.begun - self.admission.in_flight

    @property
    def held_back(self) -> bool:
        """Whether nothing is in flight, and prompts can begin only under newer weights."""
        return self.admission.in_flight == 0 and self.admission.held_back(self.version)

    def __str__(self) -> str:
        why = ", held back until the trainer sends newer weights" if self.held_back else ""
        return f"{self.sent} groups sent, {self.admission.in_flight} in flight, under version {self.version}{why}"

    def _begin(self) -> None:
        ordinals = [] if self._held else self.admission.begin(self.version)
        if rested := self.admission.take_rested():
            self._channel.rested(rested)
        if ordinals:
            self._channel.begun(ordinals, self.version)
        for ordinal in ordinals:
            self._background.start(self._one(ordinal), f"rollout of prompt {ordinal}")

    async def _one(self, ordinal: Ordinal) -> None:
        version, started, scoring_s = self.version, time.monotonic(), self._scoring_s()
        group = await self._roll_out(ordinal)
        ended = time.monotonic()
        ready = self._judge(pack(group, version, started, ended, self._idle_s, (scoring_s, self._scoring_s())))
        self._channel.finished(ready)
        if self.admission.curriculum:
            self.admission.curriculum.finish(ordinal, ready.outside)
        if ready.dropped:
            self.admission.drop(ordinal)
        else:
            self.admission.finish()
        self.sent += 1
        self._pulse.beat()

    async def _take_back(self) -> None:
        while True:
            self.admission.again(await self._channel.rejected())
            self._pulse.beat()

    def _state(self) -> tuple[int, ...]:
        """The state that decides whether a prompt may begin, and how many places are idle."""
        return self.admission.in_flight, self.admission.begun, self.admission.max_in_flight, self.version, self._held, self._still

    def _note_idleness(self) -> None:
        now = time.monotonic()
        self._idle_s += self._idle_share * (now - self._idle_since)
        self._idle_share, self._idle_since = self._share_idle(), now

    def _share_idle(self) -> float:
        """The share of places in flight that wait for weights."""
        if self._still:
            return 1.0
        waits = (self._held and not self.admission.exhausted) or self.admission.held_back(self.version)
        return self.admission.empty_share if waits else 0.0
