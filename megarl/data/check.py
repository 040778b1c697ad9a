"""All that can be wrong with a run's data, found before any process starts."""

from __future__ import annotations

from typing import Optional

from megarl.config.errors import ConfigError
from megarl.config.schema import DatasetConfig, RunConfig
from megarl.data.datasets import load_rows
from megarl.data.synthetic import PREFIX
from megarl.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_problems
from megarl.models.spec import ModelSpec

KEPT_BACK = 6  # tokens of its context, and of its KV cache, that SGLang uses for no request (0.5.21, tp_worker.py: max_req_input_len)
_MAX_PROBLEMS = 10  # too long prompts named per dataset
_SYNTHETIC_ROWS = 64  # rows of a synthetic task that stand for all of them


def check_data(config: RunConfig, spec: ModelSpec, command: str) -> None:
    """Reads what `command` ("train", "sft", "eval") will read, and checks it against tokenizer and model.

    Raises: ConfigError with all problems: of the files (see load_rows), a tokenizer that does not fit the model,
    characters the tokenizer does not know, prompts that leave no room for a response in the model's context.
    """
    tokenizer = load_tokenizer(config.model)
    problems = tokenizer_problems(tokenizer, spec)
    for key, dataset, response_tokens in _datasets(config, command):
        problems += _dataset_problems(config, key, dataset, tokenizer, _room(config, spec, command, response_tokens))
    if problems:
        raise ConfigError(problems)


def _datasets(config: RunConfig, command: str) -> list[tuple[str, DatasetConfig, int]]:
    """(key, dataset, tokens its responses may have) of all datasets that the command reads. SFT checks lengths as it goes."""
    if command == "sft":
        return [("sft.data", config.sft.data, 1)] if config.sft.data else [("data.train", config.data.train, 1)]
    evaluation = [("data.eval", config.data.eval, config.eval.max_tokens or config.rollout.max_tokens)] if config.data.eval else []
    return evaluation if command == "eval" else [("data.train", config.data.train, config.rollout.max_tokens), *evaluation]


def _room(config: RunConfig, spec: ModelSpec, command: str, response_tokens: int) -> tuple[int, str]:
    """Tokens that a prompt may have, and how they are reckoned.

    A response that the engine ends before its last token could not be gone on with: a prompt and a prefix so long are refused.
    """
    tokens, of_what = spec.max_position_embeddings, "context"
    if command == "sft":
        return tokens - response_tokens, f"{tokens} tokens of context less {response_tokens} for the response"
    cached = config.generator.kv_cache_tokens
    if cached is not None and cached < tokens:
        tokens, of_what = cached, "generator.kv_cache_tokens"
    less = f"{response_tokens} for the response and {KEPT_BACK} that SGLang keeps back"
    return tokens - response_tokens - KEPT_BACK, f"{tokens} tokens of {of_what} less {less}"


def _dataset_problems(
    config: RunConfig, key: str, dataset: DatasetConfig, tokenizer: Tokenizer, room: tuple[int, str]
) -> list[str]:
    try:
        rows = load_rows(dataset, key, config.seed)
    except ConfigError as error:
        return error.problems
    checked = range(min(len(rows), _SYNTHETIC_ROWS)) if dataset.source.startswith(PREFIX) else range(len(rows))
    found = (_prompt_problem(rows[i].where, rows[i].prompt, tokenizer, *room) for i in checked)
    problems = [problem for problem in found if problem]
    hidden = len(problems) - _MAX_PROBLEMS
    return problems if hidden <= 0 else [*problems[:_MAX_PROBLEMS], f"{dataset.source}: {hidden} more such prompts"]


def _prompt_problem(where: str, prompt: str, tokenizer: Tokenizer, room: int, reckoned: str) -> Optional[str]:
    ids = tokenizer.encode_prompt(prompt)
    if len(ids) > room:
        return f"{where}: the prompt has {len(ids)} tokens; there is room for {room} ({reckoned})"
    if tokenizer.unknown_id is not None and tokenizer.unknown_id in ids:
        return f"{where}: the tokenizer does not know some of the characters of {prompt[:60]!r}"
    return None
