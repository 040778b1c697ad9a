"""Agents' requests and output are hostile input: they are bounded, and get one clear answer."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from test_agents_endpoint import EOS, SAMPLING, TOKENIZER, Calculating, can, roll_out, script

from megarl.agents import endpoint
from megarl.agents.endpoint import EpisodeAccess, ModelEndpoint
from megarl.agents.episode import Episode, RequestRefused
from megarl.data.chat import load_chat_template
from megarl.generator import tool_parsers
from megarl.generator.completions import Completion, Sampling
from megarl.generator.tool_parsers import (
    JsonParser,
    ToolCall,
    find_parser,
    json_calls,
    sglang_calls,
)
from megarl.sandbox import jail

TEMPLATE = load_chat_template(TOKENIZER, "model.path=tiny-agent")
USER = {"role": "user", "content": "6*7="}
OPENAI = "chat/completions"
RESPONSES = "responses"
ANTHROPIC = "messages"
pytestmark = pytest.mark.timeout(900)


@contextlib.asynccontextmanager
async def served(
    generate: Any, count: int = 1, **settings: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, list[Episode], list[EpisodeAccess]]]:
    """An endpoint with the given number of episodes."""
    opened = ModelEndpoint()
    await opened.open()
    episodes = [
        Episode(generate, TOKENIZER, TEMPLATE, JsonParser(), SAMPLING, **settings)
        for _ in range(count)
    ]
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(opened.close)
        yield (
            await stack.enter_async_context(aiohttp.ClientSession()),
            episodes,
            [
                await stack.enter_async_context(opened.serving(episode, None))
                for episode in episodes
            ],
        )


async def post(
    client: aiohttp.ClientSession, to: EpisodeAccess, path: str, body: Any, **headers: str
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"http://127.0.0.1:{to.port}/v1/{path}"
    async with client.post(
        url, data=data, headers={"Authorization": f"Bearer {to.key}", **headers}
    ) as answer:
        return answer.status, await answer.json()


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "1", "function": {"name": "x", "arguments": arguments}}],
    }


def said_call(arguments: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "1", "name": "x", "arguments": arguments}


TOO_LONG = b'{"messages": "' + b"x" * (1 << 20) + b'"}'
BAD: list[tuple[str, Any, int, str]] = [
    (OPENAI, b"{", 400, "does not have the required form"),
    (OPENAI, b"[]", 400, "does not have the required form"),
    (OPENAI, b"\xff\xfe", 400, "does not have the required form"),
    (OPENAI, deep(10_000), 400, "does not have the required form"),
    (OPENAI, TOO_LONG, 413, "more than 274944 bytes"),
    (OPENAI, {}, 400, "does not have the required form"),
    (OPENAI, {"messages": [USER], "n": 1.5}, 400, "n=1.5: must be a whole number from 1 to 128"),
    (OPENAI, {"messages": [USER], "n": 1000}, 400, "n=1000: must be a whole number from 1 to 128"),
    (OPENAI, {"messages": [USER], "max_tokens": -1}, 400, "max_tokens=-1: must be a whole number"),
    (OPENAI, {"messages": [USER], "max_tokens": "9"}, 400, "max_tokens=9: must be a whole number"),
    (OPENAI, {"messages": [{"role": "root", "content": "x"}]}, 400, "role=root: must be"),
    (
        OPENAI,
        {"messages": [{"role": ["user"], "content": "x"}]},
        400,
        "does not have the required form",
    ),
    (
        OPENAI,
        {"messages": [{"role": "user", "content": {"a": 1}}]},
        400,
        "does not have the required form",
    ),
    (
        OPENAI,
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": ["x"]}}]},
        400,
        "tools: of type",
    ),
    (OPENAI, {"messages": [USER, call("[" * 50_000), USER]}, 400, "cannot be rendered"),
    (OPENAI, {"messages": [USER, call(r'{"a": "\ud800"}'), USER]}, 400, "cannot be rendered"),
    (RESPONSES, b"[]", 400, "does not have the required form"),
    (RESPONSES, TOO_LONG, 413, "more than 274944 bytes"),
    (RESPONSES, {}, 400, "does not have the required form"),
    (RESPONSES, {"input": 5}, 400, "does not have the required form"),
    (RESPONSES, {"input": {"role": "user"}}, 400, "does not have the required form"),
    (RESPONSES, {"input": []}, 400, "the last message must not be"),
    (
        RESPONSES,
        {"input": [USER, {"role": "assistant", "content": "x"}]},
        400,
        "the last message must not be",
    ),
    (RESPONSES, {"input": [{"content": "x"}]}, 400, "does not have the required form"),
    (
        RESPONSES,
        {"input": [{"role": "tool", "content": "x"}]},
        400,
        "role=tool: must be developer, system, user, assistant",
    ),
    (
        RESPONSES,
        {"input": [{"role": ["user"], "content": "x"}]},
        400,
        "does not have the required form",
    ),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        400,
        "content of type input_image",
    ),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": [7]}]}]},
        400,
        "does not have the required form",
    ),
    (
        RESPONSES,
        {"input": [USER, {"type": "function_call_output", "call_id": ["x"], "output": "x"}]},
        400,
        "call_id must be a string",
    ),
    (
        RESPONSES,
        {"input": [USER, {"type": "function_call_output", "call_id": "x", "output": {"a": 1}}]},
        400,
        "does not have the required form",
    ),
    (
        RESPONSES,
        {"input": [USER, {"type": "function_call", "call_id": "x", "name": "x", "arguments": {}}]},
        400,
        "arguments must be a string",
    ),
    (RESPONSES, {"input": [USER, said_call("[" * 50_000), USER]}, 400, "cannot be rendered"),
    (RESPONSES, {"input": [USER, said_call(r'{"a": "\ud800"}'), USER]}, 400, "cannot be rendered"),
    (
        RESPONSES,
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        400,
        "an item of type item_reference: only message, function_call",
    ),
    (RESPONSES, {"input": "x", "instructions": ["x"]}, 400, "instructions must be a string"),
    (
        RESPONSES,
        {"input": "x", "previous_response_id": ["x"]},
        400,
        "previous_response_id must be a string",
    ),
    (
        RESPONSES,
        {"input": "x", "previous_response_id": "x" * 1000},
        404,
        f"id '{'x' * 100}' not found",
    ),
    (
        RESPONSES,
        {"input": "x", "max_output_tokens": 1.5},
        400,
        "max_output_tokens=1.5: must be a whole number",
    ),
    (
        RESPONSES,
        {"input": "x", "tools": [{"type": "function", "name": ["x"]}]},
        400,
        "name must be a string",
    ),
    (
        RESPONSES,
        {"input": "x", "tools": [{"type": "function", "function": {"name": "x"}}]},
        400,
        "does not have the required form",
    ),
    (RESPONSES, {"input": "x", "include": 5}, 400, "does not have the required form"),
    (RESPONSES, {"input": "x", "text": "json"}, 400, "does not have the required form"),
    (
        ANTHROPIC,
        {"messages": [USER], "max_tokens": 1.5},
        400,
        "max_tokens=1.5: must be a whole number",
    ),
    (
        ANTHROPIC,
        {"messages": [{"role": "system", "content": "x"}]},
        400,
        "role=system: must be user or assistant",
    ),
    (
        ANTHROPIC,
        {"messages": [USER], "tools": [{"name": ["x"], "input_schema": {}}]},
        400,
        "only tools of your own",
    ),
    (
        ANTHROPIC,
        {"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]},
        400,
        "only tools of your own",
    ),
    (
        f"{ANTHROPIC}/count_tokens",
        {"messages": [{"role": "user", "content": [7]}]},
        400,
        "does not have the required form",
    ),
    ("embeddings", {}, 404, "there is POST /v1/chat/completions"),
]


async def test_what_is_wrong_with_a_request_is_its_answer() -> None:
    policy = Calculating()

    async with served(policy) as (client, [episode], [to]):
        for path, body, status, message in BAD:
            response = await post(client, to, path, body)
            assert response[0] == status and message in response[1]["error"]["message"], (
                path,
                body if len(str(body)) < 200 else "",
                response,
            )
        assert not policy.prompts and not episode.tree.turns and not to.failed.done(), (
            "nothing of it has reached the policy"
        )
        assert (await post(client, to, OPENAI, {"messages": [USER]}))[0] == 200, (
            "and the next call is answered"
        )


NAMES = """messages input role content type text tools function name parameters tool_calls id arguments call_id output summary system
tool_use_id input_schema instructions include previous_response_id stop stop_sequences stream store format tool_choice stream_options
input_text output_text tool_use tool_result function_call function_call_output message reasoning user assistant tool auto none""".split()


def mutated(value: Any, noise: random.Random) -> Any:
    """The value with some of its parts replaced."""
    if noise.random() < 0.03:
        return noise.choice(
            [
                None,
                True,
                -1,
                0.5,
                "",
                "\0",
                "<eos>",
                [],
                {},
                [[]],
                [None],
                {"type": "text"},
                noise.choice(NAMES),
            ]
        )
    if isinstance(value, dict):
        remaining = {
            name: mutated(inner, noise) for name, inner in value.items() if noise.random() > 0.02
        }
        return remaining | (
            {noise.choice(NAMES): mutated(noise.choice(NAMES), noise)}
            if noise.random() < 0.1
            else {}
        )
    return (
        [mutated(inner, noise) for inner in value for _ in range(noise.choice([1] * 19 + [2]))]
        if isinstance(value, list)
        else value
    )


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CALLED = {"name": "x", "arguments": '{"a": "b"}'}
USED = {"type": "tool_use", "id": "1", "name": "x", "input": {"a": "b"}}
WELL_FORMED: list[tuple[str, dict[str, Any]]] = [
    (OPENAI, {
        "messages": [USER, {"role": "assistant", "content": "a",
        "tool_calls": [{"id": "1", "type": "function", "function": CALLED}]},
                     {"role": "tool", "tool_call_id": "1",
                     "content": [{"type": "text", "text": "b"}]}],
        "tools": [{"type": "function", "function": {"name": "x", "parameters": SCHEMA}}],
        "stop": ["Q"], "n": 1, "max_tokens": 5, "logprobs": True,
        "stream_options": {"include_usage": True}, "tool_choice": "auto",
    }),
    (RESPONSES, {
        "input": [USER, {"type": "message", "role": "assistant",
        "content": [{"type": "output_text", "text": "a"}]}, {"type": "reasoning"},
                  {"type": "function_call", "call_id": "1", **CALLED},
                  {"type": "function_call_output", "call_id": "1", "output": "b"},
                  {"role": "user", "content": [{"type": "input_text", "text": "c"}]}],
        "tools": [{"type": "function", "name": "x", "parameters": SCHEMA}], "instructions": "s",
        "previous_response_id": None,
        "stop": ["Q"], "max_output_tokens": 5, "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "text"}},
    }),
    (ANTHROPIC, {
        "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}, USED]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
                     "content": "b"}]}],
        "tools": [{"name": "x", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
        "system": "s", "stop_sequences": ["Q"], "max_tokens": 5,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), WELL_FORMED, ids=[path for path, _ in WELL_FORMED])
async def test_mutated_requests_are_answered_or_refused(path: str, body: dict[str, Any]) -> None:
    async def generate(prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        return [Completion([5, EOS], [-1.0] * 2, [0] * 2, "stop") for _ in range(n)]

    async with served(generate, max_calls=10_000) as (client, _, [to]):
        assert (await post(client, to, path, body))[0] == 200
        statuses: Counter[int] = Counter()
        for seed in range(1500):
            changed = mutated(body, random.Random(seed))
            status, response = await post(
                client,
                to,
                path,
                {**changed, "stream": False} if isinstance(changed, dict) else changed,
            )
            assert not to.failed.done(), (seed, changed, to.failed.exception())
            assert status == 200 or (status in (400, 404) and response["error"]["message"]), (
                seed,
                changed,
                status,
                response,
            )
            statuses[status] += 1
        assert statuses[200] > 100 and statuses[400] > 100, statuses


async def test_compressed_bodies_are_bounded_as_they_unfold() -> None:
    async with served(Calculating()) as (client, _, [to]):
        bomb = gzip.compress(bytes(64 << 20))
        assert (await post(client, to, OPENAI, bomb, **{"Content-Encoding": "gzip"}))[0] == 413
        status, response = await post(
            client, to, OPENAI, b"no gzip", **{"Content-Encoding": "gzip"}
        )
        assert status == 400 and response["error"]["message"]


async def test_key_opens_its_own_episode_and_ends_with_it() -> None:
    policy = Calculating()
    async with served(policy, 2) as (
        client,
        [first, second],
        [first_endpoint, second_endpoint],
    ):
        assert (await post(client, first_endpoint._replace(key="sk-wrong"), OPENAI, TOO_LONG))[
            0
        ] == 401
        assert (
            await post(
                client,
                first_endpoint._replace(key=second_endpoint.key),
                OPENAI,
                {"messages": [USER]},
            )
        )[0] == 200
        assert not first.tree.turns and len(second.tree.turns) == 1
    again = ModelEndpoint()
    await again.open()
    async with again.serving(first, None) as ended:
        pass
    async with aiohttp.ClientSession() as client, again.serving(second, None) as to:
        assert (await post(client, to._replace(key=ended.key), OPENAI, {"messages": [USER]}))[
            0
        ] == 401
    await again.close()


async def open_call(to: EpisodeAccess) -> asyncio.StreamWriter:
    """A connection that has sent the head of a call with the key, but not yet its body."""
    _, writer = await asyncio.open_connection("127.0.0.1", to.port)
    writer.write(
        f"POST /v1/{OPENAI} HTTP/1.1\r\nHost: x\r\nx-api-key: {to.key}\r\nContent-Length: "
        "2\r\n\r\n".encode()
    )
    return writer


async def test_waiting_connections_of_an_episode_block_no_other() -> None:
    async with served(Calculating(), 2) as (client, _, [first_endpoint, second_endpoint]):
        opened = [await open_call(first_endpoint) for _ in range(200)]
        await asyncio.sleep(0.2)
        waiting = asyncio.create_task(post(client, first_endpoint, OPENAI, {"messages": [USER]}))
        assert (await post(client, second_endpoint, OPENAI, {"messages": [USER]}))[0] == 200
        assert not waiting.done()
        for writer in opened:
            writer.close()
        assert (await waiting)[0] == 200


async def test_connections_without_the_key_are_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some connections say nothing, some ask without the key.

    The oldest of them are closed for new ones.
    """

    async with served(Calculating()) as (client, _, [to]):
        opened = [await asyncio.open_connection("127.0.0.1", to.port) for _ in range(200)]
        for _, writer in opened[::2]:
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await post(client, to, OPENAI, {"messages": [USER]}))[0] == 200
        monkeypatch.setattr(endpoint, "_KEY_S", 0.05)
        reader, _ = await asyncio.open_connection("127.0.0.1", to.port)
        assert await reader.read() == b"", "it has said nothing, and is gone"
        for _, writer in opened:
            writer.close()


