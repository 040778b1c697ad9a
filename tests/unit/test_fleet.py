"""A client's view of a fleet of engines: aborts, updates, lost engines, stop strings.

The engines are fakes; tests/cpu has real ones.
"""

from __future__ import annotations

import asyncio
import json
import resource
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_fleets import numbers
from loops import DEADLINE_S, settle

from megarl.base.rollout_types import Prompt
from megarl.config.schema import GeneratorConfig
from megarl.generator.client import EngineClient, EngineUnreachable
from megarl.generator.completions import (
    Completion,
    EngineError,
    Sampling,
    StopStrings,
    completions_of,
    cut,
)
from megarl.generator.engine_state import EngineState
from megarl.generator.fleet import Fleet, watch_returns
from megarl.rollouts.environments.base import RolloutContext, Transcript
from megarl.rollouts.rollout import CheckedRollout


class FakeEngine:
    """Answers each request with `answer(inputs, samplings)`, and records the requests' versions."""

    url = "engine"

    def __init__(self, answer):
        self.answer = answer
        self.versions = []
        self.aborted = asyncio.Event()

    async def complete(self, inputs, samplings, version):
        self.versions.append(version)
        return await self.answer(inputs, samplings)

    async def abort_all(self, timeout_s):
        self.aborted.set()


def tokens_of(count: int, finish_reason: str) -> Completion:
    return Completion([7] * count, [-0.5] * count, [0] * count, finish_reason)


def test_a_response_is_put_together_from_its_cuts():
    async def answer(inputs, samplings):
        requests.append(
            [(len(tokens), sampling.max_tokens) for tokens, sampling in zip(inputs, samplings)]
        )
        cut = [tokens_of(sampling.max_tokens, "length") for sampling in samplings]
        return [tokens_of(1, "stop"), *cut[1:]] if len(inputs[0]) >= 9 else cut

    async def run():
        fleet = Fleet([FakeEngine(answer)], "resume", chunk_tokens=4)
        return await fleet.generate([1, 2, 3], Sampling(max_tokens=10), 2)

    requests: list = []
    first, second = asyncio.run(run())
    assert requests == [[(3, 4), (3, 4)], [(7, 4), (7, 4)], [(11, 2), (11, 2)]]
    assert (len(first.token_ids), first.finish_reason) == (9, "stop")
    assert (len(second.token_ids), second.finish_reason) == (10, "length")


def test_an_update_cuts_requests_where_they_are():
    """With `resume` they keep their tokens; with `abort` they begin again, with the same seed.

    A request that was still on its way is aborted again.
    """

    async def answer(inputs, samplings):
        requests.append([len(tokens) for tokens in inputs])
        seeds.append([sampling.seed for sampling in samplings])
        if len(requests) > 1:
            return [tokens_of(sampling.max_tokens, "length") for sampling in samplings]
        for _ in range(2):
            await engine.aborted.wait()
            engine.aborted.clear()
        return [tokens_of(5, "stop"), tokens_of(3, "abort")]

    async def run(mode):
        nonlocal engine
        fleet = Fleet([engine := FakeEngine(answer)], mode)
        request = asyncio.create_task(fleet.generate([1, 2], Sampling(max_tokens=8, seed=7), 2))
        await settle()
        async with asyncio.timeout(DEADLINE_S):
            await fleet.hold(1)
            assert not request.done()
            fleet.release(1)
            return [len(completion.token_ids) for completion in await request]

    engine = None
    for mode, again in (("resume", 5), ("abort", 2)):
        requests: list = []
        seeds: list = []
        assert asyncio.run(run(mode)) == [5, 8]
        assert requests == [[2, 2], [again]]
        assert seeds[1] == seeds[0][1:] != seeds[0][:1]


def test_the_last_token_of_an_aborted_answer_is_sampled_again():
    """That token might end the response, but an engine does not check it when it aborts a request."""
    tokens = [[-0.5, token, None] for token in (5, 6, 7)]
    meta = {
        "weight_version": "3",
        "weight_versions": [
            {"version": "2", "start": 0, "end": 1},
            {"version": "3", "start": 1, "end": 3},
        ],
    }
    finish = {"finish_reason": {"type": "abort"}}
    answers = [
        {"meta_info": {**meta, **finish, "output_token_logprobs": tokens}},
        {"meta_info": {"weight_version": "3", **finish}},
    ]
    cut, empty = completions_of("engine", json.dumps(answers).encode(), [Sampling(8)] * 2)
    assert cut == Completion([5, 6], [-0.5, -0.5], [2, 3], "abort")
    assert empty == Completion([], [], [], "abort")
    truncated = Sampling(8, top_k=4)
    assert completions_of("engine", json.dumps(answers[:1]).encode(), [truncated]) == [empty], (
        "its log-probs are missing"
    )


