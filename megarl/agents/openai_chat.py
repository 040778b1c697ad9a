"""OpenAI's chat completions: reads requests as messages, writes answers as JSON
(platform.openai.com/docs/api-reference/chat).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.agents.episode import Answer, RequestRefused, openai_call
from megarl.data.chat import RESERVED, Message
from megarl.generator.tool_parsers import ToolCall

# OpenAI's role -> the template's
ROLES = {"developer": "system", **{role: role for role in ("system", "user", "assistant", "tool")}}
_MOST_CHOICES = 128
_MOST_STOP_LETTERS = 256  # an engine searches this much text after every token
FORCED = (
    "training uses the policy's log-probs, and this would need tokens from another distribution"
)
_DRAWN = (
    "the run's rollout settings say how tokens are drawn, because training uses their log-probs"
)
_UNSUPPORTED = "it is not supported"
TRAINED = "the policy is trained on the conversation as it was sent"
_OWN_TOKENS = "the endpoint alone turns conversations into tokens"
_UNKNOWN = "answers have no such data"
# For each field: the values that ask for nothing, and why other values are refused.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "presence_penalty": ((0,), _DRAWN),
    "frequency_penalty": ((0,), _DRAWN),
    "repetition_penalty": ((1,), _DRAWN),
    "logit_bias": (({},), _DRAWN),
    "min_tokens": ((0,), _DRAWN),
    "ignore_eos": ((False,), _DRAWN),
    "stop_token_ids": (([],), "use stop instead"),
    "stop_regex": (([],), "use stop instead"),
    "bad_words": (([],), _DRAWN),
    "allowed_token_ids": ((), _DRAWN),
    "length_penalty": ((1,), _DRAWN),
    "use_beam_search": ((False,), _DRAWN),
    "best_of": ((1,), "use n instead"),
    "custom_logit_processor": ((), _DRAWN),
    "custom_params": ((), _DRAWN),
    "watermark": ((), _DRAWN),
    "lora_path": ((), "the policy has only its own adapter"),
    "session_params": ((), _UNSUPPORTED),
    "input_ids": ((), _OWN_TOKENS),
    "documents": (([],), _OWN_TOKENS),
    "chat_template": ((), _OWN_TOKENS),
    "continue_final_message": ((False,), _OWN_TOKENS),
    "add_generation_prompt": ((True,), _OWN_TOKENS),
    "truncate_prompt_tokens": ((), _OWN_TOKENS),
    "echo": ((False,), _OWN_TOKENS),
    "task": ((), _OWN_TOKENS),
    "prompt_logprobs": ((), _UNKNOWN),
    "return_hidden_states": ((False,), _UNKNOWN),
    "return_routed_experts": ((False,), _UNKNOWN),
    "return_prompt_token_ids": ((False,), _UNKNOWN),
    "return_token_ids": ((False,), _UNKNOWN),
    "return_meta_info": ((False,), _UNKNOWN),
    "return_input_ids_in_sglext": ((False,), _UNKNOWN),
    "return_output_ids_in_sglext": ((False,), _UNKNOWN),
    "return_sampling_mask": ((False,), _UNKNOWN),
    "return_flat_raw_output_top_logprobs": ((False,), _UNKNOWN),
    "return_flat_raw_top_logprobs_b64": ((False,), _UNKNOWN),
    "guided_json": ((), FORCED),  # this and the following fields are vLLM's and SGLang's
    "guided_regex": ((), FORCED),
    "guided_choice": ((), FORCED),
    "guided_grammar": ((), FORCED),
    "structured_outputs": ((), FORCED),
    "json_schema": ((), FORCED),
    "regex": ((), FORCED),
    "ebnf": ((), FORCED),
    "top_logprobs": ((0,), "only the log-probs of sampled tokens are known"),
    "functions": (([],), "use tools instead"),
    "function_call": (("auto", "none"), "use tool_choice instead"),
    "modalities": ((["text"],), _UNSUPPORTED),
    "audio": ((), _UNSUPPORTED),
    "web_search_options": ((), _UNSUPPORTED),
}
HONOURED = frozenset(
    "messages tools tool_choice max_completion_tokens max_tokens n seed stop stream "
    "stream_options logprobs response_format model "
    "chat_template_kwargs".split()
)
# These and fields that nobody knows are ignored. What asks how tokens are drawn is the run's to
# say. The rest asks for no other tokens: hints for speed, accounting, or advice that a model of
# another vendor could follow.
IGNORED = frozenset(
    "temperature top_p top_k min_p reasoning_effort thinking verbosity parallel_tool_calls "
    "metadata user safety_identifier store "
    "service_tier prediction prompt_cache_key prompt_cache_retention separate_reasoning "
    "stream_reasoning skip_special_tokens no_stop_trim "
    "routed_experts_start_len return_cached_tokens_details return_spec_tokens_details "
    "sampling_logprobs_mode session_id rid extra_key "
    "cache_salt priority data_parallel_rank max_dynamic_patch min_dynamic_patch "
    "use_audio_in_video images_config video_config "
    "mm_processor_kwargs".split()
)


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
    template_arguments: Mapping[str, Any] = {}
    seed: int | None = None


def read_request(body: dict[str, Any]) -> Request:
    """Raises RequestRefused for settings that cannot be honoured.

    Ignores temperature and top_p: the run decides how tokens are drawn.
    """
    asked_format = (body.get("response_format") or {}).get("type", "text")
    if asked_format != "text":
        raise RequestRefused(
            f"response_format.type={str(asked_format)[:100]}: no format can be forced: {FORCED}"
        )
    refuse_unless_neutral(body, NEUTRAL)
    n = whole_number(body, "n", _MOST_CHOICES) or 1
    choice = tool_choice("tool_choice", body.get("tool_choice") or "auto")
    tools = [] if choice == "none" else body.get("tools") or []
    for tool in tools:
        if tool.get("type") != "function" or not isinstance(tool["function"]["name"], str):
            raise RequestRefused(f"tools: of type {tool.get('type')}; only functions are supported")
    most = whole_number(body, "max_completion_tokens") or whole_number(body, "max_tokens")
    return Request(
        messages=[*map(_message, body["messages"])],
        tools=tools,
        max_tokens=most,
        n=n,
        stream=bool(body.get("stream")),
        model=str(body.get("model", "")),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
        stop=stop_strings(body, "stop"),
        logprobs=body.get("logprobs") is True,
        template_arguments=template_arguments(body),
        seed=_seed(body),
    )


def template_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Variables of the chat template, which vLLM and SGLang take too.

    Raises RequestRefused for those that are no arguments.
    """
    arguments = body.get("chat_template_kwargs") or {}
    for name in arguments:
        if name in RESERVED:
            raise RequestRefused(
                f"chat_template_kwargs: {name} is set for every conversation; it cannot be an "
                "argument of the template"
            )
    return dict(arguments)


