"""Requests that unmodified agents send with the official packages, in one process with the real
endpoint. The policy is a fake.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from test_agents_endpoint import EOS, TOKENIZER
from test_agents_hostile import ANTHROPIC, OPENAI, RESPONSES, TEMPLATE, USER, post, served

from megarl.agents import anthropic_messages, openai_chat, openai_responses
from megarl.agents.episode import Episode
from megarl.generator.completions import Completion, Sampling

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.timeout(900)
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {}},
        "strict": True,
    },
}


class WithoutTools:
    """A chat template that has no place for tools."""

    def render(self, **values: Any) -> str:
        return TEMPLATE.variants["default"].render(**{**values, "tools": None})


WITHOUT_TOOLS = replace(TEMPLATE, variants={"default": WithoutTools()})
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>'


class FixedCompletions:
    """A fake of generate: says given texts, one id a character, up to the first stop string or the
    end-of-text.
    """

    def __init__(self, *texts: str):
        self.texts = list(texts)
        self.prompts = []

    async def __call__(self, prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        self.prompts.append(TOKENIZER.decode_all(prompt_ids))
        completions = []
        for _ in range(n):
            text = self.texts.pop(0)
            ends = [
                position + len(string)
                for string in sampling.stop
                if (position := text.find(string)) >= 0
            ]
            ids = [
                TOKENIZER.backend.get_vocab()[letter]
                for letter in text[: min(ends, default=len(text))]
            ]
            ids = (ids if ends else [*ids, EOS])[: sampling.max_tokens]
            logprobs = [-0.25 * (number + 1) for number in range(len(ids))]
            completions.append(
                Completion(
                    ids, logprobs, [0] * len(ids), "stop" if ends or ids[-1] == EOS else "length"
                )
            )
        return completions


def talk(
    policy: FixedCompletions, agent: Callable[[Any, Any], Coroutine[Any, Any, None]]
) -> Episode:
    """Lets an agent call the policy with clients of both packages. Returns its episode."""

    async def run() -> Episode:
        async with served(policy) as (_, [episode], [to]):
            url = f"http://127.0.0.1:{to.port}"
            async with (
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=to.key, max_retries=0) as one,
                anthropic.AsyncAnthropic(
                    base_url=url, api_key=to.key, max_retries=0
                ) as anthropic_client,
            ):
                await agent(one, anthropic_client)
            return episode

    return asyncio.run(run())


@pytest.mark.parametrize("stop", ["Ob", ["Q", "Ob"]])
def test_stop_of_openai(stop: Any):
    async def agent(client: Any, _: Any) -> None:
        one = (await client.chat.completions.create(model="x", messages=[USER], stop=stop)).choices[
            0
        ]
        assert (one.message.content, one.finish_reason) == ("think", "stop")
        messages = [
            USER,
            one.message.model_dump(exclude_none=True),
            {"role": "user", "content": "7"},
        ]
        stream = await client.chat.completions.create(
            model="x", messages=messages, stop=stop, stream=True
        )
        parts = [chunk.choices[0] async for chunk in stream]
        assert (
            "".join(part.delta.content or "" for part in parts) == "b"
            and parts[-1].finish_reason == "stop"
        )

    policy = FixedCompletions("thinkObserve", "bOb")
    episode = talk(policy, agent)
    assert (
        policy.prompts[1] == "<bos><user>6*7=<assistant>thinkOb<eos><user>7<assistant>"
        and not episode.counts["rewritten"]
    )
    assert len(episode.tree.leaves()) == 1


def test_stop_sequences_of_anthropic():
    async def agent(_: Any, client: Any) -> None:
        request = {"model": "x", "max_tokens": 50, "stop_sequences": ["Q", "Ob"]}
        one = await client.messages.create(messages=[USER], **request)
        assert (one.content[0].text, one.stop_reason, one.stop_sequence) == (
            "think",
            "stop_sequence",
            "Ob",
        )
        messages = [
            USER,
            {"role": "assistant", "content": one.content[0].text},
            {"role": "user", "content": "7"},
        ]
        async with client.messages.stream(messages=messages, **request) as stream:
            two = await stream.get_final_message()
        assert (two.content[0].text, two.stop_reason, two.stop_sequence) == (
            "b",
            "stop_sequence",
            "Q",
        )
        three = await client.messages.create(messages=[USER], **request)
        assert (three.content[0].text, three.stop_reason, three.stop_sequence) == (
            "c",
            "end_turn",
            None,
        )

    episode = talk(FixedCompletions("thinkObserve", "bQ", "c"), agent)
    assert len(episode.tree.leaves()) == 2


def test_logprobs_are_those_that_were_sampled():
    async def agent(client: Any, _: Any) -> None:
        request = {"model": "x", "messages": [USER], "logprobs": True, "top_logprobs": 0}
        one = (await client.chat.completions.create(**request)).choices[0].logprobs.content
        assert [(token.token, token.logprob, token.bytes, token.top_logprobs) for token in one] == [
            ("a", -0.25, [97], []),
            ("<", -0.5, [60], []),
        ]
        parts = [
            chunk.choices[0]
            async for chunk in await client.chat.completions.create(**request, stream=True)
        ]
        assert [
            token.token for part in parts if part.logprobs for token in part.logprobs.content
        ] == ["b"]
        assert (await client.chat.completions.create(model="x", messages=[USER])).choices[
            0
        ].logprobs is None

    talk(FixedCompletions("a<", "b", "c"), agent)


def test_fields_that_ask_for_nothing_else_are_taken():
    """Fields of the package's own signature, and fields that agents add for other servers."""

    async def agent(client: Any, anthropic_client: Any) -> None:
        harmless = {
            "frequency_penalty": 0.0,
            "presence_penalty": 0,
            "logit_bias": {},
            "logprobs": False,
            "top_logprobs": None,
            "max_completion_tokens": 100,
            "metadata": {"a": "b"},
            "modalities": ["text"],
            "n": 1,
            "parallel_tool_calls": False,
            "prediction": None,
            "prompt_cache_key": "k",
            "reasoning_effort": "low",
            "response_format": {"type": "text"},
            "safety_identifier": "s",
            "seed": 7,
            "service_tier": "auto",
            "stop": None,
            "store": False,
            "stream_options": {"include_usage": True},
            "temperature": 0.3,
            "tool_choice": "auto",
            "tools": [TOOL],
            "top_p": 0.5,
            "user": "u",
            "verbosity": "low",
            "extra_body": {
                "repetition_penalty": 1.0,
                "top_k": 20,
                "min_p": 0,
                "chat_template_kwargs": {},
                "min_tokens": 0,
            },
        }
        messages = [
            {"role": "developer", "content": [{"type": "text", "text": "s"}], "name": "d"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "6*"}, {"type": "text", "text": "7="}],
                "name": "u",
            },
        ]
        stream = await client.chat.completions.create(
            model="x", messages=messages, stream=True, **harmless
        )
        chunks = [chunk async for chunk in stream]
        assert (
            chunks[-1].usage.completion_tokens == len(CALL) + 1
            and chunks[-2].choices[0].finish_reason == "tool_calls"
        )
        [call] = chunks[0].choices[0].delta.tool_calls
        texts = {
            "role": "assistant",
            "name": "solver",
            "content": None,
            "refusal": None,
            "audio": None,
            "function_call": None,
        }
        texts["tool_calls"] = [call.model_dump(exclude={"index"})]
        result = {
            "role": "tool",
            "tool_call_id": call.id,
            "content": [{"type": "text", "text": "42"}],
            "name": "calculate",
        }
        two = await client.chat.completions.create(
            model="x", messages=[*messages, texts, result], **{**harmless, "stream_options": None}
        )
        assert two.choices[0].message.content == "42"
        of_anthropic = {
            "metadata": {"user_id": "u"},
            "service_tier": "auto",
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": [],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "extra_body": {
                "output_config": {"effort": "low"},
                "mcp_servers": [],
                "temperature": 0.3,
                "top_k": 5,
                "top_p": 0.9,
            },
        }
        three = await anthropic_client.messages.create(
            model="x", max_tokens=50, messages=[USER], **of_anthropic
        )
        assert three.content[0].text == "3"

    policy = FixedCompletions(CALL, "42", "3")
    episode = talk(policy, agent)
    assert (
        policy.prompts[1].endswith(f"{CALL}<eos><tool>42<assistant>")
        and policy.prompts[2] == "<bos><system>s<user>6*7=<assistant>"
    )
    assert not episode.counts["rewritten"] and len(episode.tree.leaves()) == 2, (
        "an assistant's name is the agent's label"
    )


