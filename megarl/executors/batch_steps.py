"""The optimizer steps on a batch of rollouts: `trainer.minibatches` times `trainer.epochs`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.advantages import GroupLoss, GroupWeights
from megarl.algorithms.base import Algorithm
from megarl.algorithms.batches import (
    MiniBatch,
    batch_rewards,
    masked_places,
    minibatches,
    to_train_sequences,
)
from megarl.algorithms.recipes import needs_one_sequence
from megarl.base.rollout_types import Batch, Elsewhere, TrainSequence
from megarl.config.errors import RunError
from megarl.config.schema import RunConfig
from megarl.teachers.trainer import OfBatch, Sequences, Teachers

if TYPE_CHECKING:  # this module does not need Megatron, which takes seconds to import
    from megarl.trainer.step import MegatronTrainer, StepResult, TokenRow

Scores = Mapping[int, np.ndarray]  # place of a sample in the batch -> log-probs of its tokens


class Frozen(NamedTuple):
    """The log-probs of a batch's tokens under frozen models, if the algorithm needs them."""

    reference: Scores | None
    proximal: Scores | None  # under the policy that the batch began with
    taught: OfBatch | None


@dataclass(frozen=True)
class BatchSteps:
    """Makes the optimizer steps on a batch.

    All ranks compute the same mini-batches, whichever parts of the batch they have.
    """

    trainer: MegatronTrainer
    algorithm: Algorithm
    config: RunConfig
    teachers: Teachers | None = field(default=None, kw_only=True)

    def rewards(self, batch: Batch) -> Tensor:
        """Rewards [G, n] after penalties.

        Raises RunError if there are branches that the algorithm cannot use.
        """
        if (setting := needs_one_sequence(self.config.algorithm)) and any(
            sample.branch for sample in batch.samples
        ):
            raise RunError(
                f"{setting}: needs episodes of one sequence; "
                f"rollout.name={self.config.rollout.name} made some with branches"
            )
        return batch_rewards(batch, self.config)

    def assign(self, batch: Batch) -> list[list[int]]:
        """[dp][…] the places of the samples that each data-parallel rank needs: those in its share
        of any mini-batch.
        """
        sequences, cut = self._cut(batch)
        needed: list[set[int]] = [set() for _ in range(self.trainer.topology.dp)]
        for each in cut:
            for places, share in zip(
                needed,
                self.trainer.shares([sequences[place] for place in each.places]),
                strict=True,
            ):
                places.update(each.places[index] for index in share)
        return [sorted(places) for places in needed]

    def train(self, batch: Batch) -> list[StepResult]:
        """Makes the optimizer steps.

        A mini-batch without trained samples also makes a step, with a zero gradient, so that
        learning rate, moments and weight decay go on as usual.
        """
        sequences, cut = self._cut(batch)
        frozen = self._frozen(sequences, cut)
        rewards = self.rewards(batch)
        if self.algorithm.penalizes_rewards:
            assert frozen.proximal is not None and frozen.reference is not None
            for place in sequences:  # all samples, since the penalty applies to each
                both = (
                    torch.from_numpy(frozen.proximal[place]),
                    torch.from_numpy(frozen.reference[place]),
                )
                rewards.view(-1)[place] -= self.algorithm.penalty(*both)
        advantages = self.algorithm.advantages(rewards)
        if self.algorithm.penalizes_rewards:
            of_each = advantages.flatten().tolist()
            sequences = {
                place: _weighted(sequence, of_each[place]) for place, sequence in sequences.items()
            }
        keep = self._kept(batch)
        ages = self._ages(batch, cut[0].places, sequences)
        first = self._step(cut[0], sequences, advantages, frozen, keep, ages)
        return [first, *(self._step(each, sequences, advantages, frozen, keep) for each in cut[1:])]

    def _kept(self, batch: Batch) -> range:
        """The places of the samples whose per-token numbers are written: those in groups that are
        written as text.
        """
        return range(
            sum(
                len(group.samples)
                for group in batch.groups[: self.config.observe.rollouts_per_step]
            )
        )

    def _frozen(self, sequences: Sequences, cut: list[MiniBatch]) -> Frozen:
        reference = (
            self._scores("reference", sequences, cut) if self.algorithm.needs_reference else None
        )
        # With one optimizer step, the proximal policy is the current policy, whose log-probs the
        # loss has.
        needed = (
            self.algorithm.needs_proximal and len(cut) > 1
        ) or self.algorithm.penalizes_rewards
        proximal = self._scores("policy", sequences, cut) if needed else None
        taught = (
            self.teachers.of_batch(sequences, lambda score: self._by_places(score, sequences, cut))
            if self.teachers
            else None
        )
        return Frozen(reference, proximal, taught)

    def value_metrics(self) -> dict[str, float]:
        """Metrics of the critic for the last batch; empty without a critic."""
        return {}

    def _step(
        self,
        minibatch: MiniBatch,
        sequences: Sequences,
        advantages: Tensor,
        frozen: Frozen,
        keep: range = range(0),
        ages: list[np.ndarray] | None = None,
    ) -> StepResult:
        """Makes one optimizer step. If `ages` are given, measures the agreement with the policy
        that sampled the tokens. The result has the per-token numbers of the samples in `keep`, by
        their places in the batch.
        """
        chosen = [sequences[place] for place in minibatch.places]
        weighed = None
        if self.algorithm.group_loss is not None:
            assert frozen.reference is not None
            weighed = self._weigh(
                self.algorithm.group_loss, minibatch, chosen, advantages, frozen.reference
            )
            weights = weighed.weights.flatten()[minibatch.places].tolist()
            chosen = [
                _weighted(sequence, weight)
                for sequence, weight in zip(chosen, weights, strict=True)
            ]
        result = self.trainer.train_step(
            chosen,
            self.algorithm.loss,
            minibatch.denominator,
            temperature=self.config.rollout.temperature,
            reference_logprobs=at(minibatch.places, frozen.reference),
            proximal_logprobs=at(minibatch.places, frozen.proximal),
            ages=ages,
            teachers=frozen.taught.of_step(minibatch.places, chosen) if frozen.taught else (),
            keep=[index for index, place in enumerate(minibatch.places) if place in keep],
        )
        result = replace(
            result, kept={minibatch.places[index]: row for index, row in result.kept.items()}
        )
        result.check_tokens(minibatch.tokens)
        if weighed is None:
            return result
        # the weighted log-probs have the gradient of the loss, but not its value
        prompts = minibatch.denominator / advantages.shape[1]
        return replace(
            result,
            loss=weighed.loss / prompts,
            sums={**result.sums, **weighed.sums, "prompts": prompts},
        )

    def _ages(self, batch: Batch, places: Sequence[int], sequences: Sequences) -> list[np.ndarray]:
        """For each sequence at `places`: [L] how many weight versions the policy's tokens are
        behind the current one.
        """
        found = []
        for place in places:
            ages = np.zeros(len(sequences[place]), np.int32)
            sequence = sequences[place]
            if isinstance(sequence, TrainSequence):
                runs = np.array(batch.samples[place].policy_versions, np.int64).reshape(-1, 2)
                ages[sequence.loss_mask] = np.repeat(batch.step - runs[:, 0], runs[:, 1])
            found.append(ages)
        return found

    def _weigh(
        self,
        loss: GroupLoss,
        minibatch: MiniBatch,
        chosen: list[TrainSequence | Elsewhere],
        advantages: Tensor,
        reference: Scores,
    ) -> GroupWeights:
        """Weights [G, n] of all samples of the batch.

        For samples of the mini-batch, they use log-probs under the current weights.
        """
        log_ratio = torch.zeros_like(advantages)
        used = torch.zeros_like(advantages)
        if minibatch.places:
            scored = self.trainer.token_logprobs(chosen, self.config.rollout.temperature)
            for place, logprobs in zip(minibatch.places, scored, strict=True):
                log_ratio.view(-1)[place] = float(
                    (logprobs.astype(np.float64) - reference[place]).sum()
                )
            used.view(-1)[minibatch.places] = advantages.reshape(-1)[minibatch.places]
        return loss.weigh(used, log_ratio)

    def _cut(self, batch: Batch) -> tuple[Sequences, list[MiniBatch]]:
        masked = masked_places(batch, self.config.algorithm.mask_truncated)
        sequences = to_train_sequences(
            batch, self.algorithm.advantages(self.rewards(batch)), self.algorithm.skip_zero, masked
        )
        return sequences, minibatches(
            batch, sequences.keys(), self.algorithm, self.config.trainer, self.config.seed, masked
        )

    def _scores(
        self, model: Literal["policy", "reference"], sequences: Sequences, cut: list[MiniBatch]
    ) -> Scores:
        """Place -> log-probs, for all sequences."""
        return self._by_places(
            lambda some: self.trainer.token_logprobs(some, self.config.rollout.temperature, model),
            sequences,
            cut,
        )

    def _by_places(
        self,
        score: Callable[[list[TrainSequence | Elsewhere]], list[np.ndarray]],
        sequences: Sequences,
        cut: list[MiniBatch],
    ) -> Scores:
        """Scores the sequences by mini-batches of the first epoch, since every data-parallel rank
        has its share of each.
        """
        found: dict[int, np.ndarray] = {}
        for places in (
            each.places for each in cut[: self.config.trainer.minibatches] if each.places
        ):
            found |= zip(places, score([sequences[place] for place in places]), strict=True)
        return found