@pytest.mark.parametrize(
    "body",
    [b"{", {"messages": [{"role": "user", "content": "a" * 300}]}, {"messages": [USER], "n": 500}],
)
async def test_an_episode_whose_calls_are_refused_without_end_is_ended(body: Any) -> None:
    policy = Calculating()
    async with served(policy, max_calls=5) as (client, [episode], [to]):
        assert (await post(client, to, OPENAI, {"messages": [USER]}))[0] == 200
        for _ in range(6):
            assert not to.ended.done()
            assert (await post(client, to, OPENAI, body))[0] == 400
        assert "more than rollout.args.max_calls=5 of its calls were refused" in await to.ended
        with pytest.raises(aiohttp.ClientConnectionError):
            await post(client, to, OPENAI, body)
        assert episode.refused == 6 and len(policy.prompts) == 1 and not to.failed.done()


def test_a_program_whose_calls_are_refused_without_end_is_ended() -> None:
    code = "call()\nwhile True: call(messages=[])"
    [sample] = roll_out(
        Calculating(), command=script(code), reward="program", on_crash=-1.0, max_calls=9
    ).samples
    assert sample.reward == -1.0 and sample.metrics["failed_limits"] == 1.0


async def test_calls_that_are_given_up_count_as_refused() -> None:
    async def never(prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        await asyncio.Event().wait()
        raise AssertionError

    async with served(never, max_calls=2) as (_, [episode], [to]):
        for count in range(3):
            writer = await open_call(to)
            writer.write(b"{}")
            writer.transport.abort()
            while episode.refused == count:
                await asyncio.sleep(0.01)
        assert "its calls were refused or given up" in await to.ended


class WatchedTokenizer:
    """A chat template or tokenizer that records which threads use it, and for what."""

    def __init__(self, real: Any):
        self._real = real
        self.seen = list[tuple[int, Any]]()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._real, name)
        if not callable(attribute):
            return attribute

        def called(*arguments: Any, **keywords: Any) -> Any:
            self.seen.append((threading.get_ident(), arguments[0]))
            return attribute(*arguments, **keywords)

        return called