def test_no_tools_are_shown_where_none_may_be_called():
    async def agent(client: Any, anthropic_client: Any) -> None:
        one = await client.chat.completions.create(
            model="x", messages=[USER], tools=[TOOL], tool_choice="none"
        )
        assert one.choices[0].message.content == CALL and one.choices[0].finish_reason == "stop"
        tool = {"name": "calculate", "input_schema": {"type": "object"}}
        two = await anthropic_client.messages.create(
            model="x", max_tokens=5, messages=[USER], tools=[tool], tool_choice={"type": "none"}
        )
        assert two.stop_reason == "end_turn"

    policy = FixedCompletions(CALL, "a")
    talk(policy, agent)
    assert policy.prompts == ["<bos><user>6*7=<assistant>"] * 2


FORCED = (
    "training uses the policy's log-probs, and this would need tokens from another distribution"
)
DRAWN = "the run's rollout settings say how tokens are drawn"
FUNCTION = {"type": "function", "function": {"name": "calculate"}}
REFUSED = [
    (
        OPENAI,
        "tool_choice",
        "required",
        "tool_choice=required: must be auto or none: no call can be forced upon the policy: "
        f"{FORCED}",
    ),
    (OPENAI, "tool_choice", FUNCTION, FORCED),
    (
        OPENAI,
        "response_format",
        {"type": "json_schema"},
        f"response_format.type=json_schema: no format can be forced: {FORCED}",
    ),
    (OPENAI, "guided_json", {}, f"guided_json={{}}: cannot be set: {FORCED}"),
    (OPENAI, "presence_penalty", 0.5, f"presence_penalty=0.5: must be 0: {DRAWN}"),
    (OPENAI, "frequency_penalty", -1, DRAWN),
    (OPENAI, "repetition_penalty", 1.1, "repetition_penalty=1.1: must be 1"),
    (OPENAI, "logit_bias", {"5": 100}, DRAWN),
    (
        OPENAI,
        "chat_template_kwargs",
        {"tools": []},
        "chat_template_kwargs: tools is set for every conversation",
    ),
    (OPENAI, "top_logprobs", 5, "only the log-probs of sampled tokens are known"),
    (OPENAI, "functions", [{"name": "f"}], "use tools instead"),
    (OPENAI, "modalities", ["text", "audio"], "modalities=['text', 'audio']: must be ['text']"),
    (OPENAI, "stop", ["x", ""], "stop=['x', '']: must be texts of 1 to 256 characters"),
    (OPENAI, "stop", "x" * 257, "must be texts of 1 to 256 characters"),
    (OPENAI, "stop", 5, "does not have the required form"),
    (OPENAI, "stop", ["x"] * 33, "stop: 33 texts; with those of rollout.stop, there can be 32"),
    (RESPONSES, "tool_choice", "required", FORCED),
    (
        RESPONSES,
        "tool_choice",
        {"type": "allowed_tools", "mode": "auto", "tools": []},
        "no call can be forced upon the policy",
    ),
    (
        RESPONSES,
        "text",
        {"format": {"type": "json_schema"}},
        f"text.format.type=json_schema: no format can be forced: {FORCED}",
    ),
    (RESPONSES, "response_format", {"type": "json_object"}, FORCED),
    (RESPONSES, "logit_bias", {"5": 100}, DRAWN),
    (RESPONSES, "presence_penalty", 0.5, DRAWN),
    (RESPONSES, "top_logprobs", 5, "only the log-probs of sampled tokens are known"),
    (RESPONSES, "stop", ["x"] * 33, "stop: 33 texts; with those of rollout.stop, there can be 32"),
    (
        RESPONSES,
        "background",
        True,
        "background=True: must be False: an answer is sampled while its call waits",
    ),
    (
        RESPONSES,
        "conversation",
        "conv_1",
        "conversation=conv_1: cannot be set: use previous_response_id to go on from an answer",
    ),
    (RESPONSES, "prompt", {"id": "pmpt_1"}, "prompt templates are not supported"),
    (
        RESPONSES,
        "truncation",
        "auto",
        "truncation=auto: must be disabled: the policy is trained on the conversation as it was sent",
    ),
    (
        RESPONSES,
        "context_management",
        [{"type": "compaction"}],
        "the policy is trained on the conversation as it was sent",
    ),
    *(
        (
            RESPONSES,
            "tools",
            [{"type": kind, "name": "x"}],
            f"tools: of type {kind}: only functions are supported",
        )
        for kind in (
            "web_search",
            "file_search",
            "computer_use_preview",
            "code_interpreter",
            "mcp",
            "custom",
            "local_shell",
            "namespace",
        )
    ),
    *(
        (
            RESPONSES,
            "input",
            [{"type": kind}],
            f"an item of type {kind}: only message, function_call",
        )
        for kind in (
            "custom_tool_call",
            "mcp_call",
            "web_search_call",
            "local_shell_call",
            "compaction",
        )
    ),
    (
        RESPONSES,
        "input",
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}],
        "the policy's messages contain its reasoning",
    ),
    (ANTHROPIC, "stop_sequences", [7], "stop_sequences=[7]: must be texts"),
    (
        ANTHROPIC,
        "tool_choice",
        {"type": "any"},
        "tool_choice.type=any: must be auto or none: no call can be forced upon the policy",
    ),
    (ANTHROPIC, "output_config", {"format": {"type": "json_schema"}}, FORCED),
    (ANTHROPIC, "mcp_servers", [{"name": "x"}], "the endpoint calls no tools"),
]


