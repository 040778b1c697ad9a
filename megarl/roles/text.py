"""The input of a model that reads other models' text, as token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megarl.config.errors import ConfigError
from megarl.config.roles import CHAT
from megarl.data.chat import load_chat_template
from megarl.data.tokenizer import Tokenizer

_FIELD = re.compile(r"\{[a-z_]+\}")


class Template:
    """A text with fields such as {response}, encoded with other values in them.

    The values may be hostile: in them, the name of a special token is plain characters, so they cannot end a turn or open another. Only
    special tokens of the text itself count. Apart from that, the ids are those of the whole text: nothing is cut between it and a value.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, fields: Sequence[str]):
        self._tokenizer = tokenizer
        special = tokenizer.special_tokens
        marks = sorted(special, key=len, reverse=True)
        cuts = re.compile("|".join(map(re.escape, [*(f"{{{field}}}" for field in fields), *marks])))
        self._pieces: list[int | str | tuple[str]] = []  # a special token, text, the name of a field
        end = 0
        for found in cuts.finditer(text):
            self._pieces += [text[end : found.start()], special[found[0]] if found[0] in special else (found[0][1:-1],)]
            end = found.end()
        self._pieces.append(text[end:])
        begun = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        self._begin = [] if begun else tokenizer.encode_prompt("")

    def encode(self, **values: str) -> list[int]:
        ids, text = list(self._begin), ""
        for piece in self._pieces:
            if isinstance(piece, int):
                ids += [*self._tokenizer.encode_text(text), piece]
                text = ""
            else:
                text += piece if isinstance(piece, str) else values[piece[0]]
        return ids + self._tokenizer.encode_text(text)


def chat_text(tokenizer: Tokenizer, key: str, *contents: str) -> str:
    """A user's message and, if there is a second, the assistant's, in the tokenizer's chat template. Raises ConfigError, also if the chat
    template leaves out a field of these."""
    template, roles = load_chat_template(tokenizer.source, f"{key}={CHAT}"), ("user", "assistant")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    try:
        text = template.render(messages, answered=len(contents) > 1)
    except ValueError as error:
        raise ConfigError(f"{key}: {str(error).replace('chat template', f'chat template of {tokenizer.source}', 1)}") from error
    if lost := [field for content in contents for field in _FIELD.findall(content) if field not in text]:
        raise ConfigError(f"{key}: the chat template of {tokenizer.source} leaves out {', '.join(lost)}")
    return text
