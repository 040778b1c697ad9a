"""OpenAI's Responses API, with its official package, in one process with the real endpoint.

The policy is a fake.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from test_agents_endpoint import TOKENIZER
from test_agents_fields import CALL, FixedCompletions, talk
from test_agents_hostile import RESPONSES, USER, post, served

from megarl.agents import openai_responses
from megarl.agents.episode import Tree
from megarl.generator.completions import Completion, Sampling
from megarl.rewards.score import Score

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.timeout(900)
TOOL = {
    "type": "function",
    "name": "calculate",
    "description": "integer arithmetic",
    "parameters": {"type": "object"},
    "strict": True,
}
ASKED = {"model": "x", "tools": [TOOL]}
BEGIN = "<bos><tools>calculate<user>6*7=<assistant>"


def result(call: Any, output: Any = "42") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}


def learned(tree: Tree) -> list[str]:
    """The sampled ids that each branch learns from, as text pieces."""
    samples = tree.samples(1, TOKENIZER.decode_all, Score(1.0), {})
    masks = [sample.policy_mask or [1] * len(sample.token_ids) for sample in samples]
    return [
        "".join(
            TOKENIZER.piece(number)
            for number, trained in zip(sample.token_ids, mask, strict=True)
            if trained
        )
        for sample, mask in zip(samples, masks, strict=True)
    ]


def test_one_turn_has_all_that_the_package_says_of_an_answer():
    async def agent(client: Any, _: Any) -> None:
        raw = await client.responses.with_raw_response.create(
            model="x", instructions="s", input="6*7=", metadata={"a": "b"}
        )
        # the client does not check it
        openai.types.responses.Response.model_validate(json.loads(raw.content))
        one = raw.parse()
        assert (one.output_text, one.status, one.error, one.incomplete_details) == (
            "42",
            "completed",
            None,
            None,
        )
        assert (one.usage.input_tokens, one.usage.output_tokens, one.usage.total_tokens) == (
            9,
            3,
            12,
        )
        [message] = one.output
        assert (message.type, message.role, message.status, len(message.content)) == (
            "message",
            "assistant",
            "completed",
            1,
        )
        messages = [
            {"role": "developer", "content": "s"},
            {"role": "user", "content": [{"type": "input_text", "text": "6*7="}]},
        ]
        two = await client.responses.create(model="x", input=messages, max_output_tokens=2)
        assert (two.output_text, two.status, two.incomplete_details.reason) == (
            "12",
            "incomplete",
            "max_output_tokens",
        )
        assert two.output[0].status == "incomplete" and one.id != two.id

    policy = FixedCompletions("42", "12345")
    talk(policy, agent)
    assert policy.prompts == ["<bos><system>s<user>6*7=<assistant>"] * 2, (
        "instructions are what the developer says"
    )


@pytest.mark.parametrize(
    "order", ["grouped", "each with its result", "calls first", "as plain items", "with reasoning"]
)
@pytest.mark.parametrize("says", ["so ", ""])
def test_a_text_and_parallel_calls_come_back_as_one_turn(says: str, order: str):
    async def agent(client: Any, _: Any) -> None:
        one = await client.responses.create(**ASKED, input="6*7=")
        assert (
            one.output_text == says.strip()
            and [item.type for item in one.output[-2:]] == ["function_call"] * 2
        )
        *text, first, second = one.output
        assert (
            json.loads(second.arguments) == {"expression": "6*7"}
            and first.call_id != second.call_id
        )
        items: dict[str, list[Any]] = {
            "grouped": [*text, first, second, result(first), result(second)],
            "each with its result": [*text, first, result(first), second, result(second)],
            "calls first": [first, second, *text, result(first), result(second)],
            "with reasoning": [
                {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"},
                *text,
                first,
                second,
            ],
            "as plain items": [
                {"role": "assistant", "content": item.content[0].text} for item in text
            ],
        }
        items["with reasoning"] += [result(first), result(second)]
        calls = [
            item.model_dump(include={"type", "call_id", "name", "arguments"})
            for item in (first, second)
        ]
        items["as plain items"] += [
            *calls,
            result(first, [{"type": "input_text", "text": "42"}]),
            result(second),
        ]
        two = await client.responses.create(**ASKED, input=[USER, *items[order]])
        assert two.output_text == "it is 42"

    policy = FixedCompletions(f"{says}{CALL}{CALL}", "it is 42")
    episode = talk(policy, agent)
    assert policy.prompts[1] == f"{BEGIN}{says}{CALL}{CALL}<eos><tool>42<tool>42<assistant>"
    assert not episode.counts["rewritten"] and learned(episode.tree) == [
        f"{says}{CALL}{CALL}<eos>it is 42<eos>"
    ]


def test_letters_for_private_use_are_no_names_of_special_tokens():
    """Terminals show such characters with fonts that have them, from U+E000 on."""

    async def agent(client: Any, _: Any) -> None:
        await client.responses.create(model="x", input="6\ue0b0*\ue1017\ue100=")

    policy = FixedCompletions("42")
    talk(policy, agent)
    assert policy.prompts == ["<bos><user>6<unk>*<unk>7<unk>=<assistant>"]


def test_calls_of_two_turns_stay_two_turns():
    async def agent(client: Any, _: Any) -> None:
        items: list[Any] = [USER]
        for _ in range(3):
            items += (await client.responses.create(**ASKED, input=items)).output
            items += [result(item) for item in items[-1:] if item.type == "function_call"]
        assert items[-1].content[0].text == "42"

    policy = FixedCompletions(CALL, CALL, "42")
    episode = talk(policy, agent)
    assert (
        policy.prompts[2] == f"{BEGIN}{CALL}<eos><tool>42<assistant>{CALL}<eos><tool>42<assistant>"
    )
    assert not episode.counts["rewritten"] and learned(episode.tree) == [
        f"{CALL}<eos>{CALL}<eos>42<eos>"
    ]


MESSAGE = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
FUNCTION = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


@pytest.mark.parametrize(
    ("text", "most", "kinds"),
    [
        (f"so {CALL}{CALL}", None, [*MESSAGE, *FUNCTION, *FUNCTION, "completed"]),
        (CALL, None, [*FUNCTION, "completed"]),
        ("42", None, [*MESSAGE, "completed"]),
        ("", None, [*MESSAGE, "completed"]),
        ("42", 1, [*MESSAGE, "incomplete"]),
    ],
)
def test_a_stream_has_the_events_that_the_package_knows(
    text: str, most: int | None, kinds: list[str]
):
    event_type = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)

    async def agent(client: Any, _: Any) -> None:
        stream = await client.responses.create(
            **ASKED, input="6*7=", stream=True, max_output_tokens=most, include=[]
        )
        events = [event_type.validate_python(event.to_dict()) async for event in stream]
        assert [event.type for event in events] == [
            f"response.{kind}" for kind in ["created", "in_progress", *kinds]
        ]
        assert [event.sequence_number for event in events] == [*range(len(events))]
        response = events[-1].response
        deltas = [event.delta for event in events if event.type.endswith(".delta")]
        text_deltas = [
            item.arguments if item.type == "function_call" else item.content[0].text
            for item in response.output
        ]
        assert (
            deltas == text_deltas
            and [event.item for event in events if event.type.endswith("item.done")]
            == response.output
        )
        assert [event.response.id for event in events[:2]] == [
            response.id
        ] * 2 and response.usage.output_tokens > 0

    talk(FixedCompletions(text), agent)


def test_the_packages_own_stream_helper_goes_on_by_tools():
    async def agent(client: Any, _: Any) -> None:
        async with client.responses.stream(**ASKED, input="6*7=") as stream:
            one = await stream.get_final_response()
        [call] = one.output
        async with client.responses.stream(
            **ASKED, input=[result(call)], previous_response_id=one.id
        ) as stream:
            snapshots = [
                event.snapshot
                async for event in stream
                if event.type == "response.output_text.delta"
            ]
            two = await stream.get_final_response()
        assert snapshots == ["42"] == [two.output_text] and two.previous_response_id == one.id

    policy = FixedCompletions(CALL, "42")
    episode = talk(policy, agent)
    assert policy.prompts[1] == f"{BEGIN}{CALL}<eos><tool>42<assistant>" and learned(
        episode.tree
    ) == [f"{CALL}<eos>42<eos>"]


def test_conversations_go_on_from_a_response_and_branch():
    async def agent(client: Any, _: Any) -> None:
        one = await client.responses.create(**ASKED, instructions="s", input="6*7=")
        for text in ("a", "b"):  # the second one is another branch
            two = await client.responses.create(
                **ASKED, instructions="s", input=text, previous_response_id=one.id
            )
        second_message = {"role": "user", "content": "c"}
        await client.responses.create(
            **ASKED, instructions="s", input=[second_message], previous_response_id=two.id
        )
        sent_whole = [
            USER,
            *one.output,
            {"role": "user", "content": "b"},
            *two.output,
            second_message,
        ]
        await client.responses.create(**ASKED, instructions="s", input=sent_whole)
        await client.responses.create(**ASKED, input=[second_message], previous_response_id=two.id)

    policy = FixedCompletions("1", "2", "3", "4", "5", "6")
    episode = talk(policy, agent)
    begin = "<bos><tools>calculate<system>s<user>6*7=<assistant>1<eos>"
    prompts = [
        f"{begin}<user>{text}<assistant>"
        for text in ("a", "b", "b<assistant>3<eos><user>c", "b<assistant>3<eos><user>c")
    ]
    assert policy.prompts[1:5] == prompts, "by its id and as a whole"
    assert policy.prompts[5] == prompts[3].replace("<system>s", ""), (
        "instructions do not carry over, as OpenAI has it"
    )
    assert (
        learned(episode.tree) == ["1<eos>2<eos>", "3<eos>4<eos>", "5<eos>", "6<eos>"]
        and episode.counts["rewritten"] == 1
    )


def test_a_response_that_is_not_kept_is_not_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openai_responses, "_MOST_KEPT_LETTERS", 300)

    async def agent(client: Any, _: Any) -> None:
        async def goes_on(name: str) -> bool:
            try:
                await client.responses.create(
                    model="x", input="a", previous_response_id=name, store=False
                )
            except openai.NotFoundError as error:
                assert error.code == "previous_response_not_found" and name in error.message
                return False
            return True

        assert not await goes_on("resp_unknown")
        assert not await goes_on(
            (await client.responses.create(model="x", input="a", store=False)).id
        )
        ids = [(await client.responses.create(model="x", input="a")).id for _ in range(12)]
        assert not await goes_on(ids[0]) and await goes_on(ids[-1]), "the oldest ones are forgotten"

    talk(FixedCompletions(*"abcdefghijklmno"), agent)


async def test_the_answers_of_another_episode_are_not_found():
    async with served(FixedCompletions("1", "2"), 2) as (
        client,
        _,
        [first_endpoint, second_endpoint],
    ):
        _, answer = await post(client, first_endpoint, RESPONSES, {"input": "a"})
        assert (
            await post(
                client,
                second_endpoint,
                RESPONSES,
                {"input": "a", "previous_response_id": answer["id"]},
            )
        )[0] == 404


@pytest.mark.parametrize("by_id", [True, False])
def test_a_turn_that_was_stopped_goes_on_from_what_was_sampled(by_id: bool):
    async def agent(client: Any, _: Any) -> None:
        one = await client.responses.create(
            model="x", input="6*7=", extra_body={"stop": ["Q", "Ob"]}
        )
        assert (one.output_text, one.status) == ("think", "completed")
        next_message = {"role": "user", "content": "7"}
        sent = (
            {"input": [next_message], "previous_response_id": one.id}
            if by_id
            else {"input": [USER, *one.output, next_message]}
        )
        assert (await client.responses.create(model="x", **sent)).output_text == "b"

    policy = FixedCompletions("thinkObserve", "b")
    episode = talk(policy, agent)
    assert policy.prompts[
        1
    ] == "<bos><user>6*7=<assistant>thinkOb<eos><user>7<assistant>" and learned(episode.tree) == [
        "thinkObb<eos>"
    ]


def test_logprobs_are_those_that_were_sampled():
    async def agent(client: Any, _: Any) -> None:
        request = {
            "model": "x",
            "input": "6*7=",
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        }
        one = (await client.responses.create(**request)).output[0].content[0]
        assert [(token.token, token.logprob, token.bytes) for token in one.logprobs] == [
            ("a", -0.25, [97]),
            ("<", -0.5, [60]),
        ]
        events = [event async for event in await client.responses.create(**request, stream=True)]
        [delta] = [event for event in events if event.type == "response.output_text.delta"]
        assert [(token.token, token.logprob) for token in delta.logprobs] == [("b", -0.25)]
        assert (await client.responses.create(model="x", input="6*7=")).output[0].content[
            0
        ].logprobs == []

    talk(FixedCompletions("a<", "b", "c"), agent)


def test_fields_that_ask_for_nothing_else_are_taken():
    """Fields of the package's own signature, and fields that agents add."""

    async def agent(client: Any, _: Any) -> None:
        harmless = {
            "background": False,
            "include": ["reasoning.encrypted_content"],
            "max_tool_calls": 3,
            "metadata": {"a": "b"},
            "parallel_tool_calls": False,
            "prompt_cache_key": "k",
            "reasoning": {"effort": "low", "summary": "auto"},
            "safety_identifier": "s",
            "service_tier": "auto",
            "stream_options": {"include_obfuscation": False},
            "temperature": 0.3,
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "tool_choice": "none",
            "top_logprobs": 0,
            "top_p": 0.5,
            "truncation": "disabled",
            "user": "u",
            "extra_body": {
                "client_metadata": {},
                "repetition_penalty": 1.0,
                "stop": None,
                "conversation": None,
                "prompt": None,
            },
        }
        one = await client.responses.create(**ASKED, input="6*7=", **harmless)
        assert one.output_text == CALL and one.status == "completed", (
            "no tools are shown where none may be called"
        )

    policy = FixedCompletions(CALL)
    talk(policy, agent)
    assert policy.prompts == ["<bos><user>6*7=<assistant>"]


async def test_calls_at_the_same_time_are_branches():
    async def generate(prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        await asyncio.sleep(0.01)
        return await policy(prompt_ids, sampling, n)

    policy = FixedCompletions("1", "2", "3", "4")
    async with served(generate) as (client, [episode], [to]):
        _, one = await post(client, to, RESPONSES, {"input": "a"})
        requests = [
            post(client, to, RESPONSES, {"input": text, "previous_response_id": one["id"]})
            for text in "bcd"
        ]
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 3
        assert learned(episode.tree) == ["1<eos>2<eos>", "3<eos>", "4<eos>"]
