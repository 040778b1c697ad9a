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
    advantages_by_source,
    batch_rewards,
    masked_places,
    minibatches,
    to_train_sequences,
    turn_advantages,
)
from megarl.algorithms.recipes import needs_one_sequence
from megarl.base.rollout_types import Batch, RemoteSequence, TrainSequence
from megarl.config.algorithms import OUTCOME
from megarl.config.errors import RunError
from megarl.config.schema import RunConfig
from megarl.config.tasks import task_of
from megarl.executors.idle_updates import IdleUpdates
from megarl.observe.agreement import MOST_LOG_RATIO, effective_size
from megarl.teachers.trainer import BatchScores, Sequences, Teachers

if TYPE_CHECKING:  # this module does not need Megatron, which takes seconds to import
    from megarl.trainer.step import MegatronTrainer, StepResult, TokenRow

Scores = Mapping[int, np.ndarray]  # place of a sample in the batch -> log-probs of its tokens


class FrozenScores(NamedTuple):
    """The log-probs of a batch's tokens under frozen models, if the algorithm needs them."""

    reference: Scores | None
    proximal: Scores | None  # under the policy that the batch began with
    teachers: BatchScores | None


@dataclass(frozen=True)
class BatchSteps:
    """Makes the optimizer steps on a batch.

    All ranks compute the same mini-batches, whichever parts of the batch they have.
    """

    trainer: MegatronTrainer
    algorithm: Algorithm
    config: RunConfig
    teachers: Teachers | None = field(default=None, kw_only=True)
    idle: IdleUpdates | None = field(default=None, kw_only=True)

    def rewards(self, batch: Batch) -> Tensor:
        """Rewards [G, n] after penalties.

        Raises RunError if there are branches that the algorithm cannot use.
        """
        setting = needs_one_sequence(self.config.algorithm)
        for group in batch.groups if setting else ():
            if any(sample.branch for sample in group.samples):
                rollout = task_of(self.config, group.source).rollout.name
                raise RunError(
                    f"{setting}: needs episodes of one sequence; "
                    f"rollout.name={rollout} made some with branches"
                )
        return batch_rewards(batch, self.config)

    def assign(self, batch: Batch) -> list[list[int]]:
        """[dp][…] the places of the samples that each data-parallel rank needs: those in its share
        of any mini-batch.
        """
        sequences, parts = self._cut(batch)
        places_of_ranks: list[set[int]] = [set() for _ in range(self.trainer.topology.dp)]
        for minibatch in parts:
            for places, share in zip(
                places_of_ranks,
                self.trainer.shares([sequences[place] for place in minibatch.places]),
                strict=True,
            ):
                places.update(minibatch.places[index] for index in share)
        return list(map(sorted, places_of_ranks))

    def train(self, batch: Batch) -> list[StepResult]:
        """Makes the optimizer steps.

        A mini-batch without trained samples also makes a step, with a zero gradient, so that
        learning rate, moments and weight decay go on as usual.
        """
        sequences, parts = self._cut(batch)
        frozen = self._frozen(sequences, parts)
        rewards = self.rewards(batch)
        if self.algorithm.penalizes_rewards:
            assert frozen.proximal is not None and frozen.reference is not None
            for place in sequences:  # all samples, since the penalty applies to each
                policy = torch.from_numpy(frozen.proximal[place])
                reference = torch.from_numpy(frozen.reference[place])
                rewards.view(-1)[place] -= self.algorithm.penalty(policy, reference)
        advantages = advantages_by_source(batch, rewards, self.algorithm, self.config)
        if self.algorithm.penalizes_rewards:
            weights = advantages.flatten().tolist()
            sequences = {
                place: _weighted(sequence, weights[place]) for place, sequence in sequences.items()
            }
        keep = self._kept(batch)
        ages = self._ages(batch, parts[0].places, sequences)
        results = [self._step(parts[0], sequences, advantages, frozen, keep, ages)]
        for minibatch in parts[1:]:
            results.append(self._step(minibatch, sequences, advantages, frozen, keep))
        if self.idle:
            # those of the first epoch, since every rank has its share of each
            one_pass = parts[: self.config.trainer.minibatches]
            learning_rate = self.trainer.learning_rate
            position = learning_rate.position
            for _ in self.idle.passes(
                batch.step, lambda: self._effective_size(one_pass, sequences)
            ):
                for minibatch in one_pass:
                    results.append(self._step(minibatch, sequences, advantages, frozen, keep))
                # the schedule goes by planned steps
                learning_rate.seek(position, learning_rate.steps)
        return results

    def _effective_size(self, parts: Sequence[MiniBatch], sequences: Sequences) -> float:
        """The effective sample size of pi/mu under the current weights, over the tokens of `parts`,
        as observe/agreement.py defines it. NaN without tokens. Collective.
        """
        log_ratios = []
        for minibatch in parts:
            rows = [sequences[place] for place in minibatch.places]
            if not rows:
                continue
            logprobs = self.trainer.token_logprobs(rows, self.config.rollout.temperature)
            # over all data-parallel ranks, every sequence occurs once
            for index in self.trainer.shares(rows)[self.trainer.coordinate.dp]:
                sequence = rows[index]
                assert isinstance(sequence, TrainSequence)
                log_ratio = logprobs[index].astype(np.float64) - sequence.mu_logprobs
                log_ratios.append(log_ratio[sequence.loss_mask])
        ratios = np.exp(np.concatenate([np.empty(0), *log_ratios]).clip(max=MOST_LOG_RATIO))
        tokens, total, squares = self.trainer.summed(
            [len(ratios), ratios.sum(), np.square(ratios).sum()]
        )
        return effective_size(tokens, total, squares)

    def _kept(self, batch: Batch) -> range:
        """The places of the samples whose per-token numbers are written: those in groups that are
        written as text.
        """
        written_groups = batch.groups[: self.config.observe.rollouts_per_step]
        return range(sum(len(group.samples) for group in written_groups))

    def _frozen(self, sequences: Sequences, cut: list[MiniBatch]) -> FrozenScores:
        if self.algorithm.needs_reference:
            reference = self._scores("reference", sequences, cut)
        else:
            reference = None
        # With one optimizer step, the proximal policy is the current policy, whose log-probs the
        # loss has.
        gae = self.algorithm.gae
        needs_proximal = (
            (self.algorithm.needs_proximal and (len(cut) > 1 or self.idle is not None))
            or self.algorithm.penalizes_rewards
            or (gae is not None and gae.truncation is not None)
        )
        proximal = self._scores("policy", sequences, cut) if needs_proximal else None
        if self.teachers:
            teacher_scores = self.teachers.of_batch(
                sequences, lambda score: self._by_places(score, sequences, cut)
            )
        else:
            teacher_scores = None
        return FrozenScores(reference, proximal, teacher_scores)

    def value_metrics(self) -> dict[str, float]:
        """Metrics of the critic for the last batch; empty without a critic."""
        return {}

    def _step(
        self,
        minibatch: MiniBatch,
        sequences: Sequences,
        advantages: Tensor,
        frozen: FrozenScores,
        keep: range = range(0),
        ages: list[np.ndarray] | None = None,
    ) -> StepResult:
        """Makes one optimizer step. If `ages` are given, measures the agreement with the policy
        that sampled the tokens. The result has the per-token numbers of the samples in `keep`, by
        their places in the batch.
        """
        sequences_of_step = [sequences[place] for place in minibatch.places]
        group_weights = None
        if self.algorithm.group_loss is not None:
            assert frozen.reference is not None
            group_weights = self._weigh(
                self.algorithm.group_loss,
                minibatch,
                sequences_of_step,
                advantages,
                frozen.reference,
            )
            weights = group_weights.weights.flatten()[minibatch.places].tolist()
            weighted = []
            for sequence, weight in zip(sequences_of_step, weights, strict=True):
                weighted.append(_weighted(sequence, weight))
            sequences_of_step = weighted
        result = self.trainer.train_step(
            sequences_of_step,
            self.algorithm.loss,
            minibatch.denominator,
            temperature=self.config.rollout.temperature,
            reference_logprobs=scores_at(minibatch.places, frozen.reference),
            proximal_logprobs=scores_at(minibatch.places, frozen.proximal),
            ages=ages,
            teachers=frozen.teachers.of_step(minibatch.places, sequences_of_step)
            if frozen.teachers
            else (),
            keep=[index for index, place in enumerate(minibatch.places) if place in keep],
        )
        result = replace(
            result,
            token_rows={minibatch.places[index]: row for index, row in result.token_rows.items()},
        )
        result.check_tokens(minibatch.tokens)
        if group_weights is None:
            return result
        # the weighted log-probs have the gradient of the loss, but not its value
        prompts = minibatch.denominator / advantages.shape[1]
        return replace(
            result,
            loss=group_weights.loss / prompts,
            sums={**result.sums, **group_weights.sums, "prompts": prompts},
        )

    def _ages(self, batch: Batch, places: Sequence[int], sequences: Sequences) -> list[np.ndarray]:
        """For each sequence at `places`: [L] how many weight versions the policy's tokens are
        behind the current one.
        """
        ages_of_sequences = []
        for place in places:
            ages = np.zeros(len(sequences[place]), np.int32)
            sequence = sequences[place]
            if isinstance(sequence, TrainSequence):
                runs = np.array(batch.samples[place].policy_versions, np.int64).reshape(-1, 2)
                ages[sequence.loss_mask] = np.repeat(batch.step - runs[:, 0], runs[:, 1])
            ages_of_sequences.append(ages)
        return ages_of_sequences

    def _weigh(
        self,
        loss: GroupLoss,
        minibatch: MiniBatch,
        sequences: list[TrainSequence | RemoteSequence],
        advantages: Tensor,
        reference: Scores,
    ) -> GroupWeights:
        """Weights [G, n] of all samples of the batch.

        For samples of the mini-batch, they use log-probs under the current weights.
        """
        log_ratio = torch.zeros_like(advantages)
        used_advantages = torch.zeros_like(advantages)
        if minibatch.places:
            scored = self.trainer.token_logprobs(sequences, self.config.rollout.temperature)
            for place, logprobs in zip(minibatch.places, scored, strict=True):
                log_ratio.view(-1)[place] = float(
                    (logprobs.astype(np.float64) - reference[place]).sum()
                )
            used_advantages.view(-1)[minibatch.places] = advantages.reshape(-1)[minibatch.places]
        return loss.weigh(used_advantages, log_ratio)

    def _cut(self, batch: Batch) -> tuple[Sequences, list[MiniBatch]]:
        masked = masked_places(batch, self.config)
        rewards = self.rewards(batch)
        if self.config.algorithm.credit == OUTCOME or self.algorithm.gae is not None:
            advantages = advantages_by_source(batch, rewards, self.algorithm, self.config)
        else:
            advantages = turn_advantages(batch.groups, self.algorithm, self.config)
        sequences = to_train_sequences(batch, advantages, self.algorithm.skip_zero, masked)
        return sequences, minibatches(
            batch, sequences.keys(), self.algorithm, self.config.trainer, self.config.seed, masked
        )

    def _scores(
        self, model: Literal["policy", "reference"], sequences: Sequences, cut: list[MiniBatch]
    ) -> Scores:
        """Place -> log-probs, for all sequences."""
        return self._by_places(
            lambda part: self.trainer.token_logprobs(part, self.config.rollout.temperature, model),
            sequences,
            cut,
        )

    def _by_places(
        self,
        score: Callable[[list[TrainSequence | RemoteSequence]], list[np.ndarray]],
        sequences: Sequences,
        cut: list[MiniBatch],
    ) -> Scores:
        """Scores the sequences by mini-batches of the first epoch, since every data-parallel rank
        has its share of each.
        """
        scores: dict[int, np.ndarray] = {}
        for minibatch in cut[: self.config.trainer.minibatches]:
            places = minibatch.places
            if places:
                values = score([sequences[place] for place in places])
                scores |= zip(places, values, strict=True)
        return scores


