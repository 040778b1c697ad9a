"""A reward model in plain PyTorch on one process: the reference for `megarl reward-model`, pair by
pair and step by step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megarl.config.schema import AdamConfig, RunConfig
from megarl.data.batches import batch_of, evaluated_pairs, load_pairs, pair_tokens, training_steps
from megarl.data.rows import Pair
from megarl.data.tokenizer import load_tokenizer
from megarl.plan.resolve import find_spec

AT_ONCE = 512  # pairs that are scored at a time


def train(config: RunConfig, initial: Path) -> Any:
    """Trains the causal model in `initial` on the pairs of `config.reward_model`, in their order.

    The head begins with zeros. Returns a model of transformers.
    """
    settings = config.reward_model
    pairs = load_pairs(config, settings.data, "reward_model.data", find_spec(config))
    model = load(initial).train()
    torch.nn.init.zeros_(model.score.weight)
    adam = _adamw(model, settings.optimizer)
    steps = training_steps(config, len(pairs))
    for step in range(steps):
        loss = -F.logsigmoid(differences(model, config, batch_of(config, pairs, step))).mean()
        adam.zero_grad()
        loss.backward()
        if settings.optimizer.clip_grad:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.clip_grad)
        for group in adam.param_groups:
            group["lr"] = learning_rate(settings.optimizer, step + 1, steps)
        adam.step()
    return model.eval()


def load(folder: Path) -> Any:
    """A reward model; a causal model gets a new head."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of the new head
    return AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32
    ).eval()


def _adamw(model: Any, settings: AdamConfig) -> torch.optim.AdamW:
    """Only matrices decay, as in Megatron."""
    matrices, vectors = (
        [parameter for parameter in model.parameters() if (parameter.ndim > 1) == matrix]
        for matrix in (True, False)
    )
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )


def learning_rate(settings: AdamConfig, step: int, steps: int) -> float:
    """The learning rate of step 1, 2, … of a run's steps."""
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    progress = (step - settings.warmup_steps) / (steps - settings.warmup_steps)
    factor = (
        1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    )
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * factor)


@torch.no_grad()
def accuracy(model: Any, config: RunConfig) -> float:
    """The share of held-out pairs in the right order."""
    pairs = load_pairs(
        config, evaluated_pairs(config.reward_model), "reward_model.eval", find_spec(config)
    )
    subset = [pairs[number] for number in range(len(pairs))]
    right = sum(
        int((differences(model, config, subset[start : start + AT_ONCE]) > 0).sum())
        for start in range(0, len(subset), AT_ONCE)
    )
    return right / len(subset)


def differences(model: Any, config: RunConfig, pairs: Sequence[Pair]) -> torch.Tensor:
    """[B]: the chosen response's score minus the other's, minus the margin."""
    tokenizer = load_tokenizer(config.model)
    context = model.config.max_position_embeddings
    token_pairs = [pair_tokens(pair, tokenizer, context) for pair in pairs]
    pair_scores = scores(
        model,
        [preferred for preferred, _ in token_pairs] + [rejected for _, rejected in token_pairs],
    )
    return (
        pair_scores[: len(pairs)]
        - pair_scores[len(pairs) :]
        - torch.tensor([pair.margin for pair in pairs])
    )


def scores(model: Any, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """[B]: the head's value at each sequence's last token."""
    lengths = torch.tensor(list(map(len, sequences)))
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(sequence) for sequence in sequences], batch_first=True
    )
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    return model.score(hidden[torch.arange(len(sequences)), lengths - 1])[:, 0]
