"""Further passes over a batch while the trainer would be idle (async.idle=updates)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from megarl.config.schema import RunConfig


class IdleUpdates:
    """Decides on each further pass over a batch, the same on all ranks.

    This is the generation-bound case of asynchronous RLHF (Noukhovitch et al. 2024,
    arXiv:2410.18252, section 4.1), bounded by the effective sample size of pi/mu.

    `awaits(step, wanted)`: whether rank 0 wants a pass and the batch of `step` is not there yet
    (`RolloutsReceiver.awaits`). Decisions depend on time, so `metrics` record them.
    """

    def __init__(self, config: RunConfig, least_ess: float, awaits: Callable[[int, bool], bool]):
        epochs = config.trainer.epochs
        self._most = (config.async_.max_updates or 2 * epochs) - epochs
        self._max_steps = config.max_steps
        self._least_ess = least_ess
        self._awaits = awaits
        self.metrics: dict[str, float] = {}

    def passes(self, step: int, measure: Callable[[], float]) -> Iterator[None]:
        """Yields once for each pass over the batch of `step`. Collective.

        `measure` returns the effective sample size under the current weights; NaN if no token is
        trained on.
        """
        began_s = time.monotonic()
        self.metrics = {"idle/updates": 0, "time/idle_updates_s": 0.0}
        for number in range(1, self._most + 1):
            # no batch follows the last one
            if step + 1 == self._max_steps or not self._awaits(step + 1, True):
                return
            ess = measure()
            if not math.isnan(ess):
                self.metrics["idle/ess"] = ess
            # The other ranks do what rank 0 does, even if their sums differ in the last bit.
            if not self._awaits(step + 1, ess >= self._least_ess):
                return
            yield
            self.metrics["idle/updates"] = number
            self.metrics["time/idle_updates_s"] = time.monotonic() - began_s