def refuse_unless_neutral(
    body: dict[str, Any], neutral: Mapping[str, tuple[tuple[Any, ...], str]]
) -> None:
    for name, (values, reason) in neutral.items():
        value = body.get(name)
        if value is not None and value not in values:
            only = f"must be {' or '.join(map(str, values))}" if values else "cannot be set"
            raise RequestRefused(f"{name}={str(value)[:50]}: {only}: {reason}")


def tool_choice(name: str, choice: Any) -> str:
    """The request's choice: auto or none. Raises RequestRefused if it would force a call."""
    if choice not in ("auto", "none"):
        raise RequestRefused(
            f"{name}={str(choice)[:100]}: must be auto or none: no call can be forced upon the "
            f"policy: {FORCED}"
        )
    return choice


def stop_strings(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """The stop strings of a request, a text or a list of texts. Raises RequestRefused for other values."""
    value = body.get(name) or []
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and 0 < len(text) <= _MOST_STOP_LETTERS for text in texts):
        raise RequestRefused(
            f"{name}={str(value)[:50]}: must be texts of 1 to {_MOST_STOP_LETTERS} characters"
        )
    return texts


def _seed(body: dict[str, Any]) -> int | None:
    seed = body.get("seed")
    if seed is not None and type(seed) is not int:
        raise RequestRefused(f"seed={str(seed)[:50]}: must be a whole number")
    return seed


