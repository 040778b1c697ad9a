"""Finds the tool calls in what a policy wrote: those of SGLang, by name, and a small one of our own."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megarl.config.errors import ConfigError

OWN = "json"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(NamedTuple):
    name: str
    arguments: str  # a JSON object


Tools = Sequence[dict[str, Any]]  # in OpenAI's form
Parser = Callable[[str, Tools], tuple[str, list[ToolCall]]]
"""(text, tools) -> the text without its calls, and the calls. What cannot be read as a call stays text."""


def find_parser(name: str, key: str) -> Parser:
    """Raises ConfigError that names `key`. For one of SGLang's, its parsers are imported, which takes seconds."""
    if name == OWN:
        return json_calls
    from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES

    if name not in TOOL_CALL_PARSER_NAMES:
        known = [OWN, *TOOL_CALL_PARSER_NAMES]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}"
        raise ConfigError(f"{key}={name}: no such parser of tool calls; {hint}")
    return _of_sglang(name)


def json_calls(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Calls as <tool_call>{"name": …, "arguments": {…}}</tool_call>, of tools that there are."""
    names = {_function(tool)["name"] for tool in tools}
    calls = []
    for found in _CALL.findall(text):
        call = _object(found) or {}
        if call.get("name") not in names or not isinstance(call.get("arguments"), dict):
            return text, []
        calls.append(ToolCall(call["name"], json.dumps(call["arguments"], ensure_ascii=False)))
    return (_CALL.sub("", text).strip(), calls) if calls else (text, [])


def _of_sglang(name: str) -> Parser:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    def parse(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
        parser = FunctionCallParser([Tool(type="function", function=_function(tool)) for tool in tools], name)
        try:
            rest, calls = parser.parse_non_stream(text)
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError):  # of a text that is nearly a call
            return text, []
        found = [ToolCall(call.name, call.parameters) for call in calls if call.name]
        return (rest, found) if found and all(_object(call.arguments) is not None for call in found) else (text, [])

    return parse


def _object(text: str) -> dict[str, Any] | None:
    """None unless it is a JSON object that other programs can read too: without NaN, infinity and halves of characters."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _function(tool: dict[str, Any]) -> Any:
    return tool["function"]
