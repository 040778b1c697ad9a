"""The model's tokenizer, as Transformers' AutoTokenizer makes it, in the tokenizers library (no
torch, no model code).
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from megarl.base.files import HubError, hub_file, hub_folder
from megarl.base.without_torch import ask_program
from megarl.config.errors import ConfigError
from megarl.config.schema import ModelConfig
from megarl.data import auto_tokenizer
from megarl.models.spec import ModelSpec
from megarl.rewards.extract import is_of_mark
from megarl.roles.settings import ChatTemplateConfig

# The files that AutoTokenizer may read.
_PATTERNS = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "*.bpe",
    "*.py",
    "additional_chat_templates/*.jinja",
)
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
_SHORT_CHARS = 4096
MOST_CHARS_PER_TOKEN = 64  # a bound for all but contrived texts, such as a megabyte of blanks


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer, which threads may share. While it encodes a long text, other threads run."""

    source: str
    backend: tokenizers.Tokenizer
    bos_token: str | None
    # id for text that the tokenizer cannot represent; None if it can represent all text
    unknown_id: int | None
    # any of these ends a response; SFT teaches the first; empty if the model has none
    eos_ids: tuple[int, ...]
    # bos_token and others -> the token, for templates
    special_names: Mapping[str, Any] = field(default_factory=dict)
    # by name; a single one is "default"
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    # what Transformers makes of conversations, to compare with
    chats: Sequence[Mapping[str, Any]] = ()
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)

    @property
    def eos_id(self) -> int:
        return self.eos_ids[0]

    @property
    def largest_id(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values())

    def encode_prompt(self, text: str, rendered: bool = False) -> list[int]:
        """Token ids of a prompt.

        `rendered`: by a chat template, which has written every special token itself, so none is
        added. Else they begin with BOS if the tokenizer adds it. No end token is added.
        """
        if rendered:
            return self.encode_text(text, special_tokens=True)
        encoding = _encoding(self.backend, text, add_special_tokens=True)
        ids = encoding.ids
        added = encoding.special_tokens_mask
        end = len(ids)
        while end and added[end - 1] and ids[end - 1] in self.eos_ids:
            end -= 1
        return ids[:end]

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a whole response, without BOS and with end-of-text."""
        return [*_encoding(self.backend, text).ids, self.eos_id]

    def encode_text(self, text: str, special_tokens: bool = False) -> list[int]:
        """Token ids of text inside a sequence, with nothing added before or after it.

        Unless `special_tokens`, the name of a special token, such as "<eos>", is read as plain
        characters. So text from outside cannot end a turn or open another.
        """
        return _encoding(self.backend if special_tokens else self._of_text, text).ids

    @cached_property
    def _of_text(self) -> tokenizers.Tokenizer:
        """A second tokenizer, which reads names of special tokens as text.

        Threads share tokenizers, so none may switch between the two.
        """
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of special tokens (not text), by name."""
        numbers = {}
        for number, token in self.backend.get_added_tokens_decoder().items():
            if token.special:
                numbers[token.content] = number
        return numbers

    def same_ids(self, tokenizer: Tokenizer) -> bool:
        """Whether every token id means the same in both tokenizers."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        return vocabulary == tokenizer.backend.get_vocab(with_added_tokens=True)

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

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """The text of a policy's turn, without special tokens except the marks of thinking and
        answers.

        Without them, what a model thinks could not be told from its answer: [THINK] of Magistral
        and <|channel|> of gpt-oss are special tokens, </think> of Qwen is not.
        """
        return self.decode_all([number for number in token_ids if number not in self._hidden_ids])

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        """Special tokens that are no marks."""
        specials = self.special_tokens.items()
        return frozenset(n for name, n in specials if n in self.eos_ids or not is_of_mark(name))


def _encoding(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False
) -> tokenizers.Encoding:
    if len(text) <= _SHORT_CHARS:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    # releases Python's lock, which `encode` would hold
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer of `model.tokenizer`, else of `model.path`. Raises ConfigError."""
    key = "model.tokenizer" if model.tokenizer else "model.path"
    return tokenizer_of(model.tokenizer or model.path, key, model.chat_template)


def tokenizer_of(
    source: str, key: str, chat_template: ChatTemplateConfig | None = None
) -> Tokenizer:
    """The tokenizer of a local folder or a hub name, as Transformers' AutoTokenizer makes it.

    Raises ConfigError that names `key`.

    Its token ids are compared with AutoTokenizer's for texts of many kinds. If any differ, it is
    refused.
    """
    try:
        folder = Path(source) if Path(source).is_dir() else hub_folder(source, _PATTERNS)
    except HubError as error:
        raise ConfigError(f"{key}={source}: {error}") from error
    if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES):
        raise ConfigError(
            f"{key}={source}: holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json or "
            "the like)"
        )
    read_json(str(folder), "tokenizer_config.json")  # says where it is damaged
    try:
        tokenizer = _checked(source, folder, _digest(folder))
    except ValueError as error:
        raise ConfigError(f"{key}={source}: {error}") from error
    return replace(tokenizer, chat_template=chat_template or ChatTemplateConfig())


