"""OpenAI's chat completions: reads requests as messages, writes answers as JSON (platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.agents.episode import Answer, Refused, openai_call
from megarl.data.chat import Message
from megarl.generator.tool_parsers import ToolCall

ROLES = {"developer": "system", **{role: role for role in ("system", "user", "assistant", "tool")}}  # OpenAI's role -> the template's
_MOST_CHOICES = 128
_MOST_STOP_LETTERS = 256  # an engine searches this much text after every token
FORCED = "training uses the policy's log-probs, and this would need tokens from another distribution"
_DRAWN = "the run's rollout settings say how tokens are drawn, because training uses their log-probs"
_UNSUPPORTED = "it is not supported"
# For each field: the values that ask for nothing, and why other values are refused. Fields that are not listed are ignored.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "presence_penalty": ((0,), _DRAWN),
    "frequency_penalty": ((0,), _DRAWN),
    "repetition_penalty": ((1,), _DRAWN),
    "logit_bias": (({},), _DRAWN),
    "min_tokens": ((0,), _DRAWN),
    "ignore_eos": ((False,), _DRAWN),
    "guided_json": ((), FORCED),  # this and the following fields are vLLM's and SGLang's
    "guided_regex": ((), FORCED),
    "guided_choice": ((), FORCED),
    "guided_grammar": ((), FORCED),
    "structured_outputs": ((), FORCED),
    "json_schema": ((), FORCED),
    "regex": ((), FORCED),
    "ebnf": ((), FORCED),
    "chat_template_kwargs": (({},), "conversations are rendered by the chat template as it is"),
    "top_logprobs": ((0,), "only the log-probs of sampled tokens are known"),
    "functions": (([],), "use tools instead"),
    "function_call": (("auto", "none"), "use tool_choice instead"),
    "modalities": ((["text"],), _UNSUPPORTED),
    "audio": ((), _UNSUPPORTED),
    "web_search_options": ((), _UNSUPPORTED),
}


class Request(NamedTuple):
    """A request of an agent, by chat completions or Anthropic's messages."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None
    n: int
    stream: bool
    model: str
    usage: bool = False  # whether a stream ends with the usage
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    seed: int | None = None


def read_request(body: dict[str, Any]) -> Request:
    """Raises Refused for settings that cannot be honoured. Ignores temperature and top_p: the run decides how tokens are drawn."""
    asked_format = (body.get("response_format") or {}).get("type", "text")
    if asked_format != "text":
        raise Refused(f"response_format.type={str(asked_format)[:100]}: no format can be forced: {FORCED}")
    refuse_unless_neutral(body, NEUTRAL)
    n = whole_number(body, "n", _MOST_CHOICES) or 1
    choice = tool_choice("tool_choice", body.get("tool_choice") or "auto")
    tools = [] if choice == "none" else body.get("tools") or []
    if wrong := [tool for tool in tools if tool.get("type") != "function" or not isinstance(tool["function"]["name"], str)]:
        raise Refused(f"tools: of type {wrong[0].get('type')}; only functions are supported")
    most = whole_number(body, "max_completion_tokens") or whole_number(body, "max_tokens")
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    stop, logprobs = stop_strings(body, "stop"), body.get("logprobs") is True
    messages, stream = [*map(_message, body["messages"])], bool(body.get("stream"))
    return Request(messages, tools, most, n, stream, str(body.get("model", "")), usage, stop, logprobs, _seed(body))


