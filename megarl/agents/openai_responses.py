"""OpenAI's responses: reads requests as messages, writes answers as JSON
(platform.openai.com/docs/api-reference/responses).

Here a turn of the policy is several items: its text, and each of its calls. When they come back
they are joined into one message, since a conversation continues from the sampled ids only if the
message of a turn is unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.agents.episode import Answer, Episode, RequestRefused, StoredConversation, openai_call
from megarl.agents.openai_chat import (
    FORCED,
    NEUTRAL,
    ROLES,
    TRAINED,
    error,
    refuse_unless_neutral,
    stop_strings,
    template_arguments,
    text_of,
    token_logprobs,
    tool_choice,
    whole_number,
)
from megarl.agents.openai_chat import IGNORED as IGNORED_BY_CHAT
from megarl.data.chat import Message
from megarl.generator.tool_parsers import ToolCall

__all__ = ["error"]  # errors have the form of chat completions
# value of `include`; its other values name data that no answer here has
_LOGPROBS = "message.output_text.logprobs"
# of an episode; otherwise its calls together could keep a whole request each
_MOST_KEPT_LETTERS = 16 << 20
_NEUTRAL = {
    **NEUTRAL,
    "response_format": (({"type": "text"},), FORCED),
    "background": ((False,), "an answer is sampled while its call waits"),
    "conversation": ((), "use previous_response_id to go on from an answer"),
    "prompt": ((), "prompt templates are not supported"),
    "truncation": (("disabled",), TRAINED),
    "context_management": (([],), TRAINED),
}
HONOURED = frozenset(
    "input instructions previous_response_id tools tool_choice max_output_tokens stop stream "
    "store include text model "
    "chat_template_kwargs".split()
)
# max_tool_calls counts calls that the server makes, and the endpoint makes none.
IGNORED = (IGNORED_BY_CHAT - {"store"}) | {
    "seed",
    "reasoning",
    "max_tool_calls",
    "stream_options",
    "request_id",
}


class ResponsesRequest(NamedTuple):
    """A request of an agent."""

    messages: list[Message]  # one for each item of the input
    instructions: str  # for this call only: a call that continues its answer sends them again
    previous: str | None  # id of the response that the call continues
    tools: list[dict[str, Any]]
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    store: bool  # whether later calls may continue the answer
    logprobs: bool
    model: str
    template_arguments: dict[str, Any]


def read_request(body: dict[str, Any]) -> ResponsesRequest:
    """Raises RequestRefused for settings that cannot be honoured.

    Ignores temperature and top_p: the run decides how tokens are drawn.
    """
    refuse_unless_neutral(body, _NEUTRAL)
    asked_format = ((body.get("text") or {}).get("format") or {}).get("type", "text")
    if asked_format != "text":
        raise RequestRefused(
            f"text.format.type={str(asked_format)[:100]}: no format can be forced: {FORCED}"
        )
    choice = tool_choice("tool_choice", body.get("tool_choice") or "auto")
    content = body["input"]
    items = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return ResponsesRequest(
        messages=[message for item in items for message in _messages(item)],
        instructions=_string_or_none(body, "instructions") or "",
        previous=_string_or_none(body, "previous_response_id"),
        tools=[] if choice == "none" else [*map(_tool, body.get("tools") or [])],
        max_tokens=whole_number(body, "max_output_tokens"),
        stop=stop_strings(body, "stop"),  # not in OpenAI's interface, but in that of other servers
        stream=bool(body.get("stream")),
        store=body.get("store") is not False,
        logprobs=_LOGPROBS in (body.get("include") or []),
        model=str(body.get("model", "")),
        template_arguments=template_arguments(body),
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        raise RequestRefused(
            f"tools: of type {str(tool['type'])[:50]}: only functions are supported: the endpoint "
            "calls no tools"
        )
    function = {
        "name": _string(tool, "name"),
        "description": tool.get("description") or "",
        "parameters": tool.get("parameters") or {},
    }
    return {"type": "function", "function": function}


def _messages(item: dict[str, Any]) -> list[Message]:
    kind = item.get("type") or "message"
    if kind == "message":
        role = ROLES.get(item["role"])
        if role in (None, "tool"):
            raise RequestRefused(
                f"role={str(item['role'])[:50]}: must be developer, system, user, assistant"
            )
        return [{"role": role, "content": text_of(item["content"], "input_text", "output_text")}]
    if kind == "function_call":
        call = ToolCall(_string(item, "name"), _string(item, "arguments"))
        calls = [openai_call(_string(item, "call_id"), call)]
        return [{"role": "assistant", "content": "", "tool_calls": calls}]
    if kind == "function_call_output":
        call_id = _string(item, "call_id")
        content = text_of(item["output"], "input_text", "output_text")
        return [{"role": "tool", "tool_call_id": call_id, "content": content}]
    if kind != "reasoning":
        raise RequestRefused(
            f"input: an item of type {str(kind)[:50]}: only message, function_call and "
            "function_call_output are supported"
        )
    if item.get("summary") or item.get("content"):
        raise RequestRefused(
            "input: reasoning with a text is not supported: the policy's messages contain its "
            "reasoning"
        )
    return []


def _string(item: dict[str, Any], name: str) -> str:
    if not isinstance(item[name], str):
        raise TypeError(f"{name} must be a string")
    return item[name]


def _string_or_none(body: dict[str, Any], name: str) -> str | None:
    return _string(body, name) if body.get(name) else None


def conversation(episode: Episode, request: ResponsesRequest) -> list[Message]:
    """All messages of the conversation so far, without the instructions. Raises RequestRefused."""
    messages = _joined(request.messages, episode.first_calls)
    if request.previous is None:
        return messages
    stored = episode.stored_conversations.get(request.previous)
    if stored is None:
        raise RequestRefused(
            f"Previous response with id '{request.previous[:100]}' not found.",
            "previous_response_not_found",
            404,
        )
    return [*stored.messages, *messages]


def _joined(messages: Sequence[Message], called: Mapping[str, str]) -> list[Message]:
    """Joins each turn of the assistant, its text and its calls, into one message.

    Calls of one turn stay together even if an agent has put each result directly after its call.
    """
    joined: list[Message] = []
    turn: Message | None = None  # the assistant's latest turn
    for message in messages:
        if message["role"] != "assistant":
            joined.append(message)
        elif turn and (
            _side_by_side(joined[-1], turn, message) or _of_one_turn(turn, message, called)
        ):
            turn["content"] = turn["content"] or message["content"]
            turn["tool_calls"].extend(message.get("tool_calls", ()))
        else:
            turn = {**message, "tool_calls": [*message.get("tool_calls", ())]}
            joined.append(turn)
    return joined


def _side_by_side(latest: Message, turn: Message, message: Message) -> bool:
    """Whether two neighbouring messages are one turn.

    A turn has only one text, so two texts are two turns.
    """
    return latest is turn and not (turn["content"] and message["content"])


def _of_one_turn(turn: Message, message: Message, called: Mapping[str, str]) -> bool:
    first_of_turn = [called.get(call["id"]) for call in turn.get("tool_calls", ())][:1]
    first_of_message = [called.get(call["id"]) for call in message.get("tool_calls", ())][:1]
    return first_of_turn == first_of_message and first_of_turn not in ([], [None])


def keep(
    episode: Episode,
    name: str,
    request: ResponsesRequest,
    messages: Sequence[Message],
    answer: Answer,
) -> None:
    """Keeps an answer, so that later calls can continue it.

    If all kept answers together are too large, the oldest are dropped.
    """
    turn = {
        "role": "assistant",
        "content": answer.content,
        "tool_calls": [openai_call(*call) for call in answer.calls],
    }
    conversations = episode.stored_conversations
    conversations[f"resp_{name}"] = StoredConversation(
        [*messages, turn], len(str(request.messages))
    )
    while sum(stored.letters for stored in conversations.values()) > _MOST_KEPT_LETTERS:
        del conversations[next(iter(conversations))]


def written(
    answer: Answer, logprobs: Sequence[tuple[str, float]], name: str, request: ResponsesRequest
) -> dict[str, Any]:
    cut = answer.finish_reason == "length"
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "output": _items(answer, logprobs, name, cut),
        "usage": _usage(answer),
        "previous_response_id": request.previous,
        "max_output_tokens": request.max_tokens,
        "parallel_tool_calls": True,
        # The openai package's types require these fields. They are left empty: the agent knows its
        # own request, which may be long.
        "instructions": None,
        "metadata": {},
        "tools": [],
        "tool_choice": "auto",
    }


def _items(
    answer: Answer, logprobs: Sequence[tuple[str, float]], name: str, cut: bool
) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.content or not answer.calls:
        tokens = [{**token, "bytes": token["bytes"] or []} for token in token_logprobs(logprobs)]
        text = {
            "type": "output_text",
            "text": answer.content,
            "annotations": [],
            "logprobs": tokens,
        }
        status = "incomplete" if cut else "completed"
        items.append(
            {
                "type": "message",
                "id": f"msg_{name}",
                "role": "assistant",
                "status": status,
                "content": [text],
            }
        )
    for number, (call_id, call) in enumerate(answer.calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{name}_{number}",
                "call_id": call_id,
                "status": "completed",
                "name": call.name,
                "arguments": call.arguments,
            }
        )
    return items


def _usage(answer: Answer) -> dict[str, Any]:
    prompt = answer.prompt_tokens
    sampled = len(answer.completion.token_ids)
    return {
        "input_tokens": prompt,
        "output_tokens": sampled,
        "total_tokens": prompt + sampled,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }


def streamed(
    answer: Answer, logprobs: Sequence[tuple[str, float]], name: str, request: ResponsesRequest
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The finished answer as events (name, data). Each text and each call is one piece."""
    response = written(answer, logprobs, name, request)
    nothing_yet = {
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    initial = {"response": {**response, **nothing_yet}}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", initial),
        ("response.in_progress", initial),
    ]
    for index, item in enumerate(response["output"]):
        item_events = _of_text(item) if item["type"] == "message" else _of_call(item)
        events += [(kind, {"output_index": index, **data}) for kind, data in item_events]
    events.append((f"response.{response['status']}", {"response": response}))
    for number, (kind, data) in enumerate(events):
        yield kind, {"sequence_number": number, **data}


def _of_text(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    [part] = item["content"]
    place = {"item_id": item["id"], "content_index": 0}
    yield "response.output_item.added", {"item": {**item, "status": "in_progress", "content": []}}
    yield "response.content_part.added", {**place, "part": {**part, "text": "", "logprobs": []}}
    event = {**place, "logprobs": part["logprobs"]}
    yield "response.output_text.delta", {**event, "delta": part["text"]}
    yield "response.output_text.done", {**event, "text": part["text"]}
    yield "response.content_part.done", {**place, "part": part}
    yield "response.output_item.done", {"item": item}


def _of_call(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    place = {"item_id": item["id"]}
    arguments = item["arguments"]
    yield "response.output_item.added", {"item": {**item, "status": "in_progress", "arguments": ""}}
    yield "response.function_call_arguments.delta", {**place, "delta": arguments}
    event = {**place, "name": item["name"], "arguments": arguments}
    yield "response.function_call_arguments.done", event
    yield "response.output_item.done", {"item": item}