def test_a_log_prob_that_is_no_number_names_the_engine():
    meta = {
        "weight_version": "3",
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[None, 5, None]],
    }
    with pytest.raises(
        EngineError,
        match="engine url gave an unreadable answer: Expected `float`, got `null`.*NaN or infinite",
    ):
        completions_of("url", json.dumps([{"meta_info": meta}]).encode(), [Sampling(8)])


def test_requests_wait_for_an_update_and_carry_its_version():
    async def answer(inputs, samplings):
        return [tokens_of(s.max_tokens, "length") for s in samplings]

    async def run():
        fleet = Fleet([engine := FakeEngine(answer)], "in_flight")
        fleet.release(4)
        await fleet.hold(1)
        request = asyncio.create_task(fleet.generate([1], Sampling(max_tokens=2), 1))
        await settle()
        assert engine.versions == []
        fleet.release(5)
        await request
        assert engine.versions == [5]

    asyncio.run(run())


def test_an_abort_that_nobody_asked_for_is_an_error():
    async def answer(inputs, samplings):
        return [Completion([], [], [], "abort")]

    async def run():
        await Fleet([FakeEngine(answer)], "abort").generate([1], Sampling(max_tokens=2), 1)

    with pytest.raises(EngineError, match="engine engine aborted a request without being asked to"):
        asyncio.run(run())


def test_unfinished_requests_of_a_lost_engine_move_to_another():
    """The first part of each response comes from the engine that is then lost.

    The other engine gets that part, and gives the rest.
    """

    async def run():
        fleet = Fleet(
            [first := FakeEngine(lost_at_the_second), second := FakeEngine(answer)],
            "resume",
            chunk_tokens=4,
            elastic=True,
        )
        first.url = "first"
        second.url = "second"
        fleet.release(3)
        completions = await fleet.generate([1, 2, 3], Sampling(max_tokens=10), 2)
        lost = fleet.engines[0]
        assert numbers(fleet.members) == [1]
        assert lost.state is EngineState.LOST and lost.reason == "gone"
        fleet.come_back(lost)
        assert numbers(fleet.serving) == [1], "it has no weights yet"
        assert numbers(fleet.members) == [0, 1]
        fleet.take_back(fleet.engines, 4)
        assert numbers(fleet.serving) == [0, 1]
        return completions

    async def lost_at_the_second(inputs, samplings):
        requests.append(("first", [len(tokens) for tokens in inputs]))
        if len(inputs[0]) > 3:
            raise EngineUnreachable("first", "gone")
        return await answer(inputs, samplings)

    async def answer(inputs, samplings):
        requests.append(("both", [len(tokens) for tokens in inputs]))
        return [tokens_of(s.max_tokens, "length") for s in samplings]

    requests: list = []
    completions = asyncio.run(run())
    assert [len(completion.token_ids) for completion in completions] == [10, 10]
    lengths = [lengths for sender, lengths in requests if sender == "both"]
    assert lengths == [[3, 3], [7, 7], [11, 11]], "nothing that was answered is asked for again"


def test_a_held_request_of_a_lost_engine_goes_to_another():
    """By then the lost engine may run again, but without the weights."""

    async def run():
        fleet = Fleet(
            [first := FakeEngine(answer), second := FakeEngine(answer)], "in_flight", elastic=True
        )
        first.url = "first"
        second.url = "second"
        fleet.release(0)
        await fleet.hold(1)
        request = asyncio.create_task(fleet.generate([1], Sampling(max_tokens=2), 1))
        await settle()
        fleet.lose(EngineUnreachable("first", "gone"))
        fleet.come_back(fleet.engines[0])
        fleet.release(1)
        await request
        assert (first.versions, second.versions) == ([], [1])

    async def answer(inputs, samplings):
        return [tokens_of(s.max_tokens, "length") for s in samplings]

    asyncio.run(run())


def test_requests_wait_when_no_engine_is_left():
    async def run():
        fleet = Fleet([engine := FakeEngine(answer)], "in_flight", elastic=True)
        fleet.release(0)
        request = asyncio.create_task(fleet.generate([1], Sampling(max_tokens=2), 1))
        await settle()
        assert not fleet.serving and not request.done()
        fleet.come_back(fleet.engines[0])
        await settle()
        assert not request.done(), "it has no weights yet"
        fleet.take_back(fleet.engines, 4)
        assert len((await request)[0].token_ids) == 2
        assert len(engine.versions) == 2

    async def answer(inputs, samplings):
        if not answered:
            answered.append(True)
            raise EngineUnreachable("engine", "gone")
        return [tokens_of(s.max_tokens, "length") for s in samplings]

    answered: list = []
    asyncio.run(run())