def refuse_unless_neutral(body: dict[str, Any], neutral: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    for name, (values, why) in neutral.items():
        if (value := body.get(name)) is not None and value not in values:
            only = f"must be {' or '.join(map(str, values))}" if values else "cannot be set"
            raise Refused(f"{name}={str(value)[:50]}: {only}: {why}")


def tool_choice(name: str, choice: Any) -> str:
    """The request's choice: auto or none. Raises Refused if it would force a call."""
    if choice not in ("auto", "none"):
        raise Refused(f"{name}={str(choice)[:100]}: must be auto or none: no call can be forced upon the policy: {FORCED}")
    return choice


def stop_strings(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """The stop strings of a request, a text or a list of texts. Raises Refused for other values."""
    value = body.get(name) or []
    found = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and 0 < len(text) <= _MOST_STOP_LETTERS for text in found):
        raise Refused(f"{name}={str(value)[:50]}: must be texts of 1 to {_MOST_STOP_LETTERS} characters")
    return found


def _seed(body: dict[str, Any]) -> int | None:
    seed = body.get("seed")
    if seed is not None and type(seed) is not int:
        raise Refused(f"seed={str(seed)[:50]}: must be a whole number")
    return seed


def whole_number(body: dict[str, Any], name: str, most: int = 1 << 31) -> int | None:
    """A field of the request; None if it is not set. Raises Refused if it is not a whole number from 1 to `most`."""
    value = body.get(name)
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise Refused(f"{name}={str(value)[:50]}: must be a whole number from 1 to {most}")
    return value


def text_of(content: Any, *kinds: str) -> str:
    """The text of a message's content, which may be a list of parts. `kinds`: the types of text parts, besides "text"."""
    if content is None or isinstance(content, str):
        return content or ""
    if wrong := [part.get("type") for part in content if part.get("type") not in (kinds or ("text",))]:
        raise Refused(f"content of type {wrong[0]}: only text is supported")
    return "".join(part["text"] for part in content)


def _message(message: dict[str, Any]) -> Message:
    role = ROLES.get(message["role"])
    if role is None:
        raise Refused(f"role={str(message['role'])[:50]}: must be {', '.join(ROLES)}")
    kept = {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}
    calls = [(call["id"], ToolCall(call["function"]["name"], call["function"]["arguments"])) for call in message.get("tool_calls") or ()]
    if calls:
        kept["tool_calls"] = [openai_call(*call) for call in calls]
    if role == "assistant":
        kept.pop("name", None)  # a label that the agent has added
    return {"role": role, "content": text_of(message.get("content")), **kept}


Logprobs = Sequence[Sequence[tuple[str, float]] | None]
"""[answers] the text and log-prob of each token; None if the request does not ask for them."""


def written(answers: Sequence[Answer], logprobs: Logprobs, name: str, model: str) -> dict[str, Any]:
    choices = [
        {"index": index, "message": _said(answer), "finish_reason": answer.finish_reason, "logprobs": _logprobs(values)}
        for index, (answer, values) in enumerate(zip(answers, logprobs, strict=True))
    ]
    return {**_head(name, model, "chat.completion"), "choices": choices, "usage": _usage(answers)}


def streamed(answers: Sequence[Answer], logprobs: Logprobs, name: str, model: str, usage: bool) -> Iterator[dict[str, Any]]:
    """The finished answers as chunks. Each text and each call is one chunk, since a call is known only at its end."""
    head = _head(name, model, "chat.completion.chunk")
    for index, (answer, values) in enumerate(zip(answers, logprobs, strict=True)):
        said = _said(answer)
        for number, call in enumerate(said.get("tool_calls", ())):
            call["index"] = number
        yield {**head, "choices": [{"index": index, "delta": said, "finish_reason": None, "logprobs": _logprobs(values)}]}
        yield {**head, "choices": [{"index": index, "delta": {}, "finish_reason": answer.finish_reason}]}
    if usage:
        yield {**head, "choices": [], "usage": _usage(answers)}


def _head(name: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": model}


def _said(answer: Answer) -> dict[str, Any]:
    calls = [openai_call(*call) for call in answer.calls]
    return {"role": "assistant", "content": answer.content or ("" if not calls else None), **({"tool_calls": calls} if calls else {})}


def _logprobs(values: Sequence[tuple[str, float]] | None) -> dict[str, Any] | None:
    if values is None:
        return None
    return {"content": token_logprobs(values), "refusal": None}


def token_logprobs(values: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"token": text, "logprob": value, "bytes": _bytes(text), "top_logprobs": []} for text, value in values]


def _bytes(text: str) -> list[int] | None:
    """The bytes of `text`; None for a part of a character, whose text is unknown."""
    return None if "\ufffd" in text else [*text.encode()]


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt, completion = answers[0].prompt_tokens, sum(len(answer.completion.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": kind, "param": None}}
