"""`megarl reward-model`: trains a reward model on pairs of responses, with the trainer of the RL
run.

It learns from pairs of responses, one preferred (Bradley and Terry 1952; Ouyang et al. 2022,
arXiv:2203.02155, (1)):

    loss = mean over pairs of -log sigmoid(d),  d = score(chosen) - score(rejected) - margin

The responses of a pair may be in different microbatches and on different ranks. So all scores are
computed before the optimizer step. The step then uses a sum of scores with constant weights, which
are the derivatives of the loss. Its gradient is that of the loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.base import LossInputs, LossOutput
from megarl.base.rollout_types import TrainSequence
from megarl.data.batches import batch_of, evaluated_pairs, load_pairs, pair_tokens, training_steps
from megarl.data.rows import Pair
from megarl.data.tokenizer import load_tokenizer
from megarl.observe.metrics import MetricsWriter
from megarl.observe.status import StatusBoard
from megarl.plan.resolve import RunPlan
from megarl.trainer.distributed import init_distributed, shutdown_distributed
from megarl.trainer.step import MegatronTrainer


class PairLoss(NamedTuple):
    # [B, 2]: the derivatives of the summed loss by the scores of chosen and rejected
    weights: Tensor
    metrics: dict[str, float]  # means over the pairs


def bradley_terry(scores: Tensor, margins: Tensor) -> PairLoss:
    """Args: scores [B, 2] of chosen and rejected, margins [B]."""
    chosen, rejected = scores.unbind(dim=1)
    difference = chosen - rejected
    slope = -torch.sigmoid(margins - difference)
    metrics = {
        "loss": -F.logsigmoid(difference - margins).mean(),
        "accuracy": (difference > 0).double().mean(),
        "score_difference/mean": difference.mean(),
        "score/chosen": chosen.mean(),
        "score/rejected": rejected.mean(),
    }
    weights = torch.stack([slope, -slope], dim=1)
    return PairLoss(weights, {name: value.item() for name, value in metrics.items()})


def to_score(token_ids: list[int], weight: float = math.nan) -> TrainSequence:
    """A sequence for scoring.

    It has one additional token, the only one in the loss: the value at its position is the
    sequence's score. `weight`: of the score in `weighted_values`.
    """
    length = len(token_ids) + 1
    mask = np.arange(length) == length - 1
    return TrainSequence(
        np.array([*token_ids, 0], np.int32),
        mask,
        np.zeros(length, np.float32),
        np.where(mask, weight, 0.0).astype(np.float32),
    )


def weighted_values(values: Tensor, microbatch: LossInputs) -> LossOutput:
    """The sum of the values [t], weighted by the tokens' advantages."""
    mask = microbatch.loss_mask
    return LossOutput(
        (torch.where(mask, microbatch.advantages, 0.0) * values).sum(), {"tokens": mask.sum()}
    )


FOLDER = "reward_model"  # in run_dir
BEFORE = "before/"  # metrics of the held-out pairs before the first step


def run_reward_model_rank(plan: RunPlan, rank: int) -> None:
    """One trainer rank.

    Rank 0 writes `run_dir`/reward_model/metrics.jsonl; all ranks together export to
    `reward_model.output`.
    """
    config = plan.config
    settings = plan.config.reward_model
    run_dir = Path(plan.config.run_dir) / FOLDER
    status = StatusBoard(run_dir, f"reward_model.{rank}").for_work()
    status.set("reading the pairs")
    pairs = load_pairs(config, settings.data, f"{FOLDER}.data", plan.spec)
    held_out = load_pairs(config, evaluated_pairs(settings), f"{FOLDER}.eval", plan.spec)
    steps = training_steps(config, len(pairs))
    status.set("building the model")
    init_distributed(config.timeouts.collective_s)
    trainer = MegatronTrainer(
        plan.spec.with_scalar_head(),
        plan.trainer_topology,
        config.trainer,
        config.model.dtype,
        config.seed,
        total_steps=steps,
        timeout_s=config.timeouts.collective_s,
        optimizer=settings.optimizer,
    )
    begin(trainer, plan)
    scorer = PairScorer(trainer, plan)
    metrics = MetricsWriter(run_dir) if rank == 0 else None
    start_s = time.monotonic()
    for step in range(steps):
        status.set(f"step {step}")
        values: dict[str, float] = {}
        if step == 0:
            for name, value in scorer.evaluate(held_out).items():
                values[f"{BEFORE}{name}"] = value
        values = scorer.train(batch_of(config, pairs, step)) | values
        if step == steps - 1 or (settings.every and (step + 1) % settings.every == 0):
            for name, value in scorer.evaluate(held_out).items():
                values[f"eval/{name}"] = value
        if metrics is not None:
            wall_s = time.monotonic() - start_s
            values = {"wall_s": wall_s, **values}
            values["samples_per_s"] = 2 * (step + 1) * settings.batch_size / wall_s
            metrics.write(step, values)
    status.set("exporting")
    trainer.export_hf(settings.output, config.model.path)
    if metrics is not None:
        metrics.close()
    shutdown_distributed()


def begin(trainer: MegatronTrainer, plan: RunPlan) -> None:
    """Loads the weights that a run would begin with, and adds a new head unless they are a reward
    model's.
    """
    config = plan.config
    if not plan.weights.are_there:  # the plan has checked that they may be random
        trainer.init_random(config.seed)
    elif plan.spec.head == trainer.spec.head:
        trainer.load_hf(plan.weights_path, None)
    else:
        new_head = "zeros" if config.reward_model.head == "zeros" else "random"
        trainer.load_hf(plan.weights_path, new_head)


class PairScorer:
    def __init__(self, trainer: MegatronTrainer, plan: RunPlan):
        self._trainer = trainer
        self._size = plan.config.reward_model.batch_size
        self._tokenizer = load_tokenizer(plan.config.model)
        self._context_tokens = plan.spec.max_position_embeddings

    def train(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Makes one optimizer step. Returns metrics of the weights before it."""
        tokens, scores, margins = self._score(pairs)
        loss = bradley_terry(scores, margins)
        weights = loss.weights.flatten().tolist()
        sequences = [to_score(ids, weight) for ids, weight in zip(tokens, weights, strict=True)]
        result = self._trainer.train_step(sequences, weighted_values, float(len(pairs)))
        result.check_tokens(len(tokens))
        return {
            **loss.metrics,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
        }

    def evaluate(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Empty without pairs."""
        sums: dict[str, float] = {}
        for first in range(0, len(pairs), self._size):
            numbers = range(first, min(first + self._size, len(pairs)))
            batch = [pairs[number] for number in numbers]  # a synthetic dataset has no slices
            _, scores, margins = self._score(batch)
            for name, mean in bradley_terry(scores, margins).metrics.items():
                sums[name] = sums.get(name, 0.0) + mean * len(batch)
        return {name: total / len(pairs) for name, total in sums.items()}

    def _score(self, pairs: Sequence[Pair]) -> tuple[list[list[int]], Tensor, Tensor]:
        """(token ids, alternately of chosen and rejected; scores [B, 2]; margins [B])."""
        tokens: list[list[int]] = []
        for pair in pairs:
            tokens += pair_tokens(pair, self._tokenizer, self._context_tokens)
        values = self._trainer.token_values(list(map(to_score, tokens)))
        scores = [float(row[-1]) for row in values]
        margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64)
        return tokens, torch.tensor(scores, dtype=torch.float64).view(-1, 2), margins