async def test_too_long_requests_are_not_tokenised() -> None:
    """All others are tokenised in a thread."""

    template = WatchedTokenizer(TEMPLATE)
    tokenizer = WatchedTokenizer(TOKENIZER)
    episode = Episode(Calculating(), tokenizer, template, JsonParser(), SAMPLING)  # type: ignore[arg-type]
    await episode.complete([USER])
    encoded = len(tokenizer.seen)
    for messages, message in (
        ([{**USER, "content": "a" * 250_000}], r"2500\d\d characters"),
        ([USER] * 5000, "5000 messages"),
    ):
        with pytest.raises(
            RequestRefused, match=f"the maximum context length is exceeded: {message}"
        ):
            await episode.complete(messages)
    assert len(tokenizer.seen) == encoded
    used = {thread for thread, _ in template.seen} | {
        thread for thread, content in tokenizer.seen if isinstance(content, str)
    }
    assert used and threading.get_ident() not in used


async def test_calls_of_an_episode_are_read_one_by_one() -> None:
    """This is so for calls that are given up, too."""

    episode = Episode(Calculating(), TOKENIZER, TEMPLATE, JsonParser(), SAMPLING)
    go = threading.Event()
    running = list[int]()

    def read() -> None:
        running.append(1)
        go.wait(60)

    calls = [asyncio.create_task(episode.aside(read)) for _ in range(3)]
    while not running:
        await asyncio.sleep(0.01)
    calls[0].cancel()
    await asyncio.sleep(0.05)
    assert len(running) == 1, "the next one waits for the thread, not for who has asked"
    go.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert len(running) == 3