def test_fields_that_would_change_the_samples_are_refused() -> None:
    """The answer names the reason."""
    policy = FixedCompletions()

    async def run() -> None:
        async with served(policy) as (client, _, [to]):
            for path, name, value, reason in REFUSED:
                status, response = await post(
                    client,
                    to,
                    path,
                    {"messages": [USER], "input": "6*7=", "max_tokens": 5, name: value},
                )
                assert status == 400 and reason in response["error"]["message"], (
                    name,
                    value,
                    response,
                )

    asyncio.run(run())
    assert not policy.prompts


@pytest.mark.parametrize(
    ("form", "module", "name"),
    [
        (openai_chat, "openai.types.chat.completion_create_params", "CompletionCreateParamsBase"),
        (openai_chat, "sglang.srt.entrypoints.openai.protocol", "ChatCompletionRequest"),
        (
            openai_responses,
            "openai.types.responses.response_create_params",
            "ResponseCreateParamsBase",
        ),
        (openai_responses, "sglang.srt.entrypoints.openai.protocol", "ResponsesRequest"),
        (
            anthropic_messages,
            "anthropic.types.beta.message_create_params",
            "MessageCreateParamsBase",
        ),
    ],
)
def test_each_known_field_is_honoured_ignored_or_refused(
    form: ModuleType, module: str, name: str
) -> None:
    """The installed packages say which fields there are. Private ones are not part of a request."""
    refused = set(getattr(form, "_NEUTRAL", openai_chat.NEUTRAL))
    schemas = {
        field
        for field in vars(importlib.import_module(module))[name].__annotations__
        if not field.startswith("_")
    }
    assert schemas - form.HONOURED - form.IGNORED - refused == set()
    for first, second in itertools.combinations(
        (form.HONOURED, form.IGNORED, refused - form.HONOURED), 2
    ):
        assert first & second == set()


@pytest.mark.parametrize("path", [OPENAI, RESPONSES, ANTHROPIC])
async def test_tools_that_the_template_leaves_out_are_refused(path: str) -> None:
    """With a template without a place for tools, the policy would answer as if without tools."""
    tools = {
        OPENAI: TOOL,
        RESPONSES: {"type": "function", **TOOL["function"]},
        ANTHROPIC: {"name": "calculate", "input_schema": {}},
    }

    policy = FixedCompletions("42")
    async with served(policy) as (client, [episode], [to]):
        episode.template = WITHOUT_TOOLS
        body = {"messages": [USER], "input": "6*7=", "max_tokens": 5}
        status, response = await post(client, to, path, {**body, "tools": [tools[path]]})
        assert (status, "leaves out the tool 'calculate'" in response["error"]["message"]) == (
            400,
            True,
        ), response
        assert not policy.prompts
        assert (await post(client, to, path, body))[0] == 200
