"""Renders conversations by a tokenizer's chat template, exactly as transformers does."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megarl.config.errors import ConfigError
from megarl.data.tokenizer import find_file, read_json

CHAT = "chat"  # as prompt_template: use the model's chat template
Render = Callable[[Sequence[dict[str, Any]]], str]
"""Messages with role and content -> the prompt, up to where the assistant begins. Raises ValueError if the template refuses them."""


def load_chat_template(source: str, setting: str, *, answered: bool = False) -> Render:
    """The chat template of a tokenizer (a local folder or a hub name). `answered`: the last message is the assistant's, nothing follows.
    Raises ConfigError that names `setting`, the "key=value" which asks for it."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    settings = read_json(source, "tokenizer_config.json")
    file = find_file(source, "chat_template.jinja")
    text = file.read_text() if file else _default(settings.get("chat_template"))
    if not text:
        raise ConfigError(f"{setting}: {source} has no chat template; write one with {{prompt}} in it")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.datetime.now().strftime(form))
    try:
        template = environment.from_string(text)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{setting}: the chat template of {source} cannot be read: {error}") from error
    named = {name: token for name, token in settings.items() if name.endswith("_token") and token}
    tokens = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}

    def render(messages: Sequence[dict[str, Any]]) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=not answered, **tokens)
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error

    return render


def _default(template: Any) -> Any:
    """The default template, if the tokenizer has several by name."""
    return {entry["name"]: entry["template"] for entry in template}.get("default") if isinstance(template, list) else template


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