TOOLS = [{"type": "function", "function": {"name": "x", "parameters": {}}}]


def cpu_s(function: Any) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


@pytest.mark.parametrize(
    "text",
    ["<tool_call>", '<tool_call>{"name":', "<tool_call>{}</tool_call>", "<tool_call></tool_call"],
)
def test_looking_for_calls_takes_linear_time(text: str) -> None:
    """16,000 unclosed marks once took 18 s of CPU."""
    assert cpu_s(lambda: json_calls(text * 16_000, TOOLS)) < 1.0


def test_a_text_that_a_parser_reads_for_too_long_stays_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A parser that catches every exception has a regular expression that would take years."""

    def parse() -> Any:
        for _ in range(3):
            with contextlib.suppress(Exception):
                re.fullmatch("(a+)+b", "a" * 60)
        return "", []

    monkeypatch.setattr(tool_parsers, "_CPU_S", 0.05)
    before = signal.signal(signal.SIGPROF, tool_parsers._end_parsing)
    try:
        assert tool_parsers._in_time(parse) is None
        assert tool_parsers._in_time(lambda: ("x", [])) == ("x", [])
    finally:
        signal.signal(signal.SIGPROF, before)


@pytest.mark.long
async def test_sglang_parsers_run_beside_the_event_loop() -> None:
    """They find calls, and give up on what they cannot read."""

    parser = find_parser("qwen25", "key")
    call_text = '<tool_call>\n{"name": "x", "arguments": {"a": 1}}\n</tool_call>'
    try:
        assert await parser(call_text, TOOLS) == ("", [ToolCall("x", '{"a": 1}')])
        with pytest.raises(ValueError, match="name"):
            await parser(call_text, [{"type": "function", "function": {"name": ["x"]}}])
        text = "<tool_call>\n" * 40_000
        assert await parser(text, TOOLS) == (text, [])
        assert await parser(call_text, TOOLS) == ("", [ToolCall("x", '{"a": 1}')])
    finally:
        await parser.close()


async def test_calls_of_an_episode_are_bounded() -> None:
    """Calls in flight count."""

    async with served(Calculating(), max_calls=5) as (client, [episode], [to]):
        responses = await asyncio.gather(
            *(post(client, to, OPENAI, {"messages": [USER], "n": 2}) for _ in range(4))
        )
        assert (
            sorted(status for status, _ in responses) == [200, 200, 400, 400]
            and len(episode.tree.turns) == 4
        )
        [message, _] = [body["error"]["message"] for status, body in responses if status == 400]
        assert message == "rollout.args.max_calls=5 is the most that an episode may sample"


async def test_agent_that_hangs_up_during_an_answer_ends_nothing() -> None:
    async with served(Calculating()) as (client, _, [to]):
        body = json.dumps({"messages": [USER], "stream": True}).encode()
        for pause_s in (0.0, 0.005, 0.01, 0.011, 0.012, 0.02):
            _, writer = await asyncio.open_connection("127.0.0.1", to.port)
            head = (
                f"POST /v1/{OPENAI} HTTP/1.1\r\nHost: x\r\nx-api-key: "
                f"{to.key}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await asyncio.sleep(pause_s)
            writer.transport.abort()
        assert (await post(client, to, OPENAI, {"messages": [USER]}))[
            0
        ] == 200 and not to.failed.done()


@pytest.mark.parametrize(
    "arguments",
    ["[" * 20_000, '{"a": NaN}', '{"a": 1e999}', r'{"a": "\ud800"}', '{"a": 1', "[1]", '"x"'],
)
@pytest.mark.parametrize("parser", ["json", "qwen25"])
def test_what_is_nearly_a_call_stays_text(parser: str, arguments: str) -> None:
    text = '<tool_call>\n{"name": "x", "arguments": ' + arguments + "}\n</tool_call>"
    tools = [{"type": "function", "function": {"name": "x", "parameters": {}}}]
    calls = json_calls if parser == "json" else sglang_calls(parser)
    assert calls(text, tools) == (text, [])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("print('[' * 100_000)", "reward"),
        ("print(json.dumps({'reward': 1, **{f'own{n}': 0 for n in range(40)}}))", "reward"),
        ("print(json.dumps({'reward': 1, 'a/b c': 0}))", "reward"),
        ("print('{\"reward\": NaN}')", "reward"),
        ("print('x' * (20 << 20), flush=True)\nimport time; time.sleep(60)", "limits"),
        (
            "import subprocess, time\nrunning = [subprocess.Popen(['sleep', '60']) for _ in "
            "range(270)]\ntime.sleep(60)",
            "limits",
        ),
    ],
)
def test_what_a_program_prints_and_starts_is_bounded(code: str, kind: str) -> None:
    [sample] = roll_out(
        Calculating(), command=script(f"call()\n{code}"), reward="program", on_crash=-1.0
    ).samples
    assert sample.reward == -1.0 and sample.metrics[f"failed_{kind}"] == 1.0


def test_the_last_line_of_much_output_is_the_reward() -> None:
    code = "call(); print('x' * (2 << 20)); print(0.5)"
    assert roll_out(Calculating(), command=script(code), reward="program").samples[0].reward == 0.5


def test_program_with_only_refused_calls_ends_the_run() -> None:
    """The run's message has the reason."""
    with pytest.raises(
        RuntimeError,
        match=r"sampled nothing .* its last call was refused: the maximum context length is "
        r"exceeded",
    ):
        roll_out(
            Calculating(),
            command=script("print(call(messages=[{'role': 'user', 'content': 'a' * 300}]))"),
            max_unanswered=0.0,
        )


