"""OpenAI's chat completions: requests to messages, answers to JSON. (platform.openai.com/docs/api-reference/chat)"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megarl.data.chat import Message
from megarl.generator.tool_parsers import ToolCall
from megarl.rollouts.agents.episode import Answer, Refused, openai_call

_ROLES = {"developer": "system", **{role: role for role in ("system", "user", "assistant", "tool")}}  # what templates call them
_MOST_CHOICES = 128


class Request(NamedTuple):
    """What an agent asks for, in either form of the endpoint."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None
    n: int
    stream: bool
    model: str
    usage: bool = False  # whether a stream ends with it


def read_request(body: dict[str, Any]) -> Request:
    """Raises Refused for what cannot be honoured. What decides how tokens are drawn, temperature and top_p, is the run's: it is ignored."""
    asked_format = (body.get("response_format") or {}).get("type", "text")
    if asked_format != "text":
        raise Refused(f"response_format.type={asked_format}: tokens are drawn from the policy alone, so no format can be forced")
    refuse(body, "stop", "set rollout.stop, for all calls of the run")
    for name in ("logprobs", "functions", "logit_bias", "audio"):
        refuse(body, name, "not supported")
    n = whole_number(body, "n", _MOST_CHOICES) or 1
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise Refused(f"tool_choice={str(choice)[:100]}: must be auto or none: no call can be forced upon the policy")
    tools = [] if choice == "none" else body.get("tools") or []
    if wrong := [tool for tool in tools if tool.get("type") != "function" or not isinstance(tool["function"]["name"], str)]:
        raise Refused(f"tools: of type {wrong[0].get('type')}; only functions are supported")
    most = whole_number(body, "max_completion_tokens") or whole_number(body, "max_tokens")
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    return Request([*map(_message, body["messages"])], tools, most, n, bool(body.get("stream")), str(body.get("model", "")), usage)


def refuse(body: dict[str, Any], name: str, instead: str) -> None:
    if body.get(name):
        raise Refused(f"{name}: {instead}")


def whole_number(body: dict[str, Any], name: str, most: int = 1 << 31) -> int | None:
    """None where it is not set. Raises Refused if it is not a whole number from 1 to `most`."""
    value = body.get(name)
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise Refused(f"{name}={str(value)[:50]}: must be a whole number from 1 to {most}")
    return value


def text_of(content: Any) -> str:
    """Texts of a message's content, whose parts may be listed."""
    if content is None or isinstance(content, str):
        return content or ""
    if wrong := [part.get("type") for part in content if part.get("type") != "text"]:
        raise Refused(f"content of type {wrong[0]}: only text is supported")
    return "".join(part["text"] for part in content)


def _message(message: dict[str, Any]) -> Message:
    role = _ROLES.get(message["role"])
    if role is None:
        raise Refused(f"role={str(message['role'])[:50]}: must be {', '.join(_ROLES)}")
    kept = {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}
    calls = [(call["id"], ToolCall(call["function"]["name"], call["function"]["arguments"])) for call in message.get("tool_calls") or ()]
    if calls:
        kept["tool_calls"] = [openai_call(*call) for call in calls]
    return {"role": role, "content": text_of(message.get("content")), **kept}


def written(answers: Sequence[Answer], name: str, model: str) -> dict[str, Any]:
    choices = [
        {"index": index, "message": _said(answer), "finish_reason": answer.finish_reason, "logprobs": None}
        for index, answer in enumerate(answers)
    ]
    return {**_head(name, model, "chat.completion"), "choices": choices, "usage": _usage(answers)}


def streamed(answers: Sequence[Answer], name: str, model: str, usage: bool) -> Iterator[dict[str, Any]]:
    """The finished answers as chunks: calls and texts in one piece each, since what a call is shows at its end."""
    head = _head(name, model, "chat.completion.chunk")
    for index, answer in enumerate(answers):
        said = _said(answer)
        for number, call in enumerate(said.get("tool_calls", ())):
            call["index"] = number
        yield {**head, "choices": [{"index": index, "delta": said, "finish_reason": None}]}
        yield {**head, "choices": [{"index": index, "delta": {}, "finish_reason": answer.finish_reason}]}
    if usage:
        yield {**head, "choices": [], "usage": _usage(answers)}


def _head(name: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": model}


def _said(answer: Answer) -> dict[str, Any]:
    calls = [openai_call(*call) for call in answer.calls]
    return {"role": "assistant", "content": answer.content or ("" if not calls else None), **({"tool_calls": calls} if calls else {})}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt, completion = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": kind, "param": None}}
