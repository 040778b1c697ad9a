"""Anthropic's messages: reads requests as messages in OpenAI's form, writes answers as JSON
(docs.anthropic.com/en/api/messages).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megarl.agents.episode import Answer, RequestRefused, openai_call
from megarl.agents.openai_chat import (
    FORCED,
    TRAINED,
    Request,
    refuse_unless_neutral,
    stop_strings,
    template_arguments,
    text_of,
    tool_choice,
    whole_number,
)
from megarl.data.chat import Message
from megarl.generator.tool_parsers import ToolCall

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_NEUTRAL = {
    "output_format": ((), f"no format can be forced: {FORCED}"),
    "mcp_servers": (([],), "the endpoint calls no tools"),
    "container": ((), "the endpoint calls no tools"),
    "context_management": (({}, {"edits": []}), TRAINED),
    "compaction": ((), TRAINED),
    "thread": ((), TRAINED),
}
HONOURED = frozenset(
    "messages system tools tool_choice max_tokens stop_sequences stream output_config model".split()
)
IGNORED = frozenset(  # as in openai_chat.py
    "temperature top_p top_k thinking metadata service_tier cache_control betas billing_policy "
    "diagnostics fallback_credit_token fallbacks "
    "inference_geo speed user_profile_id workspace_id".split()
)


def read_request(body: dict[str, Any]) -> Request:
    """Raises RequestRefused for settings that cannot be honoured.

    Ignores temperature and top_p: the run decides how tokens are drawn.
    """
    refuse_unless_neutral(body, _NEUTRAL)
    form = (body.get("output_config") or {}).get("format")
    if form is not None:
        raise RequestRefused(
            f"output_config.format={str(form)[:50]}: no format can be forced: {FORCED}"
        )
    choice = tool_choice("tool_choice.type", (body.get("tool_choice") or {}).get("type", "auto"))
    tools = [] if choice == "none" else [*map(_tool, body.get("tools") or [])]
    system = text_of(body.get("system"))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in body["messages"]:
        messages += _messages(message)
    return Request(
        messages,
        tools,
        max_tokens=whole_number(body, "max_tokens"),
        n=1,
        stream=bool(body.get("stream")),
        model=str(body.get("model", "")),
        stop=stop_strings(body, "stop_sequences"),
        template_arguments=template_arguments(body),
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool or not isinstance(tool["name"], str):
        shown = f"{tool.get('name')} of type {tool.get('type')}"[:100]
        raise RequestRefused(
            f"tools: {shown}: only tools of your own, with a name and an input_schema, are "
            "supported"
        )
    function = {
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def _messages(message: dict[str, Any]) -> list[Message]:
    """Tool results become messages of their own, before the user's text that came with them."""
    role = message["role"]
    content = message["content"]
    if role not in ("user", "assistant"):
        raise RequestRefused(f"role={str(role)[:50]}: must be user or assistant")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    kinds = ("text", "tool_use") if role == "assistant" else ("text", "tool_result")
    refused_kinds = [block["type"] for block in blocks if block["type"] not in kinds]
    if refused_kinds:
        raise RequestRefused(
            f"content of type {str(refused_kinds[0])[:50]} by the {role}: only "
            f"{' and '.join(kinds)} are supported"
        )
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    text_message: Message = {"role": role, "content": text}
    calls = []
    results: list[Message] = []
    for block in blocks:
        if block["type"] == "tool_use":
            call = ToolCall(block["name"], json.dumps(block["input"]))
            calls.append(openai_call(block["id"], call))
        elif block["type"] == "tool_result":
            content = text_of(block.get("content"))
            call_id = block["tool_use_id"]
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
    if calls:
        text_message["tool_calls"] = calls
    if text or not results:
        return [*results, text_message]
    return results


def written(answer: Answer, name: str, model: str) -> dict[str, Any]:
    return {
        **_head(name, model),
        "content": _blocks(answer),
        **_stop(answer),
        "usage": _usage(answer),
    }


def streamed(answer: Answer, name: str, model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The finished answer as events (name, data), each block in one piece."""
    usage = _usage(answer)
    stop = {"stop_reason": None, "stop_sequence": None}
    message = {**_head(name, model), "content": [], **stop, "usage": usage}
    yield "message_start", {"message": message}
    for index, block in enumerate(_blocks(answer)):
        if block["type"] == "text":
            empty = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield "content_block_start", {"index": index, "content_block": empty}
        yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    yield "message_delta", {"delta": _stop(answer), "usage": usage}
    yield "message_stop", {}


def _head(name: str, model: str) -> dict[str, Any]:
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": model}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    for number, call in answer.calls:
        arguments = json.loads(call.arguments)
        blocks.append({"type": "tool_use", "id": number, "name": call.name, "input": arguments})
    return blocks


def _stop(answer: Answer) -> dict[str, Any]:
    if answer.stop is not None and not answer.calls:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": _STOP_REASONS[answer.finish_reason], "stop_sequence": None}


def _usage(answer: Answer) -> dict[str, int]:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.completion.token_ids)}


def error(message: str, kind: str) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": f"{kind}: {message}"},
    }