RAW = f"""
import os, socket, sys
body = b'{{"messages": [{{"role": "user", "content": "6*7="}}]}}'
host, port = os.environ["OPENAI_BASE_URL"].removeprefix("http://").removesuffix("/v1").split(":")
connection = socket.create_connection((host, int(port)))
head = b"POST /v1/{OPENAI} HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\nx-api-key: %s\\r\\nContent-Length: %d\\r\\n\\r\\n"
connection.sendall(head % (os.environ["OPENAI_API_KEY"].encode(), len(body)) + body)
answer = b""
while piece := connection.recv(1 << 16):
    answer += piece
print(float(b" 200 " in answer))
"""


def test_programs_run_at_once() -> None:
    """No call is answered before all programs have called."""
    count = 100
    all_calling = asyncio.Event()
    calls: list[None] = []

    async def generate(prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        calls.append(None)
        if len(calls) == count:
            all_calling.set()
        await all_calling.wait()
        return [Completion([5, EOS], [-1.0] * 2, [0] * 2, "stop")]

    sandbox = next(kind for kind in ("bwrap", "namespace", "limits") if can(kind))
    command = [sys.executable, "-I", "-S", "-c", RAW]
    group = roll_out(
        generate, n=count, command=command, reward="program", sandbox=sandbox, deadline_s=390.0
    )
    assert [sample.reward for sample in group.samples] == [1.0] * count


def test_an_endpoint_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sandbox = next(kind for kind in ("bwrap", "namespace", "limits") if can(kind))
    roll_out(Calculating(), command=script("call(); print(1)"), reward="program", sandbox=sandbox)
    assert not [*tmp_path.iterdir()]


async def test_no_program_runs_after_the_watch_over_memory_has_failed(monkeypatch) -> None:
    def fails(pids: list[int]) -> None:
        raise OSError("/proc is gone")

    monkeypatch.setattr(jail, "_used_by", fails)
    monkeypatch.setattr(jail, "_LOOK_S", 0.01)

    cell = jail.Jail(jail.LIMITS, memory_mib=1024, file_mib=1, deadline_s=60.0)
    assert (await cell.run(["sleep", "0.5"], "", {}, None)).reason == ""
    with pytest.raises(OSError, match="/proc is gone"):
        await cell.run(["sleep", "0.5"], "", {}, None)
    await cell.close()


async def call_and_close(
    to: EpisodeAccess, body: dict[str, Any], reads: int, *headers: str
) -> bytes:
    """Sends a call, reads at most `reads` bytes of its answer, and closes the connection.

    With 0 it reads all.
    """
    text = json.dumps(body).encode()
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {to.key}",
        f"Content-Length: {len(text)}",
        *headers,
    ]

    def talk() -> bytes:
        with socket.create_connection(("127.0.0.1", to.port), timeout=30) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + text)
            if reads:
                return connection.recv(reads)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))

    return await asyncio.to_thread(talk)


