"""Checks a run's data before any process starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megarl.config.errors import ConfigError, problems_of
from megarl.config.schema import DatasetConfig, RunConfig
from megarl.data.datasets import answers_of, read_pairs, read_rows
from megarl.data.held_out import held_out, held_out_tokens
from megarl.data.mixture import source_sets
from megarl.data.pairs import pair_sets, pair_tokens
from megarl.data.records import is_local
from megarl.data.rows import Rows
from megarl.data.sft import sft_data
from megarl.data.synthetic import PREFIX
from megarl.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_problems
from megarl.models.spec import ModelSpec

KEPT_BACK = 6  # tokens of context and KV cache that SGLang keeps from every request (0.5.21, tp_worker.py: max_req_input_len)
_MAX_PROBLEMS = 10  # problems with prompts that are reported per dataset
_SYNTHETIC_ROWS = 64  # rows that are checked for all of a synthetic task
_AT_HAND_PROMPTS = 1000


@dataclass(frozen=True)
class Checked:
    """The result of checking one dataset. `rows` is None if it was not read, because it is on the hub."""

    key: str
    source: str
    rows: int | None
    prompts: int = 0

    def __str__(self) -> str:
        if self.rows is None:
            return f"{self.key}: {self.source}, on the hub, is read when the run starts"
        prompts = f"the first {self.prompts:,} prompts" if self.prompts < self.rows else "all prompts"
        lengths = f"{prompts} leave room for a response" if self.prompts else "lengths are checked when the run starts"
        read = "" if self.source.startswith(PREFIX) else ", all read"
        return f"{self.key}: {self.rows:,} rows of {self.source}{read}; {lengths}"


def check_data(config: RunConfig, spec: ModelSpec | None, command: str, at_hand: bool = False) -> list[Checked]:
    """Reads what `command` ("train", "sft", "reward-model", "eval") will read, and checks it against tokenizer and model; without `spec`
    only the rows.

    `at_hand`: checks only what is on this machine, and at most a thousand prompts per dataset against the model's context.
    Raises ConfigError with all problems: in the files (see load_rows), a tokenizer that does not fit the model, characters that the
    tokenizer does not know, prompts that leave no room for a response in the model's context.
    """
    problems: list[str] = []
    tokenizer, checked = None, []
    if not at_hand or Path(config.model.tokenizer or config.model.path).is_dir():
        try:
            tokenizer = load_tokenizer(config.model)
        except ConfigError as error:
            problems += error.problems
    if tokenizer is not None and spec is not None:
        problems += tokenizer_problems(tokenizer, spec)
    for key, dataset, response_tokens in _datasets(config, command):
        answers = "none" if command == "sft" else answers_of(config, not key.startswith("data.train"), key.removeprefix("eval.suites."))
        if at_hand and not is_local(dataset.source):
            checked.append(Checked(key, dataset.source, None))
            continue
        most = _SYNTHETIC_ROWS if dataset.source.startswith(PREFIX) else _AT_HAND_PROMPTS if at_hand else None
        try:
            rows, count = read_rows(dataset, key, config.seed, answers, config.model.tokenizer or config.model.path, most)
        except ConfigError as error:
            problems += error.problems
            continue
        fits = tokenizer is not None and spec is not None
        if tokenizer is not None and spec is not None:
            problems += _prompt_problems(dataset, rows, tokenizer, _room(config, spec, command, response_tokens))
        checked.append(Checked(key, dataset.source, count, len(rows) if fits else 0))
    for key, dataset in pair_sets(config) if command == "reward-model" else ():
        if at_hand and not is_local(dataset.source):
            checked.append(Checked(key, dataset.source, None))
            continue
        most = _SYNTHETIC_ROWS if dataset.source.startswith(PREFIX) else _AT_HAND_PROMPTS if at_hand else None
        try:
            pairs, count = read_pairs(dataset, key, config.seed, config.model.tokenizer or config.model.path, most)
        except ConfigError as error:
            problems += error.problems
            continue
        if tokenizer is not None and tokenizer.eos_ids and spec is not None:
            tokens = spec.max_position_embeddings
            problems += _first(problems_of(*(partial(pair_tokens, pair, tokenizer, tokens) for pair in pairs)), dataset.source)
        checked.append(Checked(key, dataset.source, count))
    if problems:
        raise ConfigError(problems)
    return checked


def _datasets(config: RunConfig, command: str) -> list[tuple[str, DatasetConfig, int]]:
    """(key, dataset, most tokens of a response) of all datasets that the command reads. SFT checks lengths while it runs."""
    if command == "reward-model":
        return []
    if command == "sft":
        dataset, key = sft_data(config)
        held_out_ones = [("sft.eval", config.sft.eval)] if config.sft.eval else []
        return [(own, source, 1) for own, source in [*source_sets(dataset, key), *held_out_ones]]
    evaluation = [(key, dataset, held_out_tokens(config, own)) for _, key, dataset, own in held_out(config)]
    train = [(key, source, config.rollout.max_tokens) for key, source in source_sets(config.data.train, "data.train")]
    return evaluation if command == "eval" else [*train, *evaluation]


def _room(config: RunConfig, spec: ModelSpec, command: str, response_tokens: int) -> tuple[int, str]:
    """How many tokens a prompt may have, and how that number comes about.

    KEPT_BACK is subtracted because a response that the engine cut short could not be continued: it refuses so long a prompt and prefix.
    """
    tokens, of_what = spec.max_position_embeddings, "context"
    if command == "sft":
        return tokens - response_tokens, f"{tokens} tokens of context less {response_tokens} for the response"
    cached = config.generator.kv_cache_tokens
    if cached is not None and cached < tokens:
        tokens, of_what = cached, "generator.kv_cache_tokens"
    less = f"{response_tokens} for the response and {KEPT_BACK} that SGLang keeps back"
    return tokens - response_tokens - KEPT_BACK, f"{tokens} tokens of {of_what} less {less}"


def _prompt_problems(dataset: DatasetConfig, rows: Rows, tokenizer: Tokenizer, room: tuple[int, str]) -> list[str]:
    found = (_prompt_problem(row.where, row.prompt, tokenizer, *room) for row in rows)
    return _first([problem for problem in found if problem], dataset.source)


def _first(problems: list[str], source: str) -> list[str]:
    hidden = len(problems) - _MAX_PROBLEMS
    return problems if hidden <= 0 else [*problems[:_MAX_PROBLEMS], f"{source}: {hidden} more such prompts"]


def _prompt_problem(where: str, prompt: str, tokenizer: Tokenizer, room: int, reckoned: str) -> str | None:
    ids = tokenizer.encode_prompt(prompt)
    if len(ids) > room:
        return f"{where}: the prompt has {len(ids)} tokens; there is room for {room} ({reckoned})"
    if tokenizer.unknown_id is not None and tokenizer.unknown_id in ids:
        return f"{where}: the tokenizer does not know some of the characters of {prompt[:60]!r}"
    return None