@functools.lru_cache(maxsize=8)
def _checked(source: str, folder: Path, digest: bytes) -> Tokenizer:
    """Raises ValueError if ids or texts differ from AutoTokenizer's."""
    parts = _transformers_parts(source, folder, digest)
    problem = parts.get("problem")
    if problem:
        raise ValueError(problem)
    backend = tokenizers.Tokenizer.from_str(parts["backend"])
    backend.encode_special_tokens = parts["splits_special_tokens"]
    tokenizer = Tokenizer(
        source,
        backend,
        bos_token=parts["bos_token"],
        unknown_id=parts["unknown_id"],
        eos_ids=_eos_ids(str(folder), parts["eos_token_id"]),
        special_names=parts["special_tokens"],
        chat_templates=parts["chat_templates"],
        chats=parts["chats"],
    )
    for text in parts["texts"]:
        plain_ids = tokenizer.encode_text(text["text"], special_tokens=True)
        ids = _encoding(backend, text["text"], add_special_tokens=True).ids
        decoded = tokenizer.decode_all(ids), tokenizer.decode(ids)
        if (ids, plain_ids, *decoded) != (
            text["ids"],
            text["plain_ids"],
            text["decoded"],
            text["decoded_text"],
        ):
            raise ValueError(
                f"the tokenizers library encodes or decodes {text['text'][:60]!r} otherwise than "
                "transformers' AutoTokenizer"
            )
    return tokenizer


def _transformers_parts(source: str, folder: Path, digest: bytes) -> dict[str, Any]:
    """The result of data/auto_tokenizer.py."""
    tokenizer_name = str(folder.absolute()) if Path(source).is_dir() else source
    if "transformers.models.auto.tokenization_auto" in sys.modules:
        return auto_tokenizer.read(tokenizer_name, folder)
    name = "" if Path(source).is_dir() else source
    try:
        return ask_program(
            program=auto_tokenizer.__file__,
            arguments=[tokenizer_name, str(folder)],
            kind="tokenizers",
            decided_by=[name.encode(), digest],
        )
    except ValueError as error:
        raise ValueError(f"AutoTokenizer of transformers cannot read it: {error}") from error


def _digest(folder: Path) -> bytes:
    """Changes with the files that decide what AutoTokenizer makes of a folder."""
    files = {file for pattern in _PATTERNS for file in folder.glob(pattern) if file.is_file()}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.digest()


def tokenizer_problems(tokenizer: Tokenizer, spec: ModelSpec) -> list[str]:
    """The reasons why a tokenizer does not fit a model; empty if it fits."""
    problems = []
    if tokenizer.largest_id >= spec.vocab_size:
        largest = tokenizer.backend.id_to_token(tokenizer.largest_id)
        problems.append(
            f"tokenizer {tokenizer.source} has ids up to {tokenizer.largest_id} ({largest!r}), "
            "but the model's vocab_size is "
            f"{spec.vocab_size}: they do not belong together"
        )
    if not tokenizer.eos_ids:
        problems.append(
            f"tokenizer {tokenizer.source} has no end-of-text token: set eos_token in "
            "tokenizer_config.json to one of its tokens"
        )
    elif max(tokenizer.eos_ids) >= spec.vocab_size:
        largest = max(tokenizer.eos_ids)
        problems.append(
            f"tokenizer {tokenizer.source}: end-of-text id {largest} is not below the model's "
            f"vocab_size {spec.vocab_size}"
        )
    return problems


def _eos_ids(folder: str, of_tokenizer: int | None) -> tuple[int, ...]:
    """The tokenizer's own end-of-text id, then those of the model's files, at all of which SGLang
    ends a response (Llama 3 has three).

    Raises ConfigError for one that is no token id.
    """
    ids = [] if of_tokenizer is None else [of_tokenizer]
    for name in ("generation_config.json", "config.json"):
        stated = read_json(folder, name).get("eos_token_id")
        for number in stated if isinstance(stated, list) else [stated]:
            if number is None:
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ConfigError(
                    f"{folder}/{name}: eos_token_id={number!r} must be the id of a token, or a "
                    "list of ids"
                )
            ids.append(number)
    return tuple(dict.fromkeys(ids))


def read_json(source: str, name: str) -> dict[str, Any]:
    """The contents of a JSON file of a local folder or a hub name; empty if there is none, or the
    hub cannot be reached. Raises ConfigError if it is damaged.
    """
    try:
        file = Path(source) / name if Path(source).is_dir() else hub_file(source, name)
    except HubError:
        return {}
    if not file.is_file():
        return {}
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ConfigError(f"{file}: holds {type(contents).__name__}, expected a JSON object")
    return contents