@pytest.mark.parametrize("header", ["Connection: close", "Connection: keep-alive"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_nobody_read_is_no_sample(stream: bool, header: str) -> None:
    """The agent reads one byte and asks again; one of two parallel calls is dropped; an answer that
    was read stays.
    """

    async with served(Calculating()) as (_, [episode], [to]):
        request = {"messages": [USER], "stream": stream}
        before = await call_and_close(to, request, 0, "Connection: close")
        assert b"200 OK" in before and len(episode.tree.turns) == 1
        await call_and_close(to, request, 1, header)
        await until(lambda: episode.refused == 1)
        assert len(episode.tree.turns) == 1
        await asyncio.gather(
            call_and_close(to, request, 1, header),
            call_and_close(to, request, 0, "Connection: close"),
        )
        await until(lambda: episode.refused == 2)
        assert len(episode.tree.leaves()) == 2
        assert episode.last_content and episode.last_refusal == "its answer was not read"


async def test_a_dropped_turn_comes_back_when_it_is_continued() -> None:
    async with served(Calculating()) as (client, [episode], [to]):
        _, response = await post(client, to, OPENAI, {"messages": [USER]})
        [turn] = episode.tree.turns
        episode.unread([turn])
        assert episode.tree.turns == [] and episode.last_content == ""
        message = response["choices"][0]["message"]
        await post(client, to, OPENAI, {"messages": [USER, message, USER]})
        first, second = episode.tree.turns
        assert (first, second.parent, episode.tree.leaves()) == (turn, turn, [second])
        episode.unread([turn])
        assert turn in episode.tree.turns, "another turn continues it"


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not happened():
            await asyncio.sleep(0.01)
