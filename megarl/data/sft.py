"""Batches of demonstrations for supervised learning."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.errors import ConfigError
from megarl.config.schema import RunConfig
from megarl.data.datasets import load_rows
from megarl.data.prompts import row_index
from megarl.data.rows import Row
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.models.spec import ModelSpec
from megarl.types import TrainSequence


def sft_batches(config: RunConfig, spec: ModelSpec, start_step: int = 0) -> Iterator[list[TrainSequence]]:
    """The batches of steps `start_step` to `sft.steps`, each of `sft.batch_size` sequences; batch t depends on t and `seed` alone.

    Raises: ConfigError for mistakes in the data, or when a sequence is longer than the model's context.
    """
    tokenizer = load_tokenizer(config.model)
    rows = load_rows(config.sft.data, "sft.data", config.seed) if config.sft.data else load_rows(config.data.train, "data.train",
        config.seed)
    size = config.sft.batch_size
    for step in range(start_step, config.sft.steps):
        ordinals = range(step * size, (step + 1) * size)
        indices = (row_index(ordinal, len(rows), f"sft/{config.seed}", config.data.shuffle) for ordinal in ordinals)
        yield [sft_sequence(rows[index], tokenizer, spec.max_position_embeddings) for index in indices]


def sft_sequence(row: Row, tokenizer: Tokenizer, context_tokens: int) -> TrainSequence:
    """Prompt and demonstration; only the demonstration and its end-of-text are learned. Raises: ConfigError if too long."""
    prompt, response = tokenizer.encode_prompt(row.prompt), tokenizer.encode_response(row.demonstration)
    length = len(prompt) + len(response)
    if length > context_tokens:
        raise ConfigError(f"{row.where}: prompt and demonstration have {length} tokens, more than the model's context of {context_tokens}")
    zeros = [0.0] * length
    return TrainSequence(
        token_ids=prompt + response, loss_mask=[False] * len(prompt) + [True] * len(response), mu_logprobs=zeros, advantages=zeros
    )
