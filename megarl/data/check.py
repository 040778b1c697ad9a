"""All that can be wrong with a run's data, found before any process starts."""

from __future__ import annotations

from typing import Optional

from megarl.config.errors import ConfigError
from megarl.config.schema import DatasetConfig, RunConfig
from megarl.data.datasets import answers_of, load_rows
from megarl.data.rows import Answers
from megarl.data.synthetic import PREFIX
from megarl.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_problems
from megarl.models.spec import ModelSpec

_MAX_PROBLEMS = 10  # too long prompts named per dataset
_SYNTHETIC_ROWS = 64  # rows of a synthetic task that stand for all of them


def check_data(config: RunConfig, spec: ModelSpec, command: str) -> None:
    """Reads what `command` ("train", "sft", "eval") will read, and checks it against tokenizer and model.

    Raises: ConfigError with all problems: of the files (see load_rows), a tokenizer that does not fit the model,
    characters the tokenizer does not know, prompts that leave no room for a response in the model's context.
    """
    tokenizer = load_tokenizer(config.model)
    problems = tokenizer_problems(tokenizer, spec)
    answers = "none" if command == "sft" else answers_of(config)
    for key, dataset, response_tokens in _datasets(config, command):
        problems += _dataset_problems(config.seed, key, dataset, answers, tokenizer, spec, response_tokens)
    if problems:
        raise ConfigError(problems)


def _datasets(config: RunConfig, command: str) -> list[tuple[str, DatasetConfig, int]]:
    """(key, dataset, tokens its responses may have) of all datasets that the command reads. SFT checks lengths as it goes."""
    if command == "sft":
        return [("sft.data", config.sft.data, 1)] if config.sft.data else [("data.train", config.data.train, 1)]
    evaluation = [("data.eval", config.data.eval, config.eval.max_tokens or config.rollout.max_tokens)] if config.data.eval else []
    return evaluation if command == "eval" else [("data.train", config.data.train, config.rollout.max_tokens), *evaluation]


def _dataset_problems(
    seed: int, key: str, dataset: DatasetConfig, answers: Answers, tokenizer: Tokenizer, spec: ModelSpec, response_tokens: int
) -> list[str]:
    try:
        rows = load_rows(dataset, key, seed, answers, tokenizer.source)
    except ConfigError as error:
        return error.problems
    checked = range(min(len(rows), _SYNTHETIC_ROWS)) if dataset.source.startswith(PREFIX) else range(len(rows))
    found = (_prompt_problem(rows[i].where, rows[i].prompt, tokenizer, spec, response_tokens) for i in checked)
    problems = [problem for problem in found if problem]
    hidden = len(problems) - _MAX_PROBLEMS
    return problems if hidden <= 0 else [*problems[:_MAX_PROBLEMS], f"{dataset.source}: {hidden} more such prompts"]


def _prompt_problem(where: str, prompt: str, tokenizer: Tokenizer, spec: ModelSpec, response_tokens: int) -> Optional[str]:
    ids = tokenizer.encode_prompt(prompt)
    room = spec.max_position_embeddings - response_tokens
    if len(ids) > room:
        context = f"{spec.max_position_embeddings} tokens of context less {response_tokens} for the response"
        return f"{where}: the prompt has {len(ids)} tokens; there is room for {room} ({context})"
    if tokenizer.unknown_id is not None and tokenizer.unknown_id in ids:
        return f"{where}: the tokenizer does not know some of the characters of {prompt[:60]!r}"
    return None
