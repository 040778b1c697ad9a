"""Runs without engines, for tests of the rules that begin prompts and make batches.

Rollouts take random times.
"""

from __future__ import annotations

import heapq
import random

import msgspec

from megarl.config.schema import AsyncConfig
from megarl.data.order import Curriculum, Mixture
from megarl.data.prompts import Sources
from megarl.messaging.messages import GroupReady
from megarl.plan.topologies import run_ahead
from megarl.rollouts.buffer import Ledger, RolloutBuffer
from megarl.rollouts.stream import Admission


def ready(
    ordinal: int, oldest: int = 0, dropped: bool = False, outside: bool = False
) -> GroupReady:
    return GroupReady(
        ordinal,
        oldest,
        0.0,
        0.0,
        0.0,
        msgspec.Raw(b"\xc0"),
        msgspec.Raw(b"\xc0"),
        [],
        dropped,
        outside,
    )


class Simulation:
    """A run without engines: rollouts take random times, and the trainer trains.

    Both ends follow the real rules. Tests kill and resume it.

    If `mixed`, a rollout continues through an update, with tokens of older weights (in flight);
    otherwise an update waits for running rollouts (block). An `eager` generator also begins prompts
    that are bound to be rejected. A finished group is dropped with the probability `dropping`. Its
    prompt is from one of the sources of `mixture`. If these have `rows`, it is outside the
    curriculum's band with the probability `outside`.
    """

    def __init__(
        self,
        *,
        seed,
        per_step,
        capacity,
        max_staleness,
        in_flight,
        steps,
        mixed=True,
        eager=False,
        dropping=0.0,
        mixture=Mixture(),
        rows=None,
        rest_epochs=1,
        outside=0.5,
    ):
        self.random = random.Random(seed)
        self.dropping = dropping
        self.mixture = mixture
        self.outside = outside
        self.rest_epochs = rest_epochs
        self.sources = (
            Sources([range(count) for count in rows], "order", True, mixture) if rows else None
        )
        self.per_step = per_step
        self.max_staleness = max_staleness
        self.in_flight = in_flight
        self.steps = steps
        self.mixed = mixed
        self.capacity = (
            capacity
            if eager
            else run_ahead(AsyncConfig(capacity=capacity, max_staleness=max_staleness))
        )
        self.trained = []
        self.dropped = []
        self.rested = []
        self.ages = []
        self.rejected = 0
        self.start(Ledger(), 0)

    def start(self, ledger: Ledger, step: int) -> None:
        self.now = 0.0
        self.step = step
        self.running = []
        self.trained = self.trained[:step]
        self.dropped = self.dropped[:step]
        self.rested = self.rested[:step]
        curriculum = Curriculum(self.sources.place, self.rest_epochs) if self.sources else None
        self.buffer = RolloutBuffer(self.per_step, self.max_staleness, ledger, mixture=self.mixture)
        end = self.per_step * self.steps
        self.admission = Admission(
            self.per_step, self.capacity, self.in_flight, end, self.mixture, curriculum
        )
        finished = sorted([*ledger.consumed_beyond, *(g.ordinal for g in ledger.groups)])
        unused = [*ledger.dropped, *ledger.rested]
        self.admission.generate_from(
            ledger.consumed_below, finished, unused, ledger.outside, ledger.rejected
        )
        self.saved = (ledger, step)

    def run(self, kill_at: int | None = None) -> None:
        """Runs `kill_at` steps, or all. Every wait must end by itself."""
        while self.step < self.steps and self.step != kill_at:
            if not self.mixed:  # block
                while self.running:
                    self.finish_one()
            self.begin()
            while self.random.random() < 0.5 and self.running:
                self.finish_one()
                self.begin()
            self.train()

    def begin(self) -> None:
        ordinals = self.admission.begin(self.step)
        self.buffer.rest(self.admission.take_rested())
        self.buffer.begin(ordinals, self.step)
        for ordinal in ordinals:
            length = self.random.expovariate(1.0) if self.random.random() < 0.8 else 20.0
            heapq.heappush(self.running, (self.now + length, ordinal, self.step))

    def finish_one(self) -> None:
        self.now, ordinal, version = heapq.heappop(self.running)
        dropped = bool(self.dropping) and self.random.random() < self.dropping
        outside = self.sources is not None and self.random.random() < self.outside
        self.admission.finish(ordinal, outside, dropped)
        self.buffer.finish(ready(ordinal, version, dropped, outside))

    def train(self) -> None:
        while True:
            stale = self.buffer.reject(self.step)
            if stale:
                self.rejected += len(stale)
                self.admission.again(stale)
                self.begin()
            batch = self.buffer.take(self.step)
            if batch is not None:
                break
            assert self.running, f"a deadlock: {self.buffer}"
            self.finish_one()
            self.begin()
        assert not any(group.dropped for group in batch)
        self.trained.append([group.ordinal for group in batch])
        self.dropped.append([group.ordinal for group in self.buffer.report_dropped()])
        self.rested.append(self.buffer.take_rested())
        self.ages += [self.step - group.oldest for group in batch]
        self.step += 1
        if self.random.random() < 0.5:
            # the generator continues before the ledger is saved
            if self.mixed and self.random.random() < 0.5:
                self.begin()
            self.saved = (
                msgspec.msgpack.decode(self.buffer.ledger().encode(), type=Ledger),
                self.step,
            )

    def kill_and_resume(self) -> None:
        self.start(*self.saved)
