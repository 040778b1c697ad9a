"""The critic: its model, its loss, and the optimizer steps of critic and policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.base import LossInputs, LossOutput
from megarl.algorithms.batches import MiniBatch
from megarl.base.rollout_types import Batch, RemoteSequence, TrainSequence, TurnReward
from megarl.config.algorithms import OUTCOME
from megarl.config.tasks import task_of
from megarl.critic.losses import Moments
from megarl.critic.plan import critic_path
from megarl.executors.batch_steps import BatchSteps, FrozenScores, Scores, scores_at
from megarl.plan.resolve import RunPlan
from megarl.rewards.credit import trained_turns
from megarl.teachers.trainer import Sequences
from megarl.trainer.step import MegatronTrainer

if TYPE_CHECKING:
    from megarl.trainer.step import StepResult

_HIGHEST_LOG_RATIO = 20.0  # so that no ratio is infinite; bounds are far below it


@dataclass(frozen=True)
class ActorCriticSteps(BatchSteps):
    """Makes an optimizer step of the policy and one of the critic for each mini-batch.

    Advantages and returns are computed from the values under the weights that the batch began with.
    A rank knows the values of all sequences, but computes advantages only for sequences whose
    tokens it has.
    """

    critic: MegatronTrainer = field(kw_only=True)
    _value_metrics: dict[str, float] = field(default_factory=dict, kw_only=True)

    def train(self, batch: Batch) -> list[StepResult]:
        """Returns the policy's results.

        Empty during `critic.warmup_steps`, when the policy does not change.
        """
        sequences, cut = self._cut(batch)
        frozen = self._frozen(sequences, cut)
        values = self._by_places(self.critic.token_values, sequences, cut)
        rewards = self.rewards(batch)
        earned = self._earned(batch, rewards.flatten().tolist())
        ratios = self._ratios(sequences, frozen)
        advantages, returns = self._estimates(sequences, values, earned, frozen, ratios)
        advantages, value_metrics = self._whitened(
            cut, sequences, advantages, returns, values, ratios
        )
        weighted = {}
        for place, sequence in sequences.items():
            weighted[place] = _with_advantages(sequence, advantages.get(place))
        results = []
        critic_results = []
        for minibatch in cut:
            if batch.step >= self.config.critic.warmup_steps:
                ages = None if results else self._ages(batch, minibatch.places, sequences)
                results.append(
                    self._step(minibatch, weighted, rewards, frozen, self._kept(batch), ages)
                )
            critic_results.append(self._critic_step(minibatch, sequences, values, returns))
        self._value_metrics.clear()
        self._value_metrics.update(value_metrics | _critic_metrics(critic_results))
        return results

    def value_metrics(self) -> dict[str, float]:
        """Without those of no value, such as means over no token."""
        metrics = self._value_metrics
        return {name: value for name, value in metrics.items() if not math.isnan(value)}

    def _critic_step(
        self, minibatch: MiniBatch, sequences: Sequences, values: Scores, returns: Scores
    ) -> StepResult:
        elsewhere = np.empty(0, np.float32)  # stands for the sequences of other data-parallel ranks
        result = self.critic.train_step(
            [sequences[place] for place in minibatch.places],
            partial(value_loss, clip=self.config.critic.value_clip),
            float(minibatch.tokens or 1),
            old_values=scores_at(minibatch.places, values),
            returns=[returns.get(place, elsewhere) for place in minibatch.places],
        )
        result.check_tokens(minibatch.tokens)
        return result

    def _estimates(
        self,
        sequences: Sequences,
        values: Scores,
        earned: list[list[TurnReward]],
        frozen: FrozenScores,
        ratios: Scores,
    ) -> tuple[Mapping[int, np.ndarray], Scores]:
        """Advantages and returns of the sequences whose tokens this rank has, keyed by their places
        in the batch. Each is as long as its sequence, and 0 on tokens that the policy did not
        write. What a turn has earned is given to its last token. A KL penalty in the reward is
        given to each token.
        """
        gae = self.algorithm.gae
        assert gae is not None
        policy_tokens = {}
        for place, sequence in sequences.items():
            if isinstance(sequence, TrainSequence) and sequence.loss_mask.any():
                policy_tokens[place] = np.flatnonzero(sequence.loss_mask)
        token_rewards = []
        token_values = []
        token_ratios = []
        for place, tokens in policy_tokens.items():
            row = np.zeros(len(tokens))
            prompt = len(sequences[place]) - earned[place][-1].end
            for end, reward in earned[place]:
                row[np.searchsorted(tokens, prompt + end) - 1] += reward
            if self.algorithm.penalizes_rewards:
                assert frozen.reference is not None and frozen.proximal is not None
                policy = torch.from_numpy(frozen.proximal[place][tokens])
                reference = torch.from_numpy(frozen.reference[place][tokens])
                row -= self.algorithm.penalties(policy, reference).numpy()
            token_rewards.append(row)
            token_values.append(values[place][tokens].astype(np.float64))
            if gae.truncation is not None:
                token_ratios.append(ratios[place][tokens])
        estimates = gae.estimates(token_rewards, token_values, token_ratios)
        advantages = {}
        returns = {}
        for (place, tokens), estimate in zip(policy_tokens.items(), estimates, strict=True):
            advantages[place] = np.zeros(len(sequences[place]))
            advantages[place][tokens] = estimate.advantages
            returns[place] = values[place].astype(np.float32)
            returns[place][tokens] = estimate.returns
        return advantages, returns

    def _earned(self, batch: Batch, rewards: list[float]) -> list[list[TurnReward]]:
        """What the turns of each sample have earned. The last turn ends where the sample does."""
        config = self.config
        if config.algorithm.credit == OUTCOME:
            ends = [sample.tokens for sample in batch.samples]
            return [[TurnReward(end, reward)] for end, reward in zip(ends, rewards, strict=True)]
        earned = []
        for group in batch.groups:
            task = task_of(config, group.source)
            for sample, turns in zip(group.samples, trained_turns(group.samples, task)):
                earned.append([*turns[:-1], TurnReward(sample.tokens, turns[-1].reward)])
        return earned

    def _ratios(self, sequences: Sequences, frozen: FrozenScores) -> Scores:
        """pi/mu of each token of this rank's sequences, where pi is the policy that the batch began
        with; empty without V-trace.
        """
        ratios = {}
        if self.algorithm.gae is None or self.algorithm.gae.truncation is None:
            return ratios
        assert frozen.proximal is not None
        for place, sequence in sequences.items():
            if isinstance(sequence, TrainSequence):
                log_ratio = frozen.proximal[place].astype(np.float64) - sequence.mu_logprobs
                ratios[place] = np.exp(np.minimum(log_ratio, _HIGHEST_LOG_RATIO))
        return ratios

    def _whitened(
        self,
        cut: list[MiniBatch],
        sequences: Sequences,
        advantages: Mapping[int, np.ndarray],
        returns: Scores,
        values: Scores,
        ratios: Scores,
    ) -> tuple[Mapping[int, np.ndarray], dict[str, float]]:
        """Advantages with mean 0 and variance 1 over the batch's tokens, if the algorithm wants
        that. Also metrics of the values before the steps.
        """
        token_advantages: list[np.ndarray] = []
        token_returns: list[np.ndarray] = []
        errors: list[np.ndarray] = []
        clipped: list[np.ndarray] = []
        gae = self.algorithm.gae
        assert gae is not None
        # over all data-parallel ranks, every place occurs once
        for minibatch in cut[: self.config.trainer.minibatches]:
            shares = self.trainer.shares([sequences[place] for place in minibatch.places])
            for index in shares[self.trainer.coordinate.dp]:
                place = minibatch.places[index]
                sequence = sequences[place]
                if place in advantages and isinstance(sequence, TrainSequence):
                    mask = sequence.loss_mask
                    token_advantages.append(advantages[place][mask].astype(np.float64))
                    token_returns.append(returns[place][mask].astype(np.float64))
                    error = returns[place] - values[place]
                    errors.append(error[mask].astype(np.float64))
                    if gae.truncation is not None:
                        clipped.append(1.0 * (ratios[place][mask] > gae.truncation.rho_bar))
        sums = self.trainer.summed(
            [
                *Moments.of(token_advantages),
                *Moments.of(token_returns),
                *Moments.of(errors),
                *Moments.of(clipped),
            ]
        )
        advantage_moments = Moments(sums[:3])
        return_moments = Moments(sums[3:6])
        error_moments = Moments(sums[6:9])
        metrics = {
            "returns": return_moments.mean,
            "value/mean": return_moments.mean - error_moments.mean,
        }
        if return_moments.variance > 0:
            unexplained = error_moments.variance / return_moments.variance
            metrics["value/explained_variance"] = 1 - unexplained
        metrics["advantage/mean"] = advantage_moments.mean
        if advantage_moments.count:
            metrics["advantage/std"] = math.sqrt(advantage_moments.variance)
        if gae.truncation is not None:
            metrics["value/rho_clipped_fraction"] = Moments(sums[9:]).mean
        if gae.whiten:
            advantages = {
                place: advantage_moments.whitened(row) for place, row in advantages.items()
            }
        return advantages, metrics


def value_loss(values: Tensor, microbatch: LossInputs, clip: float | None) -> LossOutput:
    """Half the sum over the policy's tokens of max((V - R)^2, (V' - R)^2).

    V' is V, clipped to at most `clip` from the value at the start of the batch (as in the
    implementation of Schulman et al. 2017, arXiv:1707.06347).
    """
    mask = microbatch.loss_mask
    old = microbatch.old_values
    returns = microbatch.returns
    assert old is not None and returns is not None
    error = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if clip is not None:
        bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
        clipped = ((values - old).abs() > clip) & (bounded > error)
        error = torch.maximum(error, bounded)
    sums = {
        "tokens": mask.sum(),
        "values": torch.where(mask, values.detach(), 0.0).sum(),
        "values_clipped": (clipped & mask).sum(),
    }
    return LossOutput(torch.where(mask, error, 0.0).sum() / 2, sums)


def make_critic(plan: RunPlan, policy: MegatronTrainer) -> MegatronTrainer:
    config = plan.config
    assert plan.critic is not None
    critic = MegatronTrainer(
        plan.critic.with_scalar_head(),
        plan.trainer_topology,
        # the recorded routing is that of the policy's routers
        replace(config.trainer, routing_replay=False),
        config.model.dtype,
        config.seed,
        total_steps=config.max_steps * config.trainer.optimizer_steps,
        timeout_s=config.timeouts.collective_s,
        optimizer=config.critic.optimizer,
    )
    # A rank has only the tokens of the policy's share of a batch. So both models must divide the
    # batch in the same way, whatever the cost of attention in each.
    critic.squares = policy.squares
    return critic


def begin_critic(critic: MegatronTrainer, plan: RunPlan) -> None:
    """Loads the initial weights."""
    assert plan.critic is not None
    # A new head is all zeros. So the first values are 0, and nothing random is in the first
    # advantages.
    critic.load_hf(
        critic_path(plan.config)[1] or plan.weights_path,
        None if plan.critic.head == critic.spec.head else "zeros",
    )


def _with_advantages(
    sequence: TrainSequence | RemoteSequence, advantages: np.ndarray | None
) -> TrainSequence | RemoteSequence:
    if advantages is None or isinstance(sequence, RemoteSequence):
        return sequence
    return msgspec.structs.replace(
        sequence, advantages=np.where(sequence.loss_mask, advantages, 0.0).astype(np.float32)
    )


def _critic_metrics(results: list[StepResult]) -> dict[str, float]:
    tokens = sum(result.tokens for result in results) or math.nan
    return {
        "value/loss": fmean(result.loss for result in results),
        "value/clipped_fraction": sum(result.sums["values_clipped"] for result in results) / tokens,
        "value/grad_norm": fmean(result.grad_norm for result in results),
        "value/learning_rate": results[-1].learning_rate,
    }
