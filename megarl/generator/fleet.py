"""Presents the engines of a run as one.

A request goes to the engine with the fewest samples in flight relative to its capacity, and
survives weight updates.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megarl.base.files import log_tail
from megarl.base.kept_sets import KeptSets, join_kept_sets
from megarl.base.rollout_types import Version
from megarl.config.schema import GeneratorConfig
from megarl.generator.client import EngineClient, EngineUnreachable
from megarl.generator.completions import (
    ABORT,
    Completion,
    Decode,
    EngineError,
    Sampling,
    StopStrings,
)
from megarl.generator.engine_state import (
    COUNTED,
    DOWN,
    MEMBERS,
    TRANSITIONS,
    WITHOUT_WEIGHTS,
    Engine,
    EngineState,
    Event,
)
from megarl.generator.groups import EngineGroup
from megarl.messaging.waiting import Pulse

ABORT_AGAIN_S = 0.05
# values of async.partial_rollout with which a response has a single version
ONE_VERSION = ("block", "abort")
T = TypeVar("T")


@dataclass
class Draft:
    """An unfinished response, assembled from one request after another.

    All of them have its seed, so they are one draw.
    """

    sampling: Sampling
    token_ids: array[int] = field(default_factory=partial(array, "i"))
    logprobs: array[float] = field(default_factory=partial(array, "f"))
    versions: array[int] = field(default_factory=partial(array, "i"))
    routing: bytes = b""
    kept: KeptSets | None = None
    finish_reason: str = ""  # empty until it is finished
    aborted: bool = False  # whether it was once restarted from the prompt, and so will not be again

    def add(self, completion: Completion) -> None:
        """Appends the tokens of one more request.

        If the request was cut, the response continues from there.
        """
        self.kept = join_kept_sets(
            self.kept, len(self.token_ids), completion.kept, len(completion.token_ids)
        )
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        # earlier tokens keep the experts they were sampled with
        self.routing += completion.routing[len(self.routing) :]
        is_cut = completion.finish_reason == ABORT or (
            completion.finish_reason == "length" and len(self.token_ids) < self.sampling.max_tokens
        )
        self.finish_reason = "" if is_cut else completion.finish_reason

    def next_sampling(self, chunk_tokens: int | None) -> Sampling:
        """How the next request continues it, by `chunk_tokens` at most."""
        remaining = self.sampling.max_tokens - len(self.token_ids)
        return msgspec.structs.replace(
            self.sampling, max_tokens=min(remaining, chunk_tokens or remaining)
        )

    def stay_under(self, version: Version | None) -> None:
        """Drops tokens of other versions.

        Only a response whose engine has left may have such tokens.
        """
        if self.versions and self.versions[-1] != version:
            self.token_ids = array("i")
            self.logprobs = array("f")
            self.versions = array("i")
            self.routing = b""
            self.kept = None

    def stop_at(self, stops: StopStrings, prompt_tokens: int) -> None:
        """Ends the response at its first stop string, if it has one."""
        end = stops.end(self.token_ids)
        if end is None:
            return
        positions = prompt_tokens + len(self.token_ids) - 1
        self.routing = self.routing[: len(self.routing) // positions * (prompt_tokens + end - 1)]
        self.kept = self.kept and self.kept.first(end)
        for values in (self.token_ids, self.logprobs, self.versions):
            del values[end:]
        self.finish_reason = "stop"

    def completion(self) -> Completion:
        return Completion(
            self.token_ids,
            self.logprobs,
            self.versions,
            self.finish_reason,
            self.routing,
            self.kept,
        )


class KeptCache:
    """The keys and values of the episodes of one prompt, which engines keep across weight updates.

    Only requests with the same `key` reuse them: those of episodes that began under the same
    weights, `version`. No request without a KeptCache has such a key.
    """

    def __init__(self, version: Version | None):
        self.key = f"since {version}"
        # number of tokens of a conversation, and their hash -> the engine that has computed them
        self._engines: dict[tuple[int, bytes], Engine] = {}

    def add(self, token_ids: Sequence[int], engine: Engine) -> None:
        """Notes that `engine` has the keys and values of this conversation."""
        tokens = array("i", token_ids).tobytes()
        self._engines[len(token_ids), hashlib.blake2b(tokens, digest_size=16).digest()] = engine

    def engine_of(self, token_ids: Sequence[int]) -> Engine | None:
        """The engine that has the longest beginning of this conversation; None if none is known."""
        tokens = array("i", token_ids).tobytes()
        beginning = hashlib.blake2b(digest_size=16)
        hashed = 0
        engine = None
        for length in sorted({length for length, _ in self._engines if length <= len(token_ids)}):
            beginning.update(tokens[4 * hashed : 4 * length])
            hashed = length
            engine = self._engines.get((length, beginning.digest()), engine)
        return engine


class Fleet:
    """Engines that all have the same weights, of `version`.

    `clients` are of the engines of the start. `partial_rollout` says what a weight update does to
    requests (see `hold`). `chunk_tokens`: each response is split into requests of at most this many
    tokens. `decode`, for engines with a tokenizer, ends responses at stop strings that the engines
    overlook.

    An `elastic` fleet continues without an engine whose connection breaks. Unfinished responses of
    that engine continue on other engines, from the tokens that earlier requests returned. Engines
    may also join an elastic fleet (`add`) and leave it (`leave`). megarl.generator.engine_state
    says through which states an engine goes.

    Engines of a `frozen` model keep their initial weights. `name`: of the engines' processes.
    `groups`: the groups of engines, in order; by default all engines form one.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        partial_rollout: str = "block",
        chunk_tokens: int | None = None,
        elastic: bool = False,
        decode: Decode | None = None,
        frozen: bool = False,
        name: str = "engine",
        groups: Sequence[EngineGroup] = (),
    ):
        self.groups = groups or [EngineGroup("", GeneratorConfig(engines=len(clients)))]
        # [engine] the index of its group
        indices = [index for index, group in enumerate(self.groups) for _ in group.numbers]
        self.engines = [
            Engine(number=number, client=client, group=index)
            for number, (client, index) in enumerate(zip(clients, indices, strict=True))
        ]
        self.updating: Sequence[Engine] = ()  # engines whose memory an update has opened
        self.elastic = elastic
        self.frozen = frozen
        self.name = name
        self.version: Version | None = None
        self.pulse = Pulse()  # beats when an engine, a request or the version changes
        self._partial_rollout = partial_rollout
        self._chunk_tokens = chunk_tokens
        self._decode = decode
        self._drafts = [0, 0, 0]  # see take_drafts
        self._prefill = [0, 0]  # see take_prefill
        # whether requests are exempt from aborts -> their number at the engines
        self._requests: Counter[bool] = Counter()
        self._aborts = 0
        self._is_held = False
        self._by_states: dict[tuple[EngineState, ...], list[Engine]] = {}  # see engines_in

    def engines_in(self, *states: EngineState) -> list[Engine]:
        """The engines in one of these states, in the order of their ranks in a reshard map: by
        group, then by number.
        """
        if states not in self._by_states:
            engines = [engine for engine in self.engines if engine.state in states]
            self._by_states[states] = sorted(engines, key=lambda engine: engine.group)
        return self._by_states[states]

    @property
    def serving(self) -> list[Engine]:
        return self.engines_in(EngineState.SERVING)

    @property
    def members(self) -> list[Engine]:
        """The engines that take part in an update."""
        return self.engines_in(*MEMBERS)

    @property
    def counted(self) -> list[Engine]:
        """The engines that have served and have not left, including lost ones."""
        return self.engines_in(*COUNTED)

    @property
    def without_weights(self) -> list[Engine]:
        """The engines that run, but do not have the current weights yet."""
        return self.engines_in(*WITHOUT_WEIGHTS)

    @property
    def down(self) -> list[Engine]:
        """The engines that do not run."""
        return self.engines_in(*DOWN)

    @property
    def reasons(self) -> str:
        """Why engines do not run."""
        return "; ".join(engine.reason for engine in self.down)

    def _move(self, engine: Engine, event: Event, reason: str = "") -> bool:
        """Changes the state of an engine, as TRANSITIONS say.

        Returns whether they do.
        """
        state = TRANSITIONS[event].get(engine.state)
        if state is None:
            return False
        if state is EngineState.RETURNED and self.frozen:
            state = EngineState.SERVING
        engine.state = state
        engine.reason = reason
        self._by_states.clear()
        self.pulse.beat()
        return True

    def _capacity(self, engine: Engine) -> int:
        """The requests that it may run. Load is distributed in proportion to it."""
        return self.groups[engine.group].settings.max_concurrency

    def places(self, engines: Iterable[Engine]) -> int:
        """The requests that these engines run together."""
        return sum(map(self._capacity, engines))

    def _among(self, group: int | None) -> list[Engine]:
        """The serving engines: of `group` if any of them serves, else all."""
        if group is None:
            return self.serving
        return [engine for engine in self.serving if engine.group == group] or self.serving

    def keeping(self) -> Callable[..., Coroutine[Any, Any, list[Completion]]]:
        """`generate` for the episodes of one prompt, which begin now and keep their keys and values
        across weight updates (async.keep_kv_cache).
        """
        return partial(self.generate, cache=KeptCache(self.version))

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        n: int,
        group: int | None = None,
        cache: KeptCache | None = None,
    ) -> list[Completion]:
        """Returns n completions of one prompt.

        They come from one engine, unless it is lost, so that they share the prompt's KV cache.
        `group`: use an engine of that group, as long as one of it serves. With `cache`, it is the
        engine that has the conversation so far, unless that one is full.

        Log-probs are those of the weights that sampled each token. Raises: EngineError,
        TimeoutError, ValueError if the engines have no tokenizer to look for stop strings.
        """
        if sampling.stop and self._decode is None:
            stop = f"Sampling.stop={list(sampling.stop)}"
            raise ValueError(
                f"{stop}: engines look for stop strings only if rollout.stop or eval.stop has one"
            )
        stops = StopStrings(sampling.stop, self._decode) if sampling.stop and self._decode else None
        drafts = [Draft(sampling.of_sample(index)) for index in range(n)]
        while any(not draft.finish_reason for draft in drafts):
            preferred = cache.engine_of(prompt_ids) if cache else None
            async with self._least_loaded(n, group, preferred) as engine:
                unfinished = [draft for draft in drafts if not draft.finish_reason]
                while engine.is_serving and unfinished:
                    await self._continue(engine, prompt_ids, unfinished, stops, cache)
                    unfinished = [draft for draft in drafts if not draft.finish_reason]
        return [draft.completion() for draft in drafts]

    async def ask(self, request: Callable[[EngineClient], Awaitable[T]]) -> T:
        """The answer of a frozen model to one request. Raises EngineError, TimeoutError."""
        while True:
            async with self._least_loaded(1) as engine:
                answer = await request(engine.client)
                engine.finished += 1
                return answer

    @contextlib.asynccontextmanager
    async def _least_loaded(
        self, samples: int, group: int | None = None, preferred: Engine | None = None
    ) -> AsyncIterator[Engine]:
        """Waits for an engine, of `group` if given, and counts the samples as its load. It is
        `preferred` if that one serves and has room for them.

        If its connection breaks in the body, the engine is lost, and the caller continues with
        another.
        """
        await self.pulse.until(lambda: bool(self._among(group)))

        def load(engine: Engine) -> float:
            return (engine.load + samples) / self._capacity(engine)

        engine = min(self._among(group), key=load)
        if preferred is not None and preferred.is_serving and load(preferred) <= 1:
            engine = preferred
        engine.load += samples
        try:
            yield engine
        except EngineUnreachable as error:
            self.lose(error)
        finally:
            engine.load -= samples

    def describe(self, engine: Engine) -> str:
        """A line that says what an engine is doing, for the display."""
        match engine.state:
            case EngineState.LEFT:
                return f"has left: {engine.reason}"
            case EngineState.LEAVING:
                return f"leaves; {engine.load} samples are still to go to others"
            case EngineState.JOINING:
                return "joins, waits for weights"
            case EngineState.STARTING:
                return f"joins: {engine.reason}"
            case EngineState.LOST:
                return f"lost: {engine.reason}"
            case EngineState.RETURNED:
                return "came back, waits for weights"
        if self.frozen:
            return f"serves; {engine.load} requests in flight, {engine.finished} finished"
        state = f"serves weights version {self.version}"
        if self._is_held:
            state = "stands still for weights"
        return f"{state}; {engine.load} samples in flight, {engine.finished} finished"

    def by_name(self, numbers: Iterable[float]) -> dict[str, int]:
        """Name of a group -> its number in `numbers`; empty if the groups have no names."""
        return {
            group.name: int(number) for group, number in zip(self.groups, numbers) if group.name
        }

    @property
    def sampled(self) -> list[int]:
        """Tokens by group."""
        tokens_by_group = [0] * len(self.groups)
        for engine in self.engines:
            tokens_by_group[engine.group] += engine.tokens
        return tokens_by_group

    def counts(self, engines: Iterable[Engine]) -> tuple[int, ...]:
        """[group] how many of these engines it has."""
        counts = Counter(engine.group for engine in engines)
        return tuple(counts[number] for number in range(len(self.groups)))

    def add(self, client: EngineClient, group: int = 0) -> Engine:
        """Adds an engine whose process is starting.

        It serves once it runs and has the weights.
        """
        engine = Engine(
            number=len(self.engines),
            client=client,
            group=group,
            state=EngineState.STARTING,
            reason="it is starting",
        )
        self.engines.append(engine)
        self._by_states.clear()
        print(f"{self.name} {engine.number} at {engine.url} is to join", flush=True)
        self.pulse.beat()
        return engine

    def leave(self, engine: Engine, reason: str, timeout_s: float) -> Coroutine[Any, Any, None]:
        """Continues without an engine from now on: it takes no more requests.

        Its requests are cut, and continue on other engines from their tokens so far. The returned
        coroutine ends when the engine has no requests and no update writes to it; its process may
        end then. Requests that it does not return within `timeout_s` continue from the tokens of
        earlier requests, as if the engine were lost.
        """
        if not self._move(engine, Event.LEAVES):
            return asyncio.sleep(0)
        return self._let_go(engine, reason, timeout_s)

    async def _let_go(self, engine: Engine, reason: str, timeout_s: float) -> None:
        await self.pulse.until(lambda: engine not in self.updating)
        try:
            async with asyncio.timeout(timeout_s):
                await self._end_requests(
                    lambda: bool(engine.load), lambda: engine.client.abort_all(timeout_s)
                )
        except (EngineError, TimeoutError) as error:
            print(
                f"{self.name} {engine.number} leaves without giving back its requests: "
                f"{error or 'it did not answer'}",
                flush=True,
            )
        self._move(engine, Event.HAS_LEFT, reason)
        print(
            f"{self.name} {engine.number} has left, {len(self.serving)} serve: {reason}",
            flush=True,
        )
        await engine.client.close()
        self.pulse.beat()

    def lose(self, error: EngineUnreachable) -> None:
        """Continues without the engine that `error` names.

        Raises `error` if the fleet is not elastic.
        """
        if not self.elastic:
            raise error
        # an engine that has left may have had the same address
        engine = next(engine for engine in reversed(self.engines) if engine.url == error.url)
        was_member = engine.state in MEMBERS
        if engine.is_serving:
            engine.is_intact = not self._is_held
        if self._move(engine, Event.BREAKS, str(error)) and was_member:
            print(
                f"{self.name} {engine.number} is lost, {len(self.serving)} are left: {error}",
                flush=True,
            )

    def come_back(self, engine: Engine) -> None:
        """Called when an engine that was down runs, without the current weights."""
        engine.is_intact = False
        self._move(engine, Event.RUNS)
        if self.frozen:
            print(f"{self.name} {engine.number} serves again", flush=True)

    def take_back(self, engines: Iterable[Engine], version: Version) -> None:
        """Called when these engines have `version`, like the others."""
        returning = []
        for engine in engines:
            was_serving = engine.is_serving
            if self._move(engine, Event.HAS_WEIGHTS) and not was_serving:
                returning.append(engine.number)
        if returning:
            print(
                f"{self.name}s {sorted(returning)} serve version {version} from now on",
                flush=True,
            )

    async def _continue(
        self,
        engine: Engine,
        prompt_ids: list[int],
        drafts: list[Draft],
        stops: StopStrings | None,
        cache: KeptCache | None,
    ) -> None:
        """Sends one request that continues each draft from its tokens so far, to its end or the
        next cut. Sends nothing if the engine was lost while requests were held: it may run again by
        now, but without the weights.
        """
        await self.pulse.until(lambda: not self._is_held or not engine.is_serving)
        if not engine.is_serving:
            return
        if self._partial_rollout in ONE_VERSION:
            for draft in drafts:
                draft.stay_under(self.version)
        protected = any(draft.aborted for draft in drafts)
        aborts = self._aborts
        samplings = [draft.next_sampling(self._chunk_tokens) for draft in drafts]
        self._requests[protected] += 1
        try:
            completions = await engine.client.complete(
                [[*prompt_ids, *draft.token_ids] for draft in drafts],
                samplings,
                cache.key if cache else self.version,
            )
        finally:
            self._requests[protected] -= 1
            self.pulse.beat()
        engine.tokens += sum(len(completion.token_ids) for completion in completions)
        for completion in completions:
            self._drafts = [sum(pair) for pair in zip(self._drafts, completion.drafts)]
            self._prefill = [sum(pair) for pair in zip(self._prefill, completion.prefill)]
        for draft, completion in zip(drafts, completions, strict=True):
            was_aborted = aborts != self._aborts  # whether an update has aborted the request
            if completion.finish_reason == ABORT and not was_aborted and engine.is_serving:
                raise EngineError(f"engine {engine.url} aborted a request without being asked to")
            if (
                completion.finish_reason == ABORT
                and was_aborted
                and self._partial_rollout == "abort"
            ):
                draft.aborted = True
            else:
                draft.add(completion)
                if stops:
                    draft.stop_at(stops, len(prompt_ids))
            if cache:
                cache.add([*prompt_ids, *draft.token_ids], engine)
        engine.finished += sum(bool(draft.finish_reason) for draft in drafts)

    def take_drafts(self) -> tuple[int, int, int]:
        """The sums of `Completion.drafts` since the last call."""
        drafted, accepted, verified = self._drafts
        self._drafts = [0, 0, 0]
        return drafted, accepted, verified

    def take_prefill(self) -> tuple[int, int]:
        """The sums of `Completion.prefill` since the last call."""
        tokens, cached = self._prefill
        self._prefill = [0, 0]
        return tokens, cached

    async def hold(self, timeout_s: float) -> None:
        """Submits no more requests.

        Returns when the engines' requests are in the state that `partial_rollout` requires for an
        update:

        in_flight, retract: still running; the engines keep them through the pause
        block:              answered
        resume:             cut at their current token; they continue from there after `release`
        abort:              aborted, and submitted again from the prompt after `release`; responses
        that an earlier update has aborted
                            finish first, so that every response gets done
        """
        # lets requests of the last `release` be submitted, even if this is called right after it
        await asyncio.sleep(0)
        self._is_held = True
        if self._partial_rollout in ("in_flight", "retract"):
            return
        if self._partial_rollout in ("resume", "abort"):
            await self.pulse.until(lambda: not self._requests[True])
            await self._end_requests(
                lambda: bool(self._requests[False]), lambda: self._abort_all(timeout_s)
            )
        await self.pulse.until(lambda: not self._requests.total())

    async def _end_requests(
        self, running: Callable[[], bool], abort: Callable[[], Awaitable[None]]
    ) -> None:
        """Makes engines abort requests until no request is `running`.

        It repeats the call, since a request may still have been on its way to the engine.
        """
        while running():
            await abort()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self.pulse.until(lambda: not running())

    async def _abort_all(self, timeout_s: float) -> None:
        self._aborts += 1
        engines = self.engines_in(EngineState.SERVING, EngineState.LEAVING)
        called = [engine.client.abort_all(timeout_s) for engine in engines]
        for outcome in await asyncio.gather(*called, return_exceptions=True):
            if isinstance(outcome, EngineUnreachable):
                self.lose(outcome)
            elif outcome is not None:
                raise outcome

    def release(self, version: Version) -> None:
        """Submits requests again. Call it when the serving engines have `version`."""
        self.version = version
        self._is_held = False
        self.pulse.beat()

    async def while_serving(self, work: asyncio.Future) -> bool:
        """Waits for `work`, but cancels it if the last engine is lost.

        Returns whether it was done.
        """
        lost = asyncio.ensure_future(self.pulse.until(lambda: not self.serving))
        try:
            await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            return work.done()
        finally:
            work.cancel()
            lost.cancel()

    async def close(self) -> None:
        await asyncio.gather(*(engine.client.close() for engine in self.engines))


