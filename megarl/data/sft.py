"""Batches of demonstrations for supervised learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from megarl.config.data import MixtureConfig
from megarl.config.errors import ConfigError
from megarl.config.schema import RunConfig
from megarl.data.datasets import load_rows
from megarl.data.mixture import Mixture, mixture_of, train_mixture
from megarl.data.prompts import count_tokens, dropping, load_sources
from megarl.data.rows import Row, RowProblem
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.models.spec import ModelSpec
from megarl.types import TrainSequence


def sft_batches(config: RunConfig, spec: ModelSpec, done: int = 0) -> Iterator[list[TrainSequence]]:
    """The batches of `sft.batch_size` sequences from step `done` to `sft.steps`; batch t depends on t and `seed` alone.

    Raises ConfigError for mistakes in the data, or if a sequence is longer than the model's context.
    """
    tokenizer, size = load_tokenizer(config.model), config.sft.batch_size
    sources = load_sources(config, *sft_data(config), sft_mixture(config), "none", "sft", demonstration_tokens(tokenizer, spec))
    for step in range(done, config.sft.steps):
        ordinals = range(step * size, (step + 1) * size)
        yield [sft_sequence(sources[ordinal], tokenizer, spec.max_position_embeddings) for ordinal in ordinals]


def sft_held_out(config: RunConfig, spec: ModelSpec) -> list[TrainSequence]:
    """All of `sft.eval`; empty without one. Raises ConfigError as `sft_batches` does."""
    if config.sft.eval is None:
        return []
    tokenizer = load_tokenizer(config.model)
    reading = dropping(config, demonstration_tokens(tokenizer, spec))
    rows = load_rows(config.sft.eval, "sft.eval", config.seed, "none", tokenizer.source, reading)
    return [sft_sequence(rows[number], tokenizer, spec.max_position_embeddings) for number in range(len(rows))]


def sft_data(config: RunConfig) -> tuple[MixtureConfig, str]:
    """What is learned, and its section."""
    return (config.sft.data, "sft.data") if config.sft.data else (config.data.train, "data.train")


def sft_mixture(config: RunConfig) -> Mixture:
    """Quotas of sft.data are parts of a batch; those of data.train keep their proportions."""
    return mixture_of(*sft_data(config), config.sft.batch_size, "sft.batch_size") if config.sft.data else train_mixture(config)


def demonstration_tokens(tokenizer: Tokenizer, spec: ModelSpec) -> Callable[[Row], int]:
    """Counts the tokens of a row's prompt. It raises RowProblem for a row that does not fit the model's context with its demonstration, or
    whose prompt has unknown characters."""
    context = spec.max_position_embeddings

    def count(row: Row) -> int:
        tokens = count_tokens(row, tokenizer, context - 1, f"{context} tokens of context less 1 for the response")
        try:
            sft_sequence(row, tokenizer, context)
        except ConfigError as error:
            problem = str(error).removeprefix(f"{row.where}: ")
            raise RowProblem(problem, f"prompt and demonstration of more than {context} tokens, the model's context") from error
        return tokens

    return count


def sft_sequence(row: Row, tokenizer: Tokenizer, context_tokens: int) -> TrainSequence:
    """Prompt and demonstration; only the policy's parts of the demonstration and end-of-text are learned.

    Each text is tokenised separately, as in a rollout. Raises ConfigError if the sequence is too long.
    """
    texts = [row.demonstration] if isinstance(row.demonstration, str) else row.demonstration
    token_ids = tokenizer.encode_prompt(row.prompt)
    loss_mask = [False] * len(token_ids)
    for number, text in enumerate(texts):
        closed = number < len(texts) - 1 or row.ended
        ids = tokenizer.encode_text(text, special_tokens=True) if closed else tokenizer.encode_response(text)
        token_ids = token_ids + ids
        loss_mask += [number % 2 == 0] * len(ids)
    length = len(token_ids)
    if length > context_tokens:
        raise ConfigError(f"{row.where}: prompt and demonstration have {length} tokens, more than the model's context of {context_tokens}")
    zeros = np.zeros(length, np.float32)
    return TrainSequence(np.array(token_ids, np.int32), np.array(loss_mask), mu_logprobs=zeros, advantages=zeros)
