"""The model's tokenizer: tokenizer.json, read with the tokenizers library (no torch, no model code)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from megarl.base.files import HubError, hub_file
from megarl.config.errors import ConfigError
from megarl.config.schema import ModelConfig
from megarl.models.spec import ModelSpec

_SHORT_CHARS = 4096
MOST_CHARS_PER_TOKEN = 64  # a bound for all but contrived texts, such as a megabyte of blanks


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, which threads may share. While it encodes a long text, other threads run."""

    source: str
    backend: tokenizers.Tokenizer
    bos_token: str | None
    unknown_id: int | None  # id for text that the tokenizer cannot represent; None if it can represent all text
    eos_ids: tuple[int, ...]  # any of these ends a response; SFT teaches the first; empty if the model has none

    @property
    def eos_id(self) -> int:
        return self.eos_ids[0]

    @property
    def largest_id(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values())

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt. They begin with exactly one BOS if the model expects it. No end token is added."""
        has_bos = self.bos_token is not None and text.startswith(self.bos_token)
        ids = _encode(self.backend, text, add_special_tokens=not has_bos)
        while ids and ids[-1] in self.eos_ids:
            ids.pop()
        return ids

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a whole response, without BOS and with end-of-text."""
        return [*_encode(self.backend, text), self.eos_id]

    def encode_text(self, text: str, special_tokens: bool = False) -> list[int]:
        """Token ids of text inside a sequence, with nothing added before or after it.

        Unless `special_tokens`, the name of a special token, such as "<eos>", is read as plain characters. So text from outside cannot end
        a turn or open another.
        """
        return _encode(self.backend if special_tokens else self._of_text, text)

    @cached_property
    def _of_text(self) -> tokenizers.Tokenizer:
        """A second tokenizer, which reads names of special tokens as text. Threads share tokenizers, so none may switch between the two."""
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of special tokens (not text), by name."""
        return {token.content: number for number, token in self.backend.get_added_tokens_decoder().items() if token.special}

    def same_ids(self, other: Tokenizer) -> bool:
        """Whether every token id means the same in both tokenizers."""
        own, others = (tokenizer.backend.get_vocab(with_added_tokens=True) for tokenizer in (self, other))
        return own == others

    def token_id(self, token: str) -> int | None:
        """The id of `token`; None if the tokenizer does not have it as a single token."""
        ids = self.encode_text(token, special_tokens=True)
        return ids[0] if len(ids) == 1 and ids[0] != self.unknown_id else None

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text, with the names of special tokens."""
        return self.backend.decode(list(token_ids), skip_special_tokens=False)

    def piece(self, token_id: int) -> str:
        """The text of one token inside a longer text. U+FFFD stands for a part of a character."""
        before = [self.eos_id]
        return self.decode_all([*before, token_id])[len(self.decode_all(before)) :]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return self.backend.decode(list(token_ids), skip_special_tokens=True)


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    if len(text) <= _SHORT_CHARS:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids  # releases Python's lock, which `encode` would hold


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer of `model.tokenizer`, else of `model.path`. Raises ConfigError."""
    return tokenizer_of(model.tokenizer or model.path, "model.tokenizer" if model.tokenizer else "model.path")


def tokenizer_of(source: str, key: str) -> Tokenizer:
    """The tokenizer of a local folder or a hub name. Raises ConfigError that names `key`."""
    try:
        file = _file(source, "tokenizer.json")
    except HubError as error:
        raise ConfigError(f"{key}={source}: {error}") from error
    if file is None:
        raise ConfigError(f"{key}={source}: the folder holds no tokenizer.json{_convert(Path(source))}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"{file}: not a tokenizer ({error})") from error
    settings = read_json(source, "tokenizer_config.json")
    unknown = _token(settings.get("unk_token"))
    return Tokenizer(
        source,
        backend,
        bos_token=_token(settings.get("bos_token")),
        unknown_id=backend.token_to_id(unknown) if unknown else None,
        eos_ids=_eos_ids(source, backend, _token(settings.get("eos_token"))),
    )


def _convert(folder: Path) -> str:
    """How to convert the folder's tokenizer, if it has one in another format."""
    convertible = any((folder / name).exists() for name in ("tokenizer.model", "vocab.json"))
    return "; transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) converts the one it has" if convertible else ""


def tokenizer_problems(tokenizer: Tokenizer, spec: ModelSpec) -> list[str]:
    """The reasons why a tokenizer does not fit a model; empty if it fits."""
    problems = []
    if tokenizer.largest_id >= spec.vocab_size:
        problems.append(
            f"tokenizer {tokenizer.source} has ids up to {tokenizer.largest_id}, but the model's vocab_size is {spec.vocab_size}: "
            "they do not belong together"
        )
    if not tokenizer.eos_ids:
        problems.append(
            f"tokenizer {tokenizer.source} has no end-of-text token: set eos_token in tokenizer_config.json to one of its tokens"
        )
    elif max(tokenizer.eos_ids) >= spec.vocab_size:
        largest = max(tokenizer.eos_ids)
        problems.append(f"tokenizer {tokenizer.source}: end-of-text id {largest} is not below the model's vocab_size {spec.vocab_size}")
    return problems


def _eos_ids(source: str, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """The tokenizer's own end-of-text id, then further ones from the model's generation settings (Llama 3 has three)."""
    own = backend.token_to_id(eos_token) if eos_token else None
    stated = read_json(source, "generation_config.json").get("eos_token_id", read_json(source, "config.json").get("eos_token_id"))
    stated_ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    return tuple(dict.fromkeys([*([] if own is None else [own]), *stated_ids]))


def _token(setting: Any) -> str | None:
    return setting["content"] if isinstance(setting, dict) else setting


def read_json(source: str, name: str) -> dict[str, Any]:
    """The contents of a JSON file beside the tokenizer; empty if there is none. Raises ConfigError if it is damaged."""
    if (file := find_file(source, name)) is None:
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: holds {type(found).__name__}, expected a JSON object")
    return found


def find_file(source: str, name: str) -> Path | None:
    """A file of a local folder or a hub repository; None if it is missing or the hub cannot be reached."""
    try:
        return _file(source, name)
    except HubError:
        return None


def _file(source: str, name: str) -> Path | None:
    if not Path(source).is_dir():
        return hub_file(source, name)
    file = Path(source) / name
    return file if file.is_file() else None