def whole_number(body: dict[str, Any], name: str, most: int = 1 << 31) -> int | None:
    """A field of the request; None if it is not set.

    Raises RequestRefused if it is not a whole number from 1 to `most`.
    """
    value = body.get(name)
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise RequestRefused(f"{name}={str(value)[:50]}: must be a whole number from 1 to {most}")
    return value


def text_of(content: Any, *kinds: str) -> str:
    """The text of a message's content, which may be a list of parts.

    `kinds`: the types of text parts, besides "text".
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") not in (kinds or ("text",)):
            raise RequestRefused(f"content of type {part.get('type')}: only text is supported")
    return "".join(part["text"] for part in content)


def _message(message: dict[str, Any]) -> Message:
    role = ROLES.get(message["role"])
    if role is None:
        raise RequestRefused(f"role={str(message['role'])[:50]}: must be {', '.join(ROLES)}")
    fields = {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        calls.append(openai_call(call["id"], ToolCall(function["name"], function["arguments"])))
    if calls:
        fields["tool_calls"] = calls
    if role == "assistant":
        fields.pop("name", None)  # a label that the agent has added
    return {"role": role, "content": text_of(message.get("content")), **fields}


Logprobs = Sequence[Sequence[tuple[str, float]] | None]
"""[answers] the text and log-prob of each token; None if the request does not ask for them."""


def written(answers: Sequence[Answer], logprobs: Logprobs, name: str, model: str) -> dict[str, Any]:
    choices = []
    for answer, values in zip(answers, logprobs, strict=True):
        choice = {
            "index": len(choices),
            "message": _assistant_message(answer),
            "finish_reason": answer.finish_reason,
            "logprobs": _logprobs(values),
        }
        choices.append(choice)
    return {**_head(name, model, "chat.completion"), "choices": choices, "usage": _usage(answers)}


def streamed(
    answers: Sequence[Answer], logprobs: Logprobs, name: str, model: str, usage: bool
) -> Iterator[dict[str, Any]]:
    """The finished answers as chunks.

    Each text and each call is one chunk, since a call is known only at its end.
    """
    head = _head(name, model, "chat.completion.chunk")
    for index, (answer, values) in enumerate(zip(answers, logprobs, strict=True)):
        message = _assistant_message(answer)
        for number, call in enumerate(message.get("tool_calls", ())):
            call["index"] = number
        choice = {"index": index, "delta": message, "finish_reason": None}
        yield {**head, "choices": [{**choice, "logprobs": _logprobs(values)}]}
        choice = {"index": index, "delta": {}, "finish_reason": answer.finish_reason}
        yield {**head, "choices": [choice]}
    if usage:
        yield {**head, "choices": [], "usage": _usage(answers)}


def _head(name: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": model}


def _assistant_message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [openai_call(*call) for call in answer.calls]
    return message


def _logprobs(values: Sequence[tuple[str, float]] | None) -> dict[str, Any] | None:
    if values is None:
        return None
    return {"content": token_logprobs(values), "refusal": None}


def token_logprobs(values: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": value, "bytes": _bytes(text), "top_logprobs": []}
        for text, value in values
    ]


def _bytes(text: str) -> list[int] | None:
    """The bytes of `text`; None for a part of a character, whose text is unknown."""
    return None if "\ufffd" in text else [*text.encode()]


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt = answers[0].prompt_tokens
    completion = sum(len(answer.completion.token_ids) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def error(message: str, kind: str) -> dict[str, Any]:
    return {
        "error": {"message": message, "type": "invalid_request_error", "code": kind, "param": None}
    }
