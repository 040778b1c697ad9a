"""Pairs of responses for megarl reward-model: read, ordered, and as tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megarl.config.data import PreferenceConfig
from megarl.config.errors import ConfigError
from megarl.config.schema import RunConfig
from megarl.data.datasets import read_pairs
from megarl.data.prompts import dropping, row_index
from megarl.data.rows import Pair, RowProblem
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.models.spec import ModelSpec


def pair_sets(config: RunConfig) -> list[tuple[str, PreferenceConfig]]:
    """(config key, dataset) of the pairs that are learned, and of the held-out ones."""
    settings = config.reward_model
    given = {"reward_model.data": settings.data, "reward_model.eval": settings.eval}
    return [(key, dataset) for key, dataset in given.items() if dataset is not None]


def load_pairs(config: RunConfig, dataset: PreferenceConfig | None, key: str, spec: ModelSpec) -> Sequence[Pair]:
    """All pairs; none without a dataset. Raises ConfigError for mistakes in the data."""
    if dataset is None:
        return []
    reading = dropping(config, responses_tokens(load_tokenizer(config.model), spec))
    return read_pairs(dataset, key, config.seed, config.model.tokenizer or config.model.path, reading)[0]


def responses_tokens(tokenizer: Tokenizer, spec: ModelSpec) -> Callable[[Pair], int]:
    """Counts the tokens of a pair's prompt. It raises RowProblem for a pair that does not fit the model's context."""
    context = spec.max_position_embeddings

    def count(pair: Pair) -> int:
        try:
            pair_tokens(pair, tokenizer, context)
        except ConfigError as error:
            problem = str(error).removeprefix(f"{pair.where}: ")
            raise RowProblem(problem, f"prompt and response of more than {context} tokens, the model's context") from error
        return len(tokenizer.encode_prompt(pair.prompt))

    return count


def training_steps(config: RunConfig, pairs: int) -> int:
    settings = config.reward_model
    return settings.steps or math.ceil(settings.epochs * pairs / settings.batch_size)


def batch_of(config: RunConfig, pairs: Sequence[Pair], step: int) -> list[Pair]:
    """The pairs of a step, which depend on its number and `seed` alone. Every epoch has each pair once."""
    size = config.reward_model.batch_size
    ordinals = range(step * size, (step + 1) * size)
    return [pairs[row_index(ordinal, len(pairs), f"reward_model/{config.seed}", config.data.shuffle)] for ordinal in ordinals]


def pair_tokens(pair: Pair, tokenizer: Tokenizer, context_tokens: int) -> tuple[list[int], list[int]]:
    """Token ids of the prompt with each response and end-of-text, as a rollout has them: chosen, rejected.

    Raises ConfigError if one is longer than the model's context.
    """
    prompt = tokenizer.encode_prompt(pair.prompt)
    both = prompt + tokenizer.encode_response(pair.chosen), prompt + tokenizer.encode_response(pair.rejected)
    if (length := max(map(len, both))) > context_tokens:
        raise ConfigError(f"{pair.where}: prompt and response have {length} tokens, more than the model's context of {context_tokens}")
    return both