@pytest.mark.parametrize("in_an_update, comes_back", [(False, True), (True, False)])
def test_an_engine_whose_connection_broke_comes_back(in_an_update, comes_back, monkeypatch):
    """Except an engine that may be half-written: it must be restarted, and then lacks our weights."""

    async def run():
        fleet = Fleet([engine := FakeEngine(None), FakeEngine(None)], "in_flight", elastic=True)
        engine.url = "first"
        fleet.release(3)
        if in_an_update:
            await fleet.hold(1)
        fleet.lose(EngineUnreachable("first", "reset by peer"))
        watching = asyncio.create_task(
            watch_returns(fleet, "", GeneratorConfig(startup_timeout_s=10))
        )
        await settle()
        assert numbers(fleet.without_weights) == ([0] if comes_back else [])
        assert numbers(fleet.serving) == [1]
        watching.cancel()

    async def no(engine):
        return False

    async def yes(engine):
        return True

    monkeypatch.setattr(FakeEngine, "fresh", no, raising=False)
    monkeypatch.setattr(FakeEngine, "answers", yes, raising=False)
    asyncio.run(run())


def test_a_lack_of_files_is_not_taken_for_the_loss_of_an_engine():
    """Each connection takes a file descriptor.

    With an elastic fleet one engine after the other would count as lost.
    """

    async def run():
        client = EngineClient("http://127.0.0.1:9", "key", "key")
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
            with pytest.raises(
                EngineError,
                match="no connection to engine http://127.0.0.1:9: Too many open files; raise "
                "ulimit -n",
            ) as caught:
                await client.generate([1], Sampling(max_tokens=2))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            await client.close()
        assert not isinstance(caught.value, EngineUnreachable)

    asyncio.run(run())


def test_requests_to_an_engine_that_has_left_fail_as_unreachable():
    """Otherwise aiohttp's own error would end the run."""

    async def run():
        client = EngineClient("http://127.0.0.1:9", "key", "key")
        await client.close()
        assert not await client.fresh() and not await client.answers()
        with pytest.raises(EngineUnreachable, match="engine http://127.0.0.1:9 has left"):
            await client.version(timeout_s=1)

    asyncio.run(run())


def test_a_fleet_that_is_not_elastic_raises():
    async def answer(inputs, samplings):
        raise EngineUnreachable("engine", "gone")

    with pytest.raises(EngineUnreachable, match="gone"):
        asyncio.run(Fleet([FakeEngine(answer)]).generate([1], Sampling(max_tokens=2), 1))


def test_a_stop_string_over_two_requests_ends_a_response():
    """It may be spread over two requests, and an engine may have continued after it.

    Cut tokens lose their log-probs and experts too.
    """
    texts = {1: "a", 2: "\n", 3: "En", 4: "d", 5: "End"}
    strings = "\nEnd", "zz"

    def decode(ids):
        return "".join(texts[token] for token in ids)

    stops = StopStrings(strings, decode)
    assert (
        stops.end([1, 2, 3, 4, 1]) == 4
        and stops.end([2, 5]) == 2
        and stops.end([1, 3, 4]) is None
        and stops.end([]) is None
    )

    async def answer(inputs, samplings):
        tokens = [[1, 2, 3], [4, 1, 1]][len(inputs[0]) > 2]
        routing = bytes(len(inputs[0]) + len(tokens) - 1)
        return [
            Completion(
                tokens, [-0.5 * token for token in tokens], [0] * len(tokens), "length", routing
            )
            for _ in inputs
        ]

    async def run():
        fleet = Fleet([FakeEngine(answer)], "resume", chunk_tokens=3, decode=decode)
        return await fleet.generate([7, 7], Sampling(max_tokens=9, stop=strings), 1)

    assert asyncio.run(run()) == [
        Completion([1, 2, 3, 4], [-0.5, -1.0, -1.5, -2.0], [0] * 4, "stop", bytes(5))
    ]


def test_stop_strings_are_refused_without_a_tokenizer():
    with pytest.raises(
        ValueError,
        match=r"Sampling.stop=\['x'\]: engines look for stop strings only if rollout.stop or "
        r"eval.stop has one",
    ):
        asyncio.run(Fleet([]).generate([1], Sampling(max_tokens=2, stop=("x",)), 1))


@pytest.mark.parametrize(
    ("text", "strings", "expected"),
    [
        ("abc", ("x",), ("abc", None)),
        ("abXcY", ("Y", "X"), ("ab", "X")),
        ("abcX", ("abcX", "c"), ("ab", "c")),  # it comes first from left to right
        ("abcX", ("X", "cX"), ("ab", "cX")),
        ("Xab", ("X",), ("", "X")),
    ],
)
def test_a_text_is_cut_before_the_first_stop_string(text, strings, expected):
    assert cut(text, strings) == expected


