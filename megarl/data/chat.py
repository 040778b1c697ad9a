"""Renders conversations with a tokenizer's chat template, exactly as transformers does, and finds
the text that the assistant wrote.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NoReturn

from megarl.config.errors import ConfigError
from megarl.data import auto_tokenizer
from megarl.data.tokenizer import Tokenizer
from megarl.roles.settings import ChatTemplateConfig

CHAT = "chat"  # as prompt_template: use the model's chat template
_NONCE = secrets.token_hex(8)  # random, so that no message can contain the marks
_OPEN = f"\ue000{_NONCE}"
_CLOSE = f"\ue001{_NONCE}"
_MARKED = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)
_REWRITES = (
    "changes this turn, or text before it, when more messages follow; with learn=last "
    "only the last turn is learned"
)
_DEFAULT = "default"
_TOOL_USE = "tool_use"  # names of templates in Transformers
RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "chat_template",
    "tokenize",
    "continue_final_message",
)
"""No arguments of a template: Transformers and SGLang give them a meaning of their own."""
# keys of a message for the assistant's thinking
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Code points that stand for special tokens in messages while the template renders them. They are
# for private use. Terminals have no glyphs for them, unlike for those from U+E000 on.
_HIDDEN = 0x10F000
Message = dict[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """Turns messages (role, content, and what else the template reads) into text.

    All methods raise ValueError for messages it refuses.
    """

    variants: Mapping[str, Any]  # name -> jinja2's template
    name: str | None  # the variant to use; None: as Transformers chooses
    variables: Mapping[str, Any]  # special tokens such as bos_token, and arguments
    special_tokens: tuple[str, ...]
    ends: tuple[str, ...]  # the model's end-of-text tokens
    # the variants that mark assistant turns with {% generation %}
    marking: frozenset[str] = field(default_factory=frozenset)

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        return replace(self, variables={**self.variables, **arguments})

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, answered: bool = False
    ) -> str:
        """The prompt, up to the start of the assistant's turn.

        `answered`: the last message is the assistant's, so no turn is opened.
        """
        return _unmarked(self._marked(messages, tools, answered))

    def pieces(
        self, messages: Sequence[Message], tools: Any, learned: Collection[int]
    ) -> list[str]:
        """The conversation up to the last learned turn, as texts that are alternately context and
        learned. `learned`: indices of messages.

        A learned turn includes the end-of-text token after it, with which a model ends it in a
        rollout. It excludes the text that the template puts before it, which a rollout's prompt has
        already.

        If the template marks the assistant's turns ({% generation %}), the marks give their places.
        Adjacent marks are merged, and text that the turn's prompt has already is left out.
        Otherwise a turn is the text that the template adds to the prompt of the messages before it,
        and the whole conversation must begin with that prompt. In both cases, the conversation up
        to the turn must be rendered the same whether or not messages follow. A template that
        rewrites earlier turns when others follow fails this; Qwen3's does so with thinking.
        """
        marked = self._marked(messages, tools, True)
        text = _unmarked(marked)
        spans = None
        if self._variant(tools) in self.marking:
            spans = self._marked_spans(marked, messages)
        pieces = []
        end = 0
        for place in sorted(learned):
            message = messages[place]
            thoughts = _thoughts(message)
            if not (message["content"].strip() or message.get("tool_calls") or any(thoughts)):
                raise ValueError(
                    f"message {place + 1}: it is empty: the model would learn to stop at once; "
                    '"weight": 0 leaves it out'
                )
            if spans:
                first, last = spans[place]
                if not self._beginning(messages, tools, place).startswith(text[:last]):
                    raise ValueError(f"message {place + 1}: the chat template {_REWRITES}")
                first = self._behind_prompt(text, messages, tools, place, first, last)
            else:
                first, last = self._prefix_span(text, messages, tools, place)
            last = self._ended(text, first, last, place)
            check_shown([messages[place]], text[first:last], place)
            if any(thought not in text[first:last] for thought in thoughts):
                raise ValueError(
                    f"message {place + 1}: the chat template leaves out the assistant's thinking"
                )
            pieces += [text[end:first], text[first:last]]
            end = last
        return pieces

    def _variant(self, tools: Any) -> str:
        """Chosen as by get_chat_template of Transformers."""
        if self.name:
            return self.name
        if tools is not None and _TOOL_USE in self.variants:
            return _TOOL_USE
        return _DEFAULT

    def following(
        self, messages: Sequence[Message], tokenizer: Tokenizer, ended: bool
    ) -> list[int]:
        """The ids with which the template goes on behind a turn of the assistant: `messages`, then
        the start of the next turn. They begin with the token that ends the turn, unless the model
        has sampled it (`ended`).

        Only `messages` are rendered, behind a short conversation. So templates that rewrite earlier
        turns change nothing. Names of special tokens in `messages` stay text. Raises ValueError if
        the template refuses the messages, or does not end turns with an end-of-text token.
        """
        names = StandIns([*self.special_tokens, *self.ends])
        calls = []
        for message in messages:
            if message["role"] == "tool":
                call_id = message.get("tool_call_id", "call00000")
                function = {"name": "call", "arguments": {}}
                calls.append({"type": "function", "id": call_id, "function": function})
        turn: Message = {"role": "assistant", "content": _NONCE}
        if calls:
            turn["tool_calls"] = calls
        shown = list(map(names.hide, messages))
        rendered = self.render([{"role": "user", "content": "."}, turn, *shown])
        check_shown(shown, rendered, 2)
        answer_end = rendered.rfind(_NONCE) + len(_NONCE)
        ends = {rendered.find(token, answer_end): token for token in self.ends}
        ends.pop(-1, None)
        if not ends or (rendered[answer_end : min(ends)].strip() and not calls):
            raise ValueError(
                "the chat template does not end the assistant's turn with an end-of-text token of "
                "the model"
            )
        first = min(ends)
        return names.encode(rendered[first + len(ends[first]) * ended :], tokenizer)

    def _marked(self, messages: Sequence[Message], tools: Any, answered: bool) -> str:
        tools = tools or None
        values = {
            "documents": None,
            **self.variables,
            "tools": tools,
            "add_generation_prompt": not answered,
        }
        template = self.variants[self._variant(tools)]
        try:
            as_objects = [_with_arguments(message, _Arguments) for message in messages]
            return _rendered(template, messages=as_objects, **values)
        except ValueError:
            # as some templates require, such as DeepSeek-V3's
            as_json = [_with_arguments(message, _as_json) for message in messages]
            if as_json == messages:
                raise
        return _rendered(template, messages=as_json, **values)

    def _marked_spans(self, marked: str, messages: Sequence[Message]) -> dict[int, tuple[int, int]]:
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        shift = 0
        for match in _MARKED.finditer(marked):
            first = match.start() - shift
            if spans and spans[-1][1] == first:
                first = spans.pop()[0]
            spans.append((first, match.start() - shift + len(match[1])))
            shift += len(_OPEN) + len(_CLOSE)
        if len(spans) != len(places):
            raise ValueError(
                f"the chat template marks {len(spans)} turns of the assistant; the conversation "
                f"has {len(places)}"
            )
        return dict(zip(places, spans))

    def _beginning(self, messages: Sequence[Message], tools: Any, place: int) -> str:
        """The conversation up to the turn at `place`.

        If the template refuses to end there (Qwen 3.5's does before the user has spoken), up to the
        first later message that it accepts.
        """
        for end in range(place + 1, len(messages)):
            with contextlib.suppress(ValueError):
                return self.render(messages[:end], tools, answered=True)
        return self.render(messages, tools, answered=True)

    def _behind_prompt(
        self, text: str, messages: Sequence[Message], tools: Any, place: int, first: int, last: int
    ) -> int:
        """Where a marked turn begins, after text that a rollout's prompt has already, such as the
        turn's header. If the template cannot make such a prompt, the mark alone counts.
        """
        try:
            prompt = self.render(messages[:place], tools)
        except ValueError:
            return first
        return len(prompt) if text.startswith(prompt) and first < len(prompt) < last else first

    def _prefix_span(
        self, text: str, messages: Sequence[Message], tools: Any, place: int
    ) -> tuple[int, int]:
        prompt = self.render(messages[:place], tools)
        ended = self.render(messages[: place + 1], tools, answered=True)
        ended = ended[: min(self._ends(ended, len(prompt), len(ended)), default=len(ended))]
        if not (text.startswith(ended) and ended.startswith(prompt)):
            reason = f"it {_REWRITES}"
            if place == len(messages) - 1:
                reason = (
                    "the prompt that it makes for this turn is not the beginning of the "
                    "conversation"
                )
            raise ValueError(
                f"message {place + 1}: the chat template does not show which text the assistant "
                f"wrote: {reason}"
            )
        return len(prompt), len(ended)

    def _ended(self, text: str, first: int, last: int, place: int) -> int:
        """Where the turn ends: after its first end-of-text token, where a rollout would stop. The
        token may follow the turn's text.
        """
        for token in self.ends:
            if text.startswith(token, last):
                last += len(token)
                break
        ends = self._ends(text, first, last)
        if not ends:
            names = " and ".join(map(repr, self.ends))
            raise ValueError(
                f"message {place + 1}: the chat template does not end it with an end-of-text "
                f"token of the model ({names}), so the "
                "model would never learn to stop. Set eos_token in tokenizer_config.json to the "
                "token that ends the template's turns"
            )
        remainder = text[min(ends) : last]
        for token in self.ends:
            remainder = remainder.replace(token, "")
        if remainder.strip():
            raise ValueError(
                f"message {place + 1}: the chat template has an end-of-text token of the model in "
                "the middle of it"
            )
        return min(ends)

    def _ends(self, text: str, first: int, last: int) -> list[int]:
        """For each end-of-text token that occurs in the span, the end of its first occurrence."""
        starts = {token: text.find(token, first, last) for token in self.ends}
        return [start + len(token) for token, start in starts.items() if start >= 0]

    @property
    def remark(self) -> str:
        """A warning if turns in this template do not end where the model's responses do; else
        empty.
        """
        answer = f"{_NONCE}."
        try:
            text = self.render(
                [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}],
                answered=True,
            )
        except ValueError:
            return ""
        after = text.partition(answer)[2].strip()
        if any(end in after for end in self.ends):
            return ""
        names = " and ".join(map(repr, self.ends))
        return (
            f"the chat template ends the assistant's turns with {after!r}, which is no "
            f"end-of-text token of the model ({names}): responses "
            "may run on to rollout.max_tokens. Set eos_token in tokenizer_config.json to the "
            "token that ends the template's turns"
        )

    def check(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> None:
        """Raises ValueError for a text that contains the name of a special token, since it could
        end a turn or open another.
        """
        for kind, values in (("message", messages), ("tool", tools or ())):
            for number, value in enumerate(values, start=1):
                for text in _texts(value):
                    for token in (*self.special_tokens, *self.ends):
                        if token in text:
                            raise ValueError(
                                f"{kind} {number}: holds the special token {token!r}, which could "
                                "end a turn or open another"
                            )


class StandIns:
    """Replaces the names of special tokens in messages by private-use code points."""

    def __init__(self, names: Sequence[str]):
        longest_first = sorted(set(names), key=len, reverse=True)
        self._names = {chr(_HIDDEN + n): name for n, name in enumerate(longest_first)}
        self._marks = re.compile(f"[{''.join(self._names)}]" if self._names else "(?!)")

    def hide(self, value: Any) -> Any:
        if isinstance(value, str):
            for mark, name in self._names.items():
                value = value.replace(name, mark)
            return value
        if isinstance(value, dict):
            return {name: self.hide(inner) for name, inner in value.items()}
        return list(map(self.hide, value)) if isinstance(value, list) else value

    def parts(self, text: str) -> list[tuple[str, bool]]:
        """The pieces of `text` in order, each with whether special tokens in it count as such."""
        parts = []
        start = 0
        for mark in self._marks.finditer(text):
            parts += [(text[start : mark.start()], True), (self._names[mark[0]], False)]
            start = mark.end()
        return [part for part in [*parts, (text[start:], True)] if part[0]]

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Tokenises rendered text.

        The template's own text may name special tokens; text of messages stays text, whatever it
        looks like.
        """
        ids: list[int] = []
        for part, special in self.parts(text):
            ids += tokenizer.encode_text(part, special_tokens=special)
        return ids


def check_shown(messages: Sequence[Message], text: str, first: int = 0) -> None:
    """Raises ValueError if a message's text or tool calls are missing from the rendered text, since
    a template may leave out what it does not know. Templates may trim texts, leave out thinking and
    quote tool results, so this looks only for the last word.
    """
    for number, message in enumerate(messages, start=first + 1):
        names = [*map(name_of, message.get("tool_calls", []))]
        last_words = [word.rpartition(">")[2] or word for word in message["content"].split()[-1:]]
        for word in (*last_words, *names):
            forms = (
                word,
                json.dumps(word)[1:-1],
                json.dumps(word, ensure_ascii=False)[1:-1],
            )
            if not any(form in text for form in forms):
                subject = "the call of" if word in names else "what it says, up to"
                raise ValueError(
                    f"message {number}: the chat template leaves out {subject} {word[:60]!r}"
                )


def _thoughts(message: Message) -> list[str]:
    """The thinking in an assistant's message: in a key of its own, or before each </think>."""
    inside = [text.rpartition("<think>")[2] for text in message["content"].split("</think>")[:-1]]
    texts = [*map(message.get, _THOUGHTS), *inside]
    return [text.strip() for text in texts if isinstance(text, str)]


def name_of(call: Any) -> Any:
    """The function's name in a tool call, in OpenAI's form or without its outer object."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    return inner.get("name") if isinstance(inner, dict) else None


class _Arguments(dict):
    """Arguments of a tool call.

    A template that prints them without `tojson` expects JSON text, as in OpenAI's form.
    """

    def __str__(self) -> str:
        return _as_json(self)


def _as_json(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _with_arguments(message: Message, form: Callable[[Any], Any]) -> Message:
    """The message with `form` of the arguments of its tool calls, where they are objects."""

    def convert(call: Message) -> Message:
        if "function" in call:
            return {**call, "function": convert(call["function"])}
        if isinstance(call.get("arguments"), dict):
            return {**call, "arguments": form(call["arguments"])}
        return call

    if message.get("tool_calls"):
        return {**message, "tool_calls": list(map(convert, message["tool_calls"]))}
    return message


def _texts(value: Any) -> list[str]:
    """All texts inside."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, str):
        return [value]
    return [*chain(*map(_texts, value))] if isinstance(value, list) else []


def _unmarked(text: str) -> str:
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def load_chat_template(
    tokenizer: Tokenizer, setting: str, without: str = "write one with {prompt} in it"
) -> ChatTemplate:
    """The chat template of a tokenizer.

    If there is none, or not the one that is asked for, raises ConfigError that names `setting`, the
    "key=value" that needs it, and that says what to do `without` one.
    """
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    texts = tokenizer.chat_templates
    template_settings: ChatTemplateConfig = tokenizer.chat_template
    name = template_settings.name
    arguments = template_settings.arguments
    if not texts:
        raise ConfigError(f"{setting}: {tokenizer.source} has no chat template; {without}")
    if (name or _DEFAULT) not in texts:
        raise ConfigError(
            f"{setting}: chat_template.name={name or 'null'}: the templates of {tokenizer.source} "
            f"are {', '.join(texts)}"
        )
    for argument in arguments:
        if argument in RESERVED:
            raise ConfigError(
                f"{setting}: chat_template.arguments.{argument}: is set for every conversation; it "
                "cannot be an argument"
            )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
    )
    environment.filters["tojson"] = _to_json
    # One date for the whole run, also if it is resumed on another day: prompts stay the same.
    date = datetime.datetime.now()
    if template_settings.date:
        date = datetime.datetime.fromisoformat(template_settings.date)
    environment.globals.update(raise_exception=_refuse, strftime_now=date.strftime)
    try:
        variants = {variant: environment.from_string(text) for variant, text in texts.items()}
    except jinja2.TemplateError as error:
        raise ConfigError(
            f"{setting}: the chat template of {tokenizer.source} cannot be read: {error}"
        ) from error
    template = ChatTemplate(
        variants=variants,
        name=name,
        variables=tokenizer.special_names,
        special_tokens=tuple(tokenizer.special_tokens),
        ends=tuple(filter(None, map(tokenizer.backend.id_to_token, tokenizer.eos_ids))),
        marking=frozenset(
            variant for variant, text in texts.items() if re.search(r"\{%-?\s*generation\b", text)
        ),
    )
    _compare(template, tokenizer, setting)
    return template.with_arguments(arguments)


def _compare(template: ChatTemplate, tokenizer: Tokenizer, setting: str) -> None:
    """Raises ConfigError if conversations are not rendered as by apply_chat_template of
    Transformers, which is given a call's arguments as an object or as JSON.
    """
    names = {text: name for name, text in tokenizer.chat_templates.items()}
    for chat in tokenizer.chats:
        one = replace(template, name=names[chat["template"]]).with_arguments(
            {"strftime_now": auto_tokenizer.strftime}
        )
        messages = auto_tokenizer.conversations(auto_tokenizer.ARGUMENTS)[chat["number"]]
        try:
            text = one.render(messages, chat["tools"], answered=messages[-1]["role"] == "assistant")
        except ValueError:
            text = None
        if text not in chat["texts"]:
            raise ConfigError(
                f"{setting}: the chat template of {tokenizer.source} is rendered otherwise than "
                f"by Transformers: {text!r:.300}"
            )


def _rendered(template: Any, **values: Any) -> str:
    """Raises ValueError."""
    import jinja2

    try:
        return template.render(**values)
    except (jinja2.TemplateError, TypeError, AttributeError, LookupError) as error:
        # raised by template code on odd messages
        raise ValueError(f"the chat template refuses it: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


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


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
