"""Batches of demonstrations for supervised learning."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megarl.config.errors import ConfigError
from megarl.config.schema import RunConfig
from megarl.data.datasets import load_rows
from megarl.data.prompts import row_index
from megarl.data.rows import Row
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.models.spec import ModelSpec
from megarl.types import TrainSequence


def sft_batches(config: RunConfig, spec: ModelSpec) -> Iterator[list[TrainSequence]]:
    """`sft.steps` batches of `sft.batch_size` sequences; batch t depends on t and `seed` alone.

    Raises ConfigError for mistakes in the data, or if a sequence is longer than the model's context.
    """
    tokenizer = load_tokenizer(config.model)
    dataset, key = (config.sft.data, "sft.data") if config.sft.data else (config.data.train, "data.train")
    rows = load_rows(dataset, key, config.seed, "none", tokenizer.source)
    size = config.sft.batch_size
    for step in range(config.sft.steps):
        ordinals = range(step * size, (step + 1) * size)
        indices = (row_index(ordinal, len(rows), f"sft/{config.seed}", config.data.shuffle) for ordinal in ordinals)
        yield [sft_sequence(rows[index], tokenizer, spec.max_position_embeddings) for index in indices]


def sft_sequence(row: Row, tokenizer: Tokenizer, context_tokens: int) -> TrainSequence:
    """Prompt and demonstration; only the policy's parts of the demonstration and end-of-text are learned.

    Each text is tokenised separately, as in a rollout. Raises ConfigError if the sequence is too long.
    """
    texts = [row.demonstration] if isinstance(row.demonstration, str) else row.demonstration
    token_ids = tokenizer.encode_prompt(row.prompt)
    loss_mask = [False] * len(token_ids)
    for number, text in enumerate(texts):
        ids = tokenizer.encode_response(text) if number == len(texts) - 1 else tokenizer.encode_text(text, special_tokens=True)
        token_ids = token_ids + ids
        loss_mask += [number % 2 == 0] * len(ids)
    length = len(token_ids)
    if length > context_tokens:
        raise ConfigError(f"{row.where}: prompt and demonstration have {length} tokens, more than the model's context of {context_tokens}")
    zeros = np.zeros(length, np.float32)
    return TrainSequence(np.array(token_ids, np.int32), np.array(loss_mask), mu_logprobs=zeros, advantages=zeros)
