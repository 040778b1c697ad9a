"""Emulated engines instead of SGLang's.

They sleep as long as a continuous batch with as many slots would decode.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megarl.base.rollout_types import Ordinal, Version, typed
from megarl.generator.completions import ABORT, Completion, Sampling
from megarl.messaging.waiting import Pulse

PROMPT_TOKENS = 16
# tokens prefilled in the time of one decoding step: 20,000 per second if a step takes 20 ms
PREFILL_SPEEDUP = 400


@dataclass(frozen=True)
class EmulatedLengths:
    """Lengths of responses in tokens: lognormal, cut at `longest`.

    `sigma`: standard deviation of the logarithm; 0: all equal.

    The length of a response depends only on seed and ordinal, so every setting gets the same work.
    """

    mean: int
    sigma: float
    longest: int
    seed: int = 0

    def __call__(self, ordinal: Ordinal, n: int) -> list[int]:
        rng = np.random.default_rng((self.seed, ordinal))
        drawn = rng.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, n)
        return list(map(int, np.clip(np.rint(drawn), 1, self.longest)))


@dataclass(eq=False)
class _Run:
    """One sequence at an engine; times are on the engine's clock."""

    starts_s: float
    ends_s: float
    tokens: int
    held_tokens: int  # tokens whose keys and values it has when it starts
    aborted: bool = False

    def decoded(self, clock_s: float) -> int:
        share = (clock_s - self.starts_s) / (self.ends_s - self.starts_s)
        return int(self.tokens * min(1.0, max(0.0, share)))

    def abort(self, clock_s: float, token_s: float) -> None:
        """Ends after the token being decoded, which is dropped, as `EngineClient.complete` does.

        A run without a slot ends at once.
        """
        decoded = self.decoded(clock_s)
        self.ends_s = (
            self.starts_s + (decoded + 1) * token_s if clock_s > self.starts_s else clock_s
        )
        self.tokens = decoded
        self.aborted = True


@dataclass(eq=False)
class EmulatedEngine:
    """Answers like an EngineClient.

    Sequences get slots in order of arrival. They hold a slot for `prefill_s` per input token that
    the prefix cache lacks, then for `token_s` per decoded token.

    The engine's clock stops while it is paused. The end of a sequence on this clock is known when
    it is submitted, so late wake-ups do not add up. The id of a token is the version that sampled
    it; a prompt repeats its ordinal.
    """

    url: str
    slots: int
    token_s: float
    prefill_s: float
    lengths: EmulatedLengths
    _paused_s: float = 0.0  # total length of finished pauses
    _paused_at: float | None = None
    _changes: int = 0
    _pulse: Pulse = field(default_factory=Pulse)
    _runs: set[_Run] = field(default_factory=set)
    # prompt -> lengths of its unfinished responses
    _unfinished: dict[Ordinal, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # heap of the times on the clock when slots become free
        self._free_from = [0.0] * self.slots
        self._switched = [0.0]
        self._versions = [-1]

    async def complete(
        self,
        inputs: Sequence[list[int]],
        samplings: Sequence[Sampling],
        version: Version | None = None,
    ) -> list[Completion]:
        """One completion of each input; all inputs are of one prompt.

        Returns when the last completion has ended.
        """
        ordinal = inputs[0][0]
        lengths = self._unfinished.setdefault(ordinal, self.lengths(ordinal, len(inputs)))
        remaining = []
        runs = []
        for tokens, length, sampling in zip(inputs, lengths, samplings, strict=True):
            remaining.append(length - (len(tokens) - PROMPT_TOKENS))
            runs.append(self._submit(tokens, min(remaining[-1], sampling.max_tokens)))
        try:
            await self._ended(runs)
        except asyncio.CancelledError:
            self._drop(runs)
            self._unfinished.pop(ordinal, None)
            raise
        finally:
            self._runs.difference_update(runs)
        completions = list(map(self._completion, runs, remaining))
        unfinished = []
        for length, completion in zip(lengths, completions):
            if completion.finish_reason != "stop":
                unfinished.append(length)
        self._unfinished[ordinal] = unfinished
        if not unfinished:
            del self._unfinished[ordinal]
        return completions

    def pause(self) -> None:
        self._paused_at = _now()
        self._change()

    async def resume(self, version: Version, recompute: bool) -> None:
        """Continues under `version`.

        With `recompute`, first waits as long as a prefill of all running sequences takes.
        """
        if recompute:
            clock = self._clock()
            cached_tokens = sum(
                run.held_tokens + run.decoded(clock) for run in self._runs if run.starts_s < clock
            )
            await asyncio.sleep(cached_tokens * self.prefill_s)
        assert self._paused_at is not None
        self._paused_s = self._paused_s + _now() - self._paused_at
        self._paused_at = None
        self._switched.append(self._clock())
        self._versions.append(version)
        self._change()

    async def abort_all(self, timeout_s: float) -> None:
        """Aborts all running sequences. Their slots become free after the token being decoded."""
        clock = self._clock()
        for run in self._runs:
            if run.ends_s > clock and not run.aborted:
                run.abort(clock, self.token_s)
        ends = [run.ends_s for run in self._runs if run.ends_s > clock]
        self._free_from = sorted([clock] * (self.slots - len(ends)) + ends)
        self._change()

    def _drop(self, runs: Sequence[_Run]) -> None:
        """Aborts runs that nobody waits for. Each frees its slot, unless another sequence has been
        given the slot meanwhile, which then begins when it would have.
        """
        clock = self._clock()
        for run in runs:
            if run.ends_s > clock:
                ended_s = run.ends_s
                run.abort(clock, self.token_s)
                if ended_s in self._free_from:
                    self._free_from[self._free_from.index(ended_s)] = run.ends_s
        heapq.heapify(self._free_from)

    async def close(self) -> None:
        """Nothing is open."""

    def _submit(self, tokens: list[int], count: int) -> _Run:
        uncached = len(tokens) - tokens[PROMPT_TOKENS:].count(self._versions[-1])
        starts = max(self._clock(), self._free_from[0]) + uncached * self.prefill_s
        run = _Run(starts, starts + count * self.token_s, count, len(tokens))
        heapq.heapreplace(self._free_from, run.ends_s)
        self._runs.add(run)
        return run

    async def _ended(self, runs: Sequence[_Run]) -> None:
        """Waits until the engine's clock has reached the end of the last run."""
        # a smaller difference is rounding
        end_s = max(run.ends_s for run in runs)
        while end_s - self._clock() > 1e-9:
            timeout_s = None if self._paused_at is not None else end_s - self._clock()
            changes = self._changes
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._pulse.until(lambda: self._changes != changes)
            end_s = max(run.ends_s for run in runs)

    def _completion(self, run: _Run, remaining: int) -> Completion:
        versions = []
        for index in range(run.tokens):
            clock_s = run.starts_s + index * self.token_s
            switches = bisect.bisect_right(self._switched, clock_s)
            versions.append(self._versions[switches - 1])
        reason = "stop" if run.tokens == remaining else "length"
        if run.aborted:
            reason = ABORT
        numbers = typed(versions, "i")
        return Completion(numbers, typed([-0.5] * run.tokens, "f"), numbers, reason)

    def _clock(self) -> float:
        now_s = _now() if self._paused_at is None else self._paused_at
        return now_s - self._paused_s

    def _change(self) -> None:
        self._changes += 1
        self._pulse.beat()


def _now() -> float:
    return asyncio.get_running_loop().time()