LOOK_UP_S = 0.5


async def watch_returns(fleet: Fleet, run_dir: str, settings: GeneratorConfig) -> None:
    """Waits for lost engines to return, and tells the fleet when one runs again. The engine serves
    after the next update, or after an update of its own. Runs until its task is cancelled.

    A connection may break though its engine still runs; that engine returns in the same way. So
    does an engine that joins, once it has started.

    Raises EngineError, with the ends of their logs, when no engine is left and none comes back in
    time.
    """
    restarted = settings.on_failure == "restart"
    timeout_s = settings.startup_timeout_s
    now_s = asyncio.get_running_loop().time
    while True:
        await fleet.pulse.until(lambda: bool(fleet.down))
        last_served_s = now_s()
        while fleet.down:
            awaited = fleet.down if restarted else fleet.engines_in(EngineState.STARTING)
            if fleet.members:
                last_served_s = now_s()
            elif not awaited or now_s() - last_served_s > timeout_s:
                raise EngineError(_none_left(fleet, run_dir, timeout_s if awaited else 0.0))
            # a dead host does not even refuse a connection
            returns = await asyncio.gather(*(_is_back(fleet, engine) for engine in awaited))
            for engine in itertools.compress(awaited, returns):
                if engine.is_down:  # it has not left meanwhile
                    fleet.come_back(engine)
            await asyncio.sleep(LOOK_UP_S)


async def _is_back(fleet: Fleet, engine: Engine) -> bool:
    return await engine.client.fresh() or (
        (fleet.frozen or engine.is_intact) and await engine.client.answers()
    )


def _none_left(fleet: Fleet, run_dir: str, waited_s: float) -> str:
    lines = [f"no {fleet.name} is left, and none came back within {waited_s:.0f} s"]
    for engine in fleet.down:
        log = Path(run_dir) / "logs" / f"{fleet.name}.{engine.number}.log"
        lines.append(f"{fleet.name} {engine.number}: {engine.reason}; the end of {log}:")
        lines.append(log_tail(log))
    return "\n".join(lines)