def scores_at(places: Sequence[int], scores: Scores | None) -> list[np.ndarray] | None:
    if scores is None:
        return None
    return [scores[place] for place in places]


def _weighted(
    sequence: TrainSequence | RemoteSequence, weight: float
) -> TrainSequence | RemoteSequence:
    """The sequence with `weight` as the advantage of all its tokens."""
    if isinstance(sequence, RemoteSequence):
        return sequence
    return msgspec.structs.replace(
        sequence, advantages=np.where(sequence.loss_mask, np.float32(weight), np.float32(0))
    )


def kept_rows(results: Sequence[StepResult]) -> dict[int, TokenRow]:
    """Place in the batch -> numbers, for this rank's own samples.

    If several steps trained on a sample, the first counts.
    """
    rows: dict[int, TokenRow] = {}
    for result in results:
        rows = result.token_rows | rows
    return dict(sorted(rows.items()))


def step_metrics(results: Sequence[StepResult], algorithm: Algorithm) -> dict[str, float]:
    """The metrics of a batch's optimizer steps. docs/algorithms.md says how several steps are
    combined. A metric without a value is absent. That happens without steps (during a critic's
    warm-up), or without a token to train on.
    """
    if not results:
        return {"optimizer_steps": 0, "optimizer_steps/empty": 0, "tokens/padded": 0}
    trained = [result for result in results if result.tokens]
    counted_results = trained or results
    token_metrics = {
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
        **{
            name: fmean(result.routing[name] for result in counted_results)
            for name in results[0].routing
        },
        **(
            token_metrics
            if trained
            else {name: value for name, value in token_metrics.items() if not math.isnan(value)}
        ),
        "tokens/padded": sum(result.padded for result in results),
        **(
            {}
            if math.isnan(results[0].mtp_loss)
            else {"mtp/loss": fmean(result.mtp_loss for result in counted_results)}
        ),
        "flops/policy": sum(result.flops for result in results),
        **(results[0].agreement.metrics() if results[0].agreement else {}),
    }
