"""Finds the tool calls in the policy's text, with SGLang's parsers, by name, or with a small one of
MegaRL.

A policy may write anything, so MegaRL's parser takes linear time. Some of SGLang's parsers do not;
they run in separate processes.
"""

from __future__ import annotations

import difflib
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from megarl.config.errors import ConfigError
from megarl.sandbox import process
from megarl.sandbox.pool import CallFailed, WorkerPool

JSON = "json"
_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_WORKERS = 2
_MEMORY_MIB = 1 << 15  # of addresses, since SGLang's imports reserve gigabytes of them
_CPU_S = 1.0  # CPU time limit of a text
_ANSWER_S = 60.0  # after this time, a worker that exceeds that limit is replaced
_MOST_CHARS = 1 << 19  # longest text that is searched for calls


class ToolCall(NamedTuple):
    name: str
    arguments: str  # a JSON object


Tools = Sequence[dict[str, Any]]  # in OpenAI's form
Parsed = tuple[str, list[ToolCall]]
"""The text without its calls, and the calls. Parts that cannot be parsed as a call stay text."""


class Parser(Protocol):
    """A parser of tool calls.

    Use it in one event loop, which it does not block; close it at the end.
    """

    async def __call__(self, text: str, tools: Tools) -> Parsed:
        """Raises ValueError for tools that it cannot read."""
        ...

    async def close(self) -> None: ...


def find_parser(name: str, key: str) -> Parser:
    """The parser `name`.

    Raises ConfigError that names `key`. Importing SGLang's parsers takes seconds.
    """
    if name == JSON:
        return JsonParser()
    from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES

    if name not in TOOL_CALL_PARSER_NAMES:
        names = [JSON, *TOOL_CALL_PARSER_NAMES]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(names)}"
        raise ConfigError(f"{key}={name}: no such parser of tool calls; {hint}")
    return SglangParser(name)


class JsonParser:
    async def __call__(self, text: str, tools: Tools) -> Parsed:
        return json_calls(text, tools) if len(text) <= _MOST_CHARS else (text, [])

    async def close(self) -> None:
        pass


def json_calls(text: str, tools: Tools) -> Parsed:
    """Finds calls of existing tools in the form <tool_call>{"name": …, "arguments":
    {…}}</tool_call>. Any other call stays text.
    """
    names = {_function(tool)["name"] for tool in tools}
    calls = list[ToolCall]()
    text_parts = list[str]()
    end = 0
    for start, stop in _marked(text):
        call = _object(text[start:stop]) or {}
        if call.get("name") not in names or not isinstance(call.get("arguments"), dict):
            continue
        calls.append(ToolCall(call["name"], json.dumps(call["arguments"], ensure_ascii=False)))
        text_parts.append(text[end : start - len(_OPEN)])
        end = stop + len(_CLOSE)
    if not calls:
        return text, []
    return "".join([*text_parts, text[end:]]).strip(), calls


def _marked(text: str) -> Iterator[tuple[int, int]]:
    """The beginnings and ends of the texts between the marks.

    Takes linear time, even for many marks that are never closed.
    """
    end = 0
    while True:
        start = text.find(_OPEN, end)
        stop = text.find(_CLOSE, start + len(_OPEN)) if start >= 0 else -1
        if stop < 0:
            return
        yield start + len(_OPEN), stop
        end = stop + len(_CLOSE)


class SglangParser:
    """One of SGLang's parsers.

    Its processes start with the first text. A text that takes more than a second of CPU time stays
    text.
    """

    def __init__(self, name: str):
        self._name = name
        module = "megarl.generator.tool_parsers"
        self._pool = WorkerPool(
            "tool_parser", module, [name], _WORKERS, _ANSWER_S, _MEMORY_MIB, as_here=True
        )
        self._opened = False
        self._printed = False

    async def __call__(self, text: str, tools: Tools) -> Parsed:
        if not tools or len(text) > _MOST_CHARS:
            return text, []
        if not self._opened:
            self._opened = True
            self._pool.open()
        try:
            parsed = await self._pool.call(text, tools)
        except CallFailed as error:
            if error.kind == "error":
                raise ValueError(str(error)) from error
            parsed = None
        if parsed is None:
            self._tell(len(text))
            return text, []
        remaining_text, calls = parsed
        return remaining_text, [ToolCall(*call) for call in calls]

    def _tell(self, length: int) -> None:
        if not self._printed:
            print(
                f"tool_parser={self._name} took more than {_CPU_S:g} s of CPU for {length} "
                "characters: such turns stay text",
                flush=True,
            )
        self._printed = True

    async def close(self) -> None:
        await self._pool.close()


def main(name: str, memory_mib: str, timeout_s: str, parent: str) -> None:
    """A process of SglangParser: serves until standard input closes."""
    process.prepare(parent)
    parse = sglang_calls(name)
    signal.signal(signal.SIGPROF, _end_parsing)
    process.limit_resources(memory_mib, files_writable=True)
    process.serve(lambda text, tools: _in_time(lambda: parse(text, tools)), timeout_s)


class _TooLong(BaseException):
    """Not an Exception, which parsers would catch."""


def _end_parsing(number: int, frame: Any) -> None:
    raise _TooLong


def _in_time(parse: Callable[[], Parsed]) -> Parsed | None:
    """The result of the call; None if it takes too long.

    Regular expressions check for signals, so no process must be killed.
    """
    try:
        # repeatedly, in case one is caught
        signal.setitimer(signal.ITIMER_PROF, _CPU_S, _CPU_S / 4)
        try:
            return parse()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except _TooLong:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        return None


def sglang_calls(name: str) -> Callable[[str, Tools], Parsed]:
    """One of SGLang's parsers as a function, without a time limit.

    It raises ValueError for tools that it cannot read.
    """
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    def parse(text: str, tools: Tools) -> Parsed:
        parser = FunctionCallParser(
            [Tool(type="function", function=_function(tool)) for tool in tools], name
        )
        try:
            remaining_text, calls = parser.parse_non_stream(text)
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
            # raised for a text that is nearly a call
            return text, []
        named = [ToolCall(call.name, call.parameters) for call in calls if call.name]
        usable = [call for call in named if _object(call.arguments) is not None]
        unusable = [call.arguments for call in named if call not in usable]
        if not usable:
            return text, []
        return "\n".join([remaining_text, *unusable]), usable

    return parse


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object in `text`.

    None if there is none, or if it has NaN, infinity or lone surrogates, which other programs
    cannot read.
    """
    try:
        parsed = json.loads(text)
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _function(tool: dict[str, Any]) -> Any:
    return tool["function"]
