"""Batches for supervised learning: demonstrations, and pairs of responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from megarl.base.rollout_types import TrainSequence
from megarl.config.errors import ConfigError
from megarl.config.schema import LearnedConfig, PreferenceConfig, RewardModelConfig, RunConfig
from megarl.data.datasets import load_rows, read_pairs
from megarl.data.order import Mixture, train_mixture
from megarl.data.prompts import Sources, count_tokens, dropping, load_sources, row_index
from megarl.data.rows import Pair, Row, RowProblem
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.models.spec import ModelSpec


def sft_batches(
    config: RunConfig, spec: ModelSpec, first_step: int = 0
) -> Iterator[list[TrainSequence]]:
    """The batches of `sft.batch_size` sequences from step `first_step` to `sft.steps`.

    Batch t depends only on t and `seed`.

    Raises ConfigError for mistakes in the data, or if a sequence is longer than the model's
    context.
    """
    tokenizer = load_tokenizer(config.model)
    size = config.sft.batch_size
    tokens = demonstration_tokens(tokenizer, spec)
    sources = load_sources(
        config,
        *sft_data(config),
        sft_mixture(config),
        answers=lambda source: "none",
        order="sft",
        tokens=lambda source: tokens,
    )
    for step in range(first_step, config.sft.steps):
        ordinals = range(step * size, (step + 1) * size)
        yield _sequences(sources, ordinals, tokenizer, spec)


def sft_held_out(config: RunConfig, spec: ModelSpec) -> list[TrainSequence]:
    """All sequences of `sft.eval`; empty if that is null.

    Raises ConfigError as `sft_batches` does.
    """
    if config.sft.eval is None:
        return []
    tokenizer = load_tokenizer(config.model)
    reading = dropping(config, demonstration_tokens(tokenizer, spec))
    rows = load_rows(config.sft.eval, "sft.eval", config.seed, "none", config.model, reading)
    return _sequences(rows, range(len(rows)), tokenizer, spec)


def _sequences(
    rows: Sequence[Row] | Sources, numbers: Iterable[int], tokenizer: Tokenizer, spec: ModelSpec
) -> list[TrainSequence]:
    return [
        sft_sequence(rows[number], tokenizer, spec.max_position_embeddings) for number in numbers
    ]


def sft_data(config: RunConfig) -> tuple[LearnedConfig, str]:
    """The dataset that megarl sft learns, and its config section."""
    return (config.sft.data, "sft.data") if config.sft.data else (config.data.train, "data.train")


def sft_mixture(config: RunConfig) -> Mixture:
    """The mixture that megarl sft learns: sft.data alone, or the sources of data.train in the same
    proportions.
    """
    return Mixture() if config.sft.data else train_mixture(config)


def demonstration_tokens(tokenizer: Tokenizer, spec: ModelSpec) -> Callable[[Row], int]:
    """Returns a function that counts the tokens of a row's prompt.

    It raises RowProblem if prompt and demonstration do not fit the model's context, or if the
    prompt has unknown characters.
    """
    context = spec.max_position_embeddings

    def count(row: Row) -> int:
        tokens = count_tokens(
            row, tokenizer, context - 1, f"{context} tokens of context less 1 for the response"
        )
        try:
            sft_sequence(row, tokenizer, context)
        except ConfigError as error:
            problem = str(error).removeprefix(f"{row.location}: ")
            raise RowProblem(
                problem,
                f"prompt and demonstration of more than {context} tokens, the model's context",
            ) from error
        return tokens

    return count


def sft_sequence(row: Row, tokenizer: Tokenizer, context_tokens: int) -> TrainSequence:
    """A row's prompt and demonstration as one sequence.

    Only the policy's parts of the demonstration, with end-of-text, are learned.

    Each text is tokenised separately, as in a rollout. Raises ConfigError if the sequence is too
    long.
    """
    texts = [row.demonstration] if isinstance(row.demonstration, str) else row.demonstration
    token_ids = tokenizer.encode_prompt(row.prompt, row.rendered)
    loss_mask = [False] * len(token_ids)
    for number, text in enumerate(texts):
        if number < len(texts) - 1 or row.ended:
            ids = tokenizer.encode_text(text, special_tokens=True)
        else:
            ids = tokenizer.encode_response(text)
        token_ids = token_ids + ids
        loss_mask += [number % 2 == 0] * len(ids)
    length = len(token_ids)
    if length > context_tokens:
        raise ConfigError(
            f"{row.location}: prompt and demonstration have {length} tokens, more than the model's "
            f"context of {context_tokens}"
        )
    zeros = np.zeros(length, np.float32)
    return TrainSequence(
        np.array(token_ids, np.int32), np.array(loss_mask), mu_logprobs=zeros, advantages=zeros
    )


def evaluated_pairs(settings: RewardModelConfig) -> PreferenceConfig | None:
    """reward_model.eval as a full dataset, with the columns of reward_model.data."""
    data = settings.data
    eval_settings = settings.eval
    if not data or not eval_settings:
        return None
    return replace(
        data,
        source=eval_settings.source,
        split=eval_settings.split,
        subset=eval_settings.subset,
        size=eval_settings.size,
    )


def pair_sets(config: RunConfig) -> list[tuple[str, PreferenceConfig]]:
    """(config key, dataset) of the training pairs and of the held-out pairs."""
    settings = config.reward_model
    datasets = {"reward_model.data": settings.data, "reward_model.eval": evaluated_pairs(settings)}
    return [(key, dataset) for key, dataset in datasets.items() if dataset is not None]


def load_pairs(
    config: RunConfig, dataset: PreferenceConfig | None, key: str, spec: ModelSpec
) -> Sequence[Pair]:
    """All pairs of `dataset`; empty if it is None. Raises ConfigError for mistakes in the data."""
    if dataset is None:
        return []
    reading = dropping(config, responses_tokens(load_tokenizer(config.model), spec))
    return read_pairs(dataset, key, config.seed, config.model, reading)[0]


def responses_tokens(tokenizer: Tokenizer, spec: ModelSpec) -> Callable[[Pair], int]:
    """Returns a function that counts the tokens of a pair's prompt.

    It raises RowProblem if the pair does not fit the model's context.
    """
    context = spec.max_position_embeddings

    def count(pair: Pair) -> int:
        try:
            pair_tokens(pair, tokenizer, context)
        except ConfigError as error:
            problem = str(error).removeprefix(f"{pair.location}: ")
            raise RowProblem(
                problem, f"prompt and response of more than {context} tokens, the model's context"
            ) from error
        return len(tokenizer.encode_prompt(pair.prompt, pair.rendered))

    return count


def training_steps(config: RunConfig, pairs: int) -> int:
    settings = config.reward_model
    return settings.steps or math.ceil(settings.epochs * pairs / settings.batch_size)


def batch_of(config: RunConfig, pairs: Sequence[Pair], step: int) -> list[Pair]:
    """The pairs of a step. They depend only on its number and `seed`.

    Every epoch has each pair once.
    """
    size = config.reward_model.batch_size
    order = f"reward_model/{config.seed}"
    batch = []
    for ordinal in range(step * size, (step + 1) * size):
        batch.append(pairs[row_index(ordinal, len(pairs), order, config.data.shuffle)])
    return batch


def pair_tokens(
    pair: Pair, tokenizer: Tokenizer, context_tokens: int
) -> tuple[list[int], list[int]]:
    """Token ids of the prompt with the chosen response, and with the rejected one, each followed by
    end-of-text as in a rollout.

    Raises ConfigError if either is longer than the model's context.
    """
    prompt = tokenizer.encode_prompt(pair.prompt, pair.rendered)
    sequences = (
        prompt + tokenizer.encode_response(pair.chosen),
        prompt + tokenizer.encode_response(pair.rejected),
    )
    length = max(map(len, sequences))
    if length > context_tokens:
        raise ConfigError(
            f"{pair.location}: prompt and response have {length} tokens, more than the model's "
            f"context of {context_tokens}"
        )
    return sequences
