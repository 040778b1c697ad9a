"""Simulated engines: continuous batching, a KV cache, prefill and retraction, at the speed of the
planner's cost model.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megarl.base.rollout_types import Version
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import ABORT, Completion, Sampling

# SGLang (0.5.23) admits a request if the KV cache has room for it and for a share of the tokens
# that each running request may still sample, at most CLIPPED each
# (managers/schedule_policy.py:784). The share falls from MOST to LEAST within DECAY_STEPS. A
# retraction resets it to the share sampled so far plus RETRACT_STEPS tokens for each request
# (scheduler_components/new_token_ratio_tracker.py).
CLIPPED = 4096
MOST = 0.7
LEAST = 0.098
DECAY_STEPS = 600
RETRACT_STEPS = 20
# the time of a decoding step is computed again when contexts have grown by this share
REFRESH = 0.05
_EPSILON = 1e-6  # of a token


@dataclass(frozen=True)
class Speed:
    """How fast one engine is."""

    # (running requests, mean tokens of context) -> seconds per token
    decode_s: Callable[[int, float], float]
    prefill_s: Callable[[float, float], float]  # (tokens, tokens of a sequence) -> seconds
    cache_tokens: float
    most_running: int


@dataclass(eq=False)
class Work:
    """The remaining work for one prompt, in units, on any engine.

    `totals`: the lengths of its unfinished responses, in order.
    """

    prompt: int
    totals: list[int]
    unread: int  # units of the prompt that no engine has prefilled
    limit: int  # length at which a response is cut


@dataclass(eq=False, slots=True)
class _Call:
    """Requests that arrive together and are answered together."""

    end_of_all: asyncio.Future[None]
    running: int  # requests that have not ended

    def end(self, error: EngineUnreachable | None = None) -> None:
        self.running -= 1
        if self.end_of_all.done():  # the caller has given up, or already has the error
            return
        if error is not None:
            self.end_of_all.set_exception(error)
        elif not self.running:
            self.end_of_all.set_result(None)


@dataclass(eq=False, slots=True)
class _SimulatedRequest:
    call: _Call
    tokens: int  # units that it arrives with
    uncached: int  # units of these that must be prefilled
    target: int  # units that it samples, unless it is aborted
    limit: int  # most units that it may sample, as far as the engine knows
    start: float = 0.0  # on the engine's clock, as if it had sampled all its tokens since
    versions: array[int] = field(default_factory=functools.partial(array, "i"))
    aborted: bool = False

    @property
    def ends(self) -> float:
        return self.start + self.target

    def settle(self, clock: float, version: Version) -> int:
        """Notes the tokens that a running request has sampled by now.

        Returns how many are new; the new ones are of `version`.
        """
        new = max(0, min(self.target, int(clock - self.start + _EPSILON)) - len(self.versions))
        self.versions.extend([version] * new)
        return new


class SimulatedEngine:
    """Has the interface of an EngineClient, in the event loop's time.

    All lengths are in units of `unit` tokens.

    The clock of an engine counts the tokens that an endless request would have sampled. It stops
    while the engine is paused, prefills, or has nothing to do. The token ids of a prompt are its
    key in `work`. The id of a sampled token is the version that sampled it: keys and values of
    another version are not reused.
    """

    def __init__(self, url: str, speed: Speed, unit: int, work: dict[int, Work]):
        self.url = url
        self.speed = speed
        self._unit = unit
        self._work = work
        self.version: Version = -1
        self.busy_s = 0.0  # time spent decoding or prefilling
        self.running_s = 0.0  # the same, summed over running requests
        self.retracted = 0  # requests retracted for lack of KV cache
        self.prefilled = 0  # units
        self.sampled = 0  # units
        # upper bound of `sampled`: units for which running requests had time
        self.could_sample = 0.0
        self._clock = 0.0
        self._read_at = 0.0  # time of the last reading of the clock
        self._free_at = 0.0  # end of prefill
        self._base = 0.0  # sum over running requests of their units minus the clock
        self._running: list[
            tuple[float, int, _SimulatedRequest]
        ] = []  # heap by the end of requests
        self._waiting: deque[_SimulatedRequest] = deque()
        self._count = 0
        self._ratio = MOST
        self._step_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False  # whether a change is scheduled
        self._paused = False
        self._down_until: float | None = None
        self._slowness = 1.0
        self._room = speed.cache_tokens / unit

    async def complete(
        self,
        inputs: Sequence[list[int]],
        samplings: Sequence[Sampling],
        version: Version | None = None,
    ) -> list[Completion]:
        """One completion of each input; all are of one prompt.

        Returns when the last one has ended. Raises EngineUnreachable.
        """
        self._check_up()
        work = self._work[inputs[0][0]]
        call = _Call(asyncio.get_running_loop().create_future(), len(inputs))
        requests = []
        rests = []
        for tokens, total, sampling in zip(inputs, work.totals, samplings, strict=True):
            sampled = len(tokens) - work.prompt
            uncached = work.unread + sampled - tokens[work.prompt :].count(self.version)
            work.unread = 0
            rests.append(total - sampled)
            target = min(total - sampled, sampling.max_tokens)
            requests.append(
                _SimulatedRequest(call, len(tokens), uncached, target, sampling.max_tokens)
            )
        self._waiting.extend(requests)
        self._change_soon()
        await call.end_of_all
        ended = []
        for request, rest in zip(requests, rests):
            ended.append(not request.aborted and rest <= request.target)
        completions = []
        for request, total, end in zip(requests, work.totals, ended):
            reason = "stop" if end and total != work.limit else "length"
            completions.append(self._completion(request, reason))
        work.totals = [total for total, end in zip(work.totals, ended) if not end]
        return completions

    async def abort_all(self, timeout_s: float) -> None:
        self._check_up()
        self._advance()
        self._settle()
        for request in self._requests():
            request.aborted = True
            request.call.end()
        self._clear()

    async def close(self) -> None:
        self._clear()

    def pause(self) -> None:
        if not self._paused:
            self._advance()
            self._settle()
            self._paused = True
            self._set_timer()

    def resume(self, version: Version, recompute: bool) -> None:
        """Continues under `version`.

        With `recompute`, first prefills all running sequences again.
        """
        self._read_at = self._now()
        self.version = version
        self._paused = False
        if recompute and self._running:
            self._prefill(self._cached_units, self._cached_units / len(self._running))
        self._change_soon()

    def slow_down(self, times: float) -> None:
        """From now on, its work takes `times` as long as alone on its GPU.

        A prefill that has begun keeps its end.
        """
        self._advance()
        self._slowness = times
        self._set_timer()

    @property
    def works(self) -> bool:
        return bool(self._running) and not self._paused

    def fail(self, restart_s: float) -> None:
        """Ends the engine's process. It runs again after `restart_s`."""
        self._advance()
        error = f"engine {self.url} has failed"
        for request in self._requests():
            request.call.end(EngineUnreachable(self.url, error))
        self._clear()
        self._paused = False
        self._free_at = 0.0
        self.version = -1
        self._down_until = self._now() + restart_s

    @property
    def up(self) -> bool:
        return self._down_until is None

    async def fresh(self) -> bool:
        """Whether the engine has restarted and runs."""
        if self._down_until is not None and self._now() >= self._down_until:
            self._down_until = None
        return self._down_until is None

    async def answers(self) -> bool:
        return self._down_until is None

    def _check_up(self) -> None:
        if self._down_until is not None:
            raise EngineUnreachable(self.url, f"engine {self.url} is down")

    @property
    def _cached_units(self) -> float:
        """Units in the KV cache."""
        return self._base + len(self._running) * self._clock

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _requests(self) -> list[_SimulatedRequest]:
        return [*(request for _, _, request in self._running), *self._waiting]

    def _settle(self) -> None:
        """Settles all running requests.

        A waiting request has sampled nothing since it was last settled.
        """
        self.sampled += sum(
            request.settle(self._clock, self.version) for _, _, request in self._running
        )

    def _clear(self) -> None:
        self._running.clear()
        self._waiting.clear()
        self._base = 0.0
        self._set_timer()

    def _advance(self) -> None:
        """Brings the clock up to now."""
        now = self._now()
        if self._running and not self._paused:
            self.busy_s += now - self._read_at
            self.running_s += len(self._running) * (now - self._read_at)
            units = max(0.0, now - max(self._read_at, self._free_at)) / self._step_s
            self._clock += units
            self._ratio = max(
                LEAST, self._ratio - units * self._unit * (MOST - LEAST) / DECAY_STEPS
            )
            self.could_sample += units * len(self._running)
        self._read_at = now

    def _change_soon(self) -> None:
        """Schedules `_change`, so that requests of the same time are admitted together."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._change)

    def _change(self) -> None:
        self._soon = False
        self._advance()
        if not self._paused:
            while self._running and self._running[0][0] <= self._clock + _EPSILON:
                _, _, request = heapq.heappop(self._running)
                self._base -= request.tokens - request.start
                self.sampled += request.settle(request.ends, self.version)
                request.call.end()
            while len(self._running) > 1 and self._cached_units > self._room + _EPSILON:
                self._retract()
            self._take_in()
        self._set_timer()

    def _take_in(self) -> None:
        """Starts waiting requests, first come, first served."""
        if not self._running:
            self._ratio = MOST
        while self._waiting and len(self._running) < self.speed.most_running:
            request = self._waiting[0]
            # running requests have the same limit, and have used some of it
            clipped = min(request.limit, CLIPPED / self._unit)
            required_units = (
                self._cached_units
                + request.tokens
                + len(request.versions)
                + self._ratio * clipped * (len(self._running) + 1)
            )
            if self._running and required_units > self._room:
                return
            self._waiting.popleft()
            request.start = self._clock - len(request.versions)
            self._base += request.tokens - request.start
            self._count += 1
            heapq.heappush(self._running, (request.ends, self._count, request))
            self._prefill(request.uncached, request.tokens)

    def _retract(self) -> None:
        """Frees the cache of the request that has sampled least. It is prefilled again later."""
        place = max(range(len(self._running)), key=lambda index: self._running[index][2].start)
        _, _, request = self._running.pop(place)
        heapq.heapify(self._running)
        self.sampled += request.settle(self._clock, self.version)
        self._base -= request.tokens - request.start
        request.uncached = request.tokens + len(request.versions)
        self._waiting.appendleft(request)
        self.retracted += 1
        requests = [request, *(running for _, _, running in self._running)]
        sampled = (
            sum(self._clock - request.start for request in requests)
            + len(requests) * RETRACT_STEPS / self._unit
        )
        self._ratio = min(1.0, sampled / sum(request.limit for request in requests))

    def _prefill(self, tokens: float, length: float) -> None:
        if tokens:
            self.prefilled += int(tokens)
            alone_s = self.speed.prefill_s(tokens * self._unit, length * self._unit)
            self._free_at = max(self._free_at, self._now()) + self._slowness * alone_s

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._paused or not self._running:
            return
        running = len(self._running)
        context = self._cached_units / running
        self._step_s = (
            self._slowness
            * self._unit
            * self.speed.decode_s(running, max(1.0, context) * self._unit)
        )
        steps = min(self._running[0][0] - self._clock, max(1.0, REFRESH * context))
        if running > 1:
            steps = min(steps, max(1.0, (self._room - self._cached_units) / running))
        when = max(self._now(), self._free_at) + max(0.0, steps) * self._step_s
        self._timer = asyncio.get_running_loop().call_at(
            max(when, math.nextafter(self._read_at, math.inf)), self._change
        )

    @staticmethod
    def _completion(request: _SimulatedRequest, reason: str) -> Completion:
        logprobs = array("f", bytes(4 * len(request.versions)))
        if request.aborted:
            reason = ABORT
        return Completion(request.versions, logprobs, request.versions, reason)