@pytest.mark.parametrize("state", [EngineState.LEAVING, EngineState.LEFT])
def test_an_engine_that_leaves_changes_its_state_no_more(state):
    """Whether its connection breaks, it runs again, or an update ends that wrote to it."""

    async def run():
        fleet = Fleet([engine := FakeEngine(None), FakeEngine(None)], elastic=True)
        engine.url = "first"
        leaver = fleet.engines[0]
        leaver.state = state
        fleet.lose(EngineUnreachable("first", "gone"))
        fleet.come_back(leaver)
        fleet.take_back([leaver], 4)
        assert leaver.state is state
        assert numbers(fleet.serving) == [1]

    asyncio.run(run())


def test_a_newcomer_that_breaks_starts_again_and_is_not_lost():
    async def run():
        fleet = Fleet([first := FakeEngine(None), FakeEngine(None)], elastic=True)
        first.url = "first"
        client = FakeEngine(None)
        client.url = "new"
        newcomer = fleet.add(client)
        fleet.come_back(newcomer)
        for url in ("first", "new"):
            fleet.lose(EngineUnreachable(url, "gone"))
        assert newcomer.state is EngineState.STARTING
        assert fleet.engines[0].state is EngineState.LOST
        assert len(fleet.counted) == 2
        fleet.come_back(newcomer)
        fleet.take_back([newcomer], 4)
        fleet.lose(EngineUnreachable("new", "gone"))
        assert newcomer.state is EngineState.LOST

    asyncio.run(run())


def test_turns_of_an_episode_keep_their_key_and_engine():
    """Without `keeping`, a request has the key of the weights, and goes to any engine."""

    async def answer(inputs, samplings):
        return [tokens_of(2, "length") for _ in inputs]

    async def run():
        first, second = FakeEngine(answer), FakeEngine(answer)
        fleet = Fleet([first, second], "in_flight")
        fleet.release(3)
        keeping = fleet.keeping()
        others = fleet.keeping()
        sampling = Sampling(max_tokens=2)
        fleet.engines[0].load = 1
        await keeping([1], sampling, 1)
        fleet.engines[0].load, fleet.engines[1].load = 0, 1
        fleet.release(4)
        await keeping([1, 7, 7, 5], sampling, 1)
        await keeping([1, 7, 6], sampling, 1)  # another conversation
        await others([1, 7, 7, 5], sampling, 1)
        await fleet.keeping()([1], sampling, 1)
        await fleet.generate([1, 7, 7, 5], sampling, 1)
        return first.versions, second.versions

    first, second = asyncio.run(run())
    assert second == ["since 3", "since 3"], "the engine that has the conversation"
    assert first == ["since 3", "since 3", "since 4", 4]


def test_full_engine_does_not_keep_a_conversation():
    async def answer(inputs, samplings):
        return [tokens_of(1, "length") for _ in inputs]

    async def run():
        engines = FakeEngine(answer), FakeEngine(answer)
        fleet = Fleet(engines, "in_flight")
        fleet.release(0)
        keeping = fleet.keeping()
        fleet.engines[1].load = 1
        await keeping([1], Sampling(max_tokens=1), 1)
        fleet.engines[0].load = fleet.groups[0].settings.max_concurrency
        await keeping([1, 7], Sampling(max_tokens=1), 1)
        return [len(engine.versions) for engine in engines]

    assert asyncio.run(run()) == [1, 1]


def test_prompt_keeps_one_cache_over_all_its_turns():
    """Only a rollout that is given `keeping` does: evaluations are not."""
    caches: list[int] = []

    async def plain(prompt_ids, sampling, n):
        caches.append(-1)
        return [tokens_of(1, "stop")] * n

    def keeping():
        number = max(caches, default=-1) + 1

        async def generate(prompt_ids, sampling, n):
            caches.append(number)
            return [tokens_of(1, "stop")] * n

        return generate

    async def two_turns(context, prompt, sampling, n):
        transcript = Transcript(prompt, context.tokenizer, 4)
        for _ in range(2):
            [completion] = await context.generate(transcript.token_ids, sampling, 1)
            transcript.add_policy(completion)
        return [transcript.sample(0.0)]

    tokenizer: Any = SimpleNamespace(decode_turn=str)
    nothing: Any = None
    context = RolloutContext(tokenizer, plain, nothing, nothing, 1.0)
    held_out = CheckedRollout("own", two_turns, context, timeout_s=5, vocab_size=10)
    training = replace(held_out, keeping=keeping)
    for checked in (training, training, held_out):
        asyncio.run(checked(Prompt(0, [1], "", ""), Sampling(4, seed=0), 1))
    assert caches == [0, 0, 1, 1, -1, -1]
