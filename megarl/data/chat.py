"""Renders conversations with a tokenizer's chat template, exactly as transformers does, and finds the text that the assistant wrote."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from megarl.config.errors import ConfigError
from megarl.data.tokenizer import find_file, read_json, tokenizer_of

CHAT = "chat"  # as prompt_template: use the model's chat template
_NONCE = secrets.token_hex(8)  # random, so that no message can contain the marks
_OPEN, _CLOSE = f"\ue000{_NONCE}", f"\ue001{_NONCE}"
_MARKED = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)
_REWRITES = "changes this turn, or text before it, when more messages follow; with learn=last only the last turn is learned"
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a message for the assistant's thinking
Message = dict[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """Turns messages (role, content, and what else the template reads) into text. All methods raise ValueError for messages it refuses."""

    render_marked: Callable[..., str]
    marks_turns: bool  # the template marks assistant turns with {% generation %}
    special_tokens: tuple[str, ...]
    ends: tuple[str, ...]  # the model's end-of-text tokens

    def render(self, messages: Sequence[Message], tools: Any = None, *, answered: bool = False) -> str:
        """The prompt, up to the start of the assistant's turn. `answered`: the last message is the assistant's, so no turn is opened."""
        return _unmarked(self._marked(messages, tools, answered))

    def pieces(self, messages: Sequence[Message], tools: Any, learned: Collection[int]) -> list[str]:
        """The conversation up to the last learned turn, as texts that are alternately context and learned. `learned`: indices of messages.

        A learned turn includes the end-of-text token after it, with which a model ends it in a rollout. It excludes the text that the
        template puts before it, which a rollout's prompt has already.

        If the template marks the assistant's turns ({% generation %}), the marks give their places. Adjacent marks are merged, and text
        that the turn's prompt has already is left out. Otherwise a turn is the text that the template adds to the prompt of the messages
        before it, and the whole conversation must begin with that prompt. In both cases, the conversation up to the turn must be rendered
        the same whether or not messages follow. A template that rewrites earlier turns when others follow fails this; Qwen3's does so with
        thinking.
        """
        marked = self._marked(messages, tools, True)
        whole = _unmarked(marked)
        spans = self._marked_spans(marked, messages) if self.marks_turns else None
        found, end = [], 0
        for place in sorted(learned):
            if _says_nothing(messages[place]):
                raise ValueError(f'message {place + 1}: it is empty: the model would learn to stop at once; "weight": 0 leaves it out')
            if spans:
                first, last = spans[place]
                if not self._beginning(messages, tools, place).startswith(whole[:last]):
                    raise ValueError(f"message {place + 1}: the chat template {_REWRITES}")
                first = self._behind_prompt(whole, messages, tools, place, first, last)
            else:
                first, last = self._prefix_span(whole, messages, tools, place)
            last = self._ended(whole, first, last, place)
            check_shown([messages[place]], whole[first:last], place)
            if any(thought not in whole[first:last] for thought in _thoughts(messages[place])):
                raise ValueError(f"message {place + 1}: the chat template leaves out the assistant's thinking")
            found += [whole[end:first], whole[first:last]]
            end = last
        return found

    def _marked(self, messages: Sequence[Message], tools: Any, answered: bool) -> str:
        values = {"tools": tools, "add_generation_prompt": not answered}
        try:
            return self.render_marked(messages=messages, **values)
        except ValueError:
            as_json = [_with_json_arguments(message) for message in messages]  # as some templates require, such as DeepSeek-V3's
            if as_json == messages:
                raise
        return self.render_marked(messages=as_json, **values)

    def _marked_spans(self, marked: str, messages: Sequence[Message]) -> dict[int, tuple[int, int]]:
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        spans, shift = [], 0
        for found in _MARKED.finditer(marked):
            first = found.start() - shift
            if spans and spans[-1][1] == first:
                first = spans.pop()[0]
            spans.append((first, found.start() - shift + len(found[1])))
            shift += len(_OPEN) + len(_CLOSE)
        if len(spans) != len(places):
            raise ValueError(f"the chat template marks {len(spans)} turns of the assistant; the conversation has {len(places)}")
        return dict(zip(places, spans))

    def _beginning(self, messages: Sequence[Message], tools: Any, place: int) -> str:
        """The conversation up to the turn at `place`. If the template refuses to end there (Qwen 3.5's does before the user has spoken), up
        to the first later message that it accepts."""
        for end in range(place + 1, len(messages)):
            with contextlib.suppress(ValueError):
                return self.render(messages[:end], tools, answered=True)
        return self.render(messages, tools, answered=True)

    def _behind_prompt(self, whole: str, messages: Sequence[Message], tools: Any, place: int, first: int, last: int) -> int:
        """Where a marked turn begins, after text that a rollout's prompt has already, such as the turn's header. If the template cannot
        make such a prompt, the mark alone counts."""
        try:
            prompt = self.render(messages[:place], tools)
        except ValueError:
            return first
        return len(prompt) if whole.startswith(prompt) and first < len(prompt) < last else first

    def _prefix_span(self, whole: str, messages: Sequence[Message], tools: Any, place: int) -> tuple[int, int]:
        prompt = self.render(messages[:place], tools)
        ended = self.render(messages[: place + 1], tools, answered=True)
        ended = ended[: min(self._ends(ended, len(prompt), len(ended)), default=len(ended))]
        if not (whole.startswith(ended) and ended.startswith(prompt)):
            alone = "the prompt that it makes for this turn is not the beginning of the conversation"
            why = alone if place == len(messages) - 1 else f"it {_REWRITES}"
            raise ValueError(f"message {place + 1}: the chat template does not show which text the assistant wrote: {why}")
        return len(prompt), len(ended)

    def _ended(self, whole: str, first: int, last: int, place: int) -> int:
        """Where the turn ends: after its first end-of-text token, where a rollout would stop. The token may follow the turn's text."""
        last += len(next((token for token in self.ends if whole.startswith(token, last)), ""))
        ends = self._ends(whole, first, last)
        if not ends:
            names = " and ".join(map(repr, self.ends))
            raise ValueError(
                f"message {place + 1}: the chat template does not end it with an end-of-text token of the model ({names}), so the "
                "model would never learn to stop. Set eos_token in tokenizer_config.json to the token that ends the template's turns"
            )
        rest = whole[min(ends) : last]
        for token in self.ends:
            rest = rest.replace(token, "")
        if rest.strip():
            raise ValueError(f"message {place + 1}: the chat template has an end-of-text token of the model in the middle of it")
        return min(ends)

    def _ends(self, text: str, first: int, last: int) -> list[int]:
        """For each end-of-text token that occurs in the span, the end of its first occurrence."""
        return [found + len(token) for token in self.ends if (found := text.find(token, first, last)) >= 0]

    def check(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> None:
        """Raises ValueError for a text that contains the name of a special token, since it could end a turn or open another."""
        for kind, values in (("message", messages), ("tool", tools or ())):
            for number, value in enumerate(values, start=1):
                for text in _texts(value):
                    if found := next((token for token in (*self.special_tokens, *self.ends) if token in text), None):
                        raise ValueError(f"{kind} {number}: holds the special token {found!r}, which could end a turn or open another")


def check_shown(messages: Sequence[Message], text: str, first: int = 0) -> None:
    """Raises ValueError if a message's text or tool calls are missing from the rendered text, since a template may leave out what it does
    not know. Templates may trim texts, leave out thinking and quote tool results, so this looks only for the last word."""
    for number, message in enumerate(messages, start=first + 1):
        names = [*map(name_of, message.get("tool_calls", []))]
        said = [word.rpartition(">")[2] or word for word in message["content"].split()[-1:]]
        for word in (*said, *names):
            if not any(form in text for form in (word, json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1])):
                what = "the call of" if word in names else "what it says, up to"
                raise ValueError(f"message {number}: the chat template leaves out {what} {word[:60]!r}")


def _says_nothing(message: Message) -> bool:
    return not (message["content"].strip() or message.get("tool_calls") or any(_thoughts(message)))


def _thoughts(message: Message) -> list[str]:
    """The thinking in an assistant's message: in a key of its own, or before each </think>."""
    inside = [text.rpartition("<think>")[2] for text in message["content"].split("</think>")[:-1]]
    return [text.strip() for text in (*(message.get(key) for key in _THOUGHTS), *inside) if isinstance(text, str)]


def name_of(call: Any) -> Any:
    """The function's name in a tool call, in OpenAI's form or without its outer object."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    return inner.get("name") if isinstance(inner, dict) else None


def _with_json_arguments(message: Message) -> Message:
    def of(call: Message) -> Message:
        if "function" in call:
            return {**call, "function": of(call["function"])}
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)} if "arguments" in call else call

    return {**message, "tool_calls": [*map(of, message["tool_calls"])]} if "tool_calls" in message else message


def _texts(value: Any) -> list[str]:
    """All texts inside."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return [value] if isinstance(value, str) else [*chain(*map(_texts, value))] if isinstance(value, list) else []


def _unmarked(text: str) -> str:
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def load_chat_template(source: str, setting: str, without: str = "write one with {prompt} in it") -> ChatTemplate:
    """The chat template of a tokenizer (a local folder or a hub name). If there is none, raises ConfigError that names `setting`, the
    "key=value" that needs it, and that says what to do `without` one."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    tokenizer = tokenizer_of(source, f"{setting}: tokenizer")
    settings = read_json(source, "tokenizer_config.json")
    file = find_file(source, "chat_template.jinja")
    text = file.read_text(encoding="utf-8") if file else _default(settings.get("chat_template"))
    if not text:
        raise ConfigError(f"{setting}: {source} has no chat template; {without}")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.datetime.now().strftime(form))
    try:
        template = environment.from_string(text)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{setting}: the chat template of {source} cannot be read: {error}") from error
    named = {name: token for name, token in settings.items() if name.endswith("_token") and token}
    tokens = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}

    def render(**values: Any) -> str:
        try:
            return template.render(**values, **tokens)
        except (jinja2.TemplateError, TypeError, AttributeError, LookupError) as error:  # raised by template code on odd messages
            raise ValueError(f"the chat template refuses it: {error}") from error

    ends = tuple(name for number in tokenizer.eos_ids if (name := tokenizer.backend.id_to_token(number)))
    return ChatTemplate(render, re.search(r"\{%-?\s*generation\b", text) is not None, tuple(tokenizer.special_tokens), ends)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_tag() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        """{% generation %} … {% endgeneration %}: what the assistant wrote."""

        tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    return GenerationTag


def _default(template: Any) -> Any:
    """The default template, if the tokenizer has several named ones."""
    return {entry["name"]: entry["template"] for entry in template}.get("default") if isinstance(template, list) else template


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