def at(places: Sequence[int], scores: Scores | None) -> list[np.ndarray] | None:
    return None if scores is None else [scores[place] for place in places]


def _weighted(sequence: TrainSequence | Elsewhere, weight: float) -> TrainSequence | Elsewhere:
    """The sequence with `weight` as the advantage of all its tokens."""
    if isinstance(sequence, Elsewhere):
        return sequence
    return msgspec.structs.replace(
        sequence, advantages=np.where(sequence.loss_mask, np.float32(weight), np.float32(0))
    )


def kept_rows(results: Sequence[StepResult]) -> dict[int, TokenRow]:
    """Place in the batch -> numbers, for this rank's own samples.

    If several steps trained on a sample, the first counts.
    """
    found: dict[int, TokenRow] = {}
    for result in results:
        found = result.kept | found
    return dict(sorted(found.items()))


def step_metrics(results: Sequence[StepResult], algorithm: Algorithm) -> dict[str, float]:
    """The metrics of a batch's optimizer steps. docs/algorithms.md says how several steps are
    combined. A metric without a value is absent. That happens without steps (during a critic's
    warm-up), or without a token to train on.
    """
    if not results:
        return {"optimizer_steps": 0, "optimizer_steps/empty": 0, "tokens/padded": 0}
    trained = [result for result in results if result.tokens]
    counted = trained or results
    of_tokens = {
        "entropy/mean": trained[0].entropy if trained else math.nan,
        **algorithm.metrics(
            {name: sum(result.sums[name] for result in results) for name in results[0].sums}
        ),
    }
    return {
        "loss": fmean(result.loss for result in results),
        "grad_norm": fmean(result.grad_norm for result in results),
        "grad_norm/max": max(result.grad_norm for result in results),
        "learning_rate": results[-1].learning_rate,
        "optimizer_steps": len(results),
        "optimizer_steps/empty": len(results) - len(trained),
        **{name: fmean(result.routing[name] for result in counted) for name in results[0].routing},
        **(
            of_tokens
            if trained
            else {name: value for name, value in of_tokens.items() if not math.isnan(value)}
        ),
        "tokens/padded": sum(result.padded for result in results),
        **(
            {}
            if math.isnan(results[0].mtp_loss)
            else {"mtp/loss": fmean(result.mtp_loss for result in counted)}
        ),
        "flops/policy": sum(result.flops for result in results),
        **(results[0].agreement.metrics() if results[0].agreement else {}),
    }
