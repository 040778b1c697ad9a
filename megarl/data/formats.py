"""The columns of a row in a known format, and its conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megarl.config.data import DatasetConfig
from megarl.data.chat import Message, name_of
from megarl.data.records import parsed
from megarl.data.rows import RowProblem

ROLES = ("system", "developer", "user", "assistant", "tool")


class Format(NamedTuple):
    name: str
    keys: tuple[str, ...]  # by which a row is known to have it
    prompt: str
    answer: str


FORMATS = (
    Format("question and answer", ("question",), "question", "answer"),
    Format("OpenAI's", ("messages",), "messages", "answer"),
    Format("verl's", ("prompt", "reward_model"), "prompt", "reward_model.ground_truth"),
    Format("slime's", ("prompt", "label"), "prompt", "label"),
)


_PLAIN = Format("a prompt", ("prompt",), "prompt", "answer")  # of rows that have no other format; environments of hubs write them


class Columns(NamedTuple):
    prompt: str
    answer: str | None  # None: the conversation's last message


def columns_of(record: Mapping[str, Any], config: DatasetConfig, key: str) -> Columns:
    """The row's columns: those that the section names, else those of the one format whose keys the row has, or `prompt` and `answer`.
    Raises RowProblem if it has the keys of several."""
    if config.prompt_key is not None:
        return Columns(config.prompt_key, config.answer_key or "answer")
    fits = [each for each in FORMATS if all(record.get(name) is not None for name in each.keys)]
    if len(fits) > 1:
        both = " and ".join(f"{' with '.join(map(repr, each.keys))} ({each.name})" for each in fits)
        raise RowProblem(f"it has the columns {both}: set {key}.prompt_key and {key}.answer_key")
    found = fits[0] if fits else _PLAIN if "prompt" in record else FORMATS[0]
    in_conversation = found.prompt == "messages" and found.answer not in record
    return Columns(found.prompt, config.answer_key or (None if in_conversation else found.answer))


def messages_of(value: list[Any], field: str) -> list[Message]:
    """A conversation as chat templates read it: contents are texts, and arguments of tool calls objects. Raises RowProblem."""
    return [_message(message, f"field {field!r}, message {number}") for number, message in enumerate(value, start=1)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowProblem(f"{where}: must be an object with role and content")
    found = {name: value for name, value in message.items() if value is not None}  # parquet has null where others have a key
    if found["role"] not in ROLES:
        raise RowProblem(f"{where}: role {found['role']!r} must be one of {', '.join(ROLES)}")
    calls = found.get("tool_calls")
    content = _content(found.get("content", "" if calls else None), where)
    if calls is not None and not (isinstance(calls, list) and all(isinstance(name_of(call), str) for call in calls)):
        raise RowProblem(f"{where}: tool_calls must be a list of objects, each with the function's name")
    return found | {"content": content} | ({"tool_calls": [_call(call, where) for call in calls]} if calls else {})


def _content(content: Any, where: str) -> str:
    """A text, or OpenAI's list of parts that are texts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RowProblem(f"{where}: content must be text")
    return "".join(map(str, texts))


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """With its arguments as an object."""
    inner = call.get("function", call)
    if not isinstance(inner.get("arguments"), str):
        return call
    try:
        made = {**inner, "arguments": parsed(inner["arguments"].encode())}
    except RowProblem as problem:
        raise RowProblem(f"{where}: the arguments of its tool call are no JSON: {problem}") from problem
    return {**call, "function": made} if inner is not call else made


def tools_of(record: Mapping[str, Any], field: str) -> list[Any] | None:
    """The tools that a row offers, also where they are written as JSON; None without any. Raises RowProblem."""
    tools = record.get(field)
    if isinstance(tools, str):
        try:
            tools = parsed(tools.encode())
        except RowProblem as problem:
            raise RowProblem(f"field {field!r} is neither a list of tools nor JSON of one: {problem}") from problem
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RowProblem(f"field {field!r} must be a list of tools")
    return tools or None


def learned(messages: list[Message], learn: str, field: str) -> tuple[list[Message], list[int]]:
    """The messages without their weights, and the places of those that are learned. Raises RowProblem."""
    places = []
    for place, message in enumerate(messages):
        weight, train = message.get("weight", 1), message.get("train", True)
        if weight not in (0, 1) or not isinstance(train, bool):
            wrong = f"train must be true or false, not {train!r}" if weight in (0, 1) else f"weight must be 0 or 1, not {weight!r}"
            raise RowProblem(f"field {field!r}, message {place + 1}: {wrong}")
        if message["role"] == "assistant" and weight and train:
            places.append(place)
    if learn == "last":
        places = [place for place in places if place == len(messages) - 1]
    if not places:
        raise RowProblem(f"field {field!r}: no turn of the assistant is to be learned")
    return [{name: value for name, value in message.items() if name not in ("weight", "train")} for message in messages], places
