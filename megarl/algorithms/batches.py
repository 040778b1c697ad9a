"""Turns the scored groups of a step into training sequences, mini-batches and metrics."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from statistics import fmean

import msgspec
import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES, Baseline, advantages_of_sets
from megarl.algorithms.base import Algorithm
from megarl.algorithms.recipes import recipe_of
from megarl.base.kept_sets import kept_metrics
from megarl.base.rollout_types import (
    Batch,
    GroupSummary,
    RemoteSequence,
    SampleNumbers,
    SampleSummary,
    TrainSequence,
    Version,
    any_unanswered,
    episodes,
)
from megarl.config.algorithms import PROCESS
from megarl.config.schema import MASK, AsyncConfig, RunConfig, TrainerConfig
from megarl.config.tasks import tasks_of
from megarl.data.order import Mixture
from megarl.rewards.credit import compared_turns, returns
from megarl.rewards.score import (
    CORRECT,
    FAILED_FRACTION,
    episode_metrics,
    failure_metrics,
    teacher_failures,
    trained_reward,
)


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step trains on."""

    places: list[int]  # places in the batch of the samples that are trained on; may be empty
    tokens: int  # the policy's tokens in these samples
    # divisor of the summed loss; it also counts samples that training leaves out
    denominator: float


def minibatches(
    batch: Batch,
    trained: Collection[int],
    algorithm: Algorithm,
    trainer: TrainerConfig,
    seed: int,
    masked: Collection[int] = (),
) -> list[MiniBatch]:
    """The mini-batches of all epochs, in the order of their optimizer steps.

    A prompt's samples stay together.

    Args: trained, the places of samples that are trained on; masked, the places of samples that not
    even a denominator counts.
    """
    samples = batch.samples
    episode_of = list(accumulate(not sample.branch for sample in samples))
    result = []
    starts = [0, *accumulate(len(group.samples) for group in batch.groups)]
    for groups in cut_into_minibatches(
        len(batch.groups), trainer.minibatches, trainer.epochs, seed, batch.step
    ):
        places = []
        for group in groups:
            for place in range(starts[group], starts[group + 1]):
                if place not in masked:
                    places.append(place)
        trained_places = [place for place in places if place in trained]
        tokens = sum(samples[place].policy_tokens for place in places)
        episode_count = len({episode_of[place] for place in places})
        result.append(
            MiniBatch(
                places=trained_places,
                tokens=sum(samples[place].policy_tokens for place in trained_places),
                denominator=algorithm.denominator(tokens, episode_count) or 1.0,
            )
        )
    return result


def cut_into_minibatches(
    groups: int, count: int, epochs: int, seed: int, step: int
) -> list[list[int]]:
    """[epochs * count][groups / count] the groups of each mini-batch.

    An epoch has every group once.

    The order in an epoch depends only on its number, `seed` and `step`, so it is the same on all
    ranks and after a resume.
    """
    assert groups % count == 0, f"{groups} groups, {count} mini-batches"
    result = []
    for epoch in range(epochs):
        order = random.Random(f"{seed}/{step}/{epoch}").sample(range(groups), groups)
        result += [sorted(order[first::count]) for first in range(count)]
    return result


def groups_by_baseline(
    groups: Sequence[GroupSummary], algorithm: Algorithm, config: RunConfig
) -> list[tuple[Baseline, list[int]]]:
    """Each rule for advantages with the indices of the groups that have it: those of the sources
    that set algorithm.advantage, and the run's own for all others.
    """
    rule_of_run = recipe_of(config.algorithm).advantage
    rules = {name: recipe_of(task.algorithm).advantage for name, task in tasks_of(config).items()}
    indices_by_rule: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        indices_by_rule.setdefault(rules.get(group.source, rule_of_run), []).append(index)
    result = []
    for rule, indices in indices_by_rule.items():
        baseline = algorithm.baseline if rule == rule_of_run else ADVANTAGES[rule]
        result.append((baseline, indices))
    return result


def advantages_by_source(
    batch: Batch, rewards: Tensor, algorithm: Algorithm, config: RunConfig
) -> Tensor:
    """Advantages [G, n] from `rewards` [G, n], by the rule of each group's source
    (algorithm.advantage).

    A rule that divides by a standard deviation over the batch takes it over the groups that have
    this rule.
    """
    advantages = torch.zeros_like(rewards)
    for baseline, indices in groups_by_baseline(batch.groups, algorithm, config):
        advantages[indices] = baseline(rewards[indices])
    return advantages


def turn_advantages(
    groups: Sequence[GroupSummary], algorithm: Algorithm, config: RunConfig
) -> list[list[float]]:
    """[samples of all groups][turns of the sample] advantages with credit by turn, by the rule of
    each group's source. Those of turns that are learned in another branch are arbitrary.

    With credit=process they are the sums over the turn and all later ones of what the rule makes
    of their rewards (DeepSeekMath, arXiv:2402.03300, section 4.1.3).
    """
    tasks = tasks_of(config)
    starts = [0, *accumulate(len(group.samples) for group in groups)]
    samples = [sample for group in groups for sample in group.samples]
    advantages = [[0.0] * len(sample.turns_or_one) for sample in samples]
    for baseline, indices in groups_by_baseline(groups, algorithm, config):
        sets = []
        for index in indices:
            task = tasks.get(groups[index].source, config)
            for compared_set in compared_turns(groups[index].samples, task):
                sets.append(
                    [turn._replace(sample=starts[index] + turn.sample) for turn in compared_set]
                )
        rows = advantages_of_sets(baseline, [[turn.value for turn in turns] for turns in sets])
        for compared_set, row in zip(sets, rows, strict=True):
            for turn, advantage in zip(compared_set, row, strict=True):
                advantages[turn.sample][turn.number] = advantage
    if config.algorithm.credit == PROCESS:
        advantages = [returns(row, gamma=1.0) for row in advantages]
    return advantages


def to_train_sequences(
    batch: Batch,
    advantages: Tensor | Sequence[Sequence[float]],
    skip_zero: bool,
    masked: Collection[int] = (),
) -> dict[int, TrainSequence | RemoteSequence]:
    """The sequences to train on, keyed by the place of their sample in the batch, in its order.

    A sequence of another data-parallel rank is a RemoteSequence.

    Args: advantages [G, n], one per episode (constant over the tokens of all its samples: LlamaRL,
    section 6), or for each sample those of its turns. `skip_zero` leaves out samples of zero
    advantage, possibly all. That keeps the gradient, since they add nothing to it and denominators still count them
    (executors/batch_steps.py). It does not hold with a KL penalty, for example, which has a
    gradient at zero advantage: `Algorithm.skip_zero` says whether it holds. `masked`: the places of
    samples that are always left out.
    """
    if isinstance(advantages, Tensor):
        advantages = _of_samples(batch, advantages)
    lengths: list[int] = []
    for group in batch.groups:
        lengths += [group.prompt_tokens + sample.tokens for sample in group.samples]
    samples = batch.samples
    result: dict[int, TrainSequence | RemoteSequence] = {}
    for place, row in enumerate(advantages):
        first = samples[place].shared_turns if len(row) > 1 else 0
        if place not in masked and (any(row[first:]) or not skip_zero):
            if place in batch.numbers:
                ends = [turn.end for turn in samples[place].turns_or_one]
                result[place] = _train_sequence(batch.numbers[place], row, ends)
            else:
                result[place] = RemoteSequence(lengths[place])
    return result


def _of_samples(batch: Batch, advantages: Tensor) -> list[list[float]]:
    """For each sample of the batch the advantage of its episode, from those of episodes [G, n]."""
    rows = []
    for group, advantages_of_group in zip(batch.groups, advantages.tolist(), strict=True):
        for branches, advantage in zip(episodes(group.samples), advantages_of_group, strict=True):
            rows += [[advantage]] * len(branches)
    return rows


def _train_sequence(
    sample: SampleNumbers, turn_advantages: Sequence[float], ends: Sequence[int]
) -> TrainSequence:
    """Masks the environment's tokens like the prompt's, since the policy has chosen neither.

    Turn i has the response's tokens from the end of turn i - 1 on; the last has all that are left.
    """
    prompt = len(sample.prompt_ids)
    token_ids = np.concatenate([sample.prompt_ids, sample.token_ids])
    loss_mask = np.arange(len(token_ids)) >= prompt
    mu_logprobs = np.zeros(len(token_ids), np.float32)
    mu_logprobs[prompt:] = sample.logprobs
    if sample.policy_mask is not None:
        loss_mask[prompt:] = sample.policy_mask
        mu_logprobs[~loss_mask] = 0.0
    of_turns = np.array(turn_advantages, np.float32)
    turn_numbers = np.searchsorted(
        ends[: len(of_turns) - 1], np.arange(len(sample.token_ids)), "right"
    )
    advantages = np.zeros(len(token_ids), np.float32)
    advantages[prompt:] = of_turns[turn_numbers]
    advantages[~loss_mask] = 0.0
    return TrainSequence(
        token_ids, loss_mask, mu_logprobs, advantages, sample.routing, sample.kept, sample.teachers
    )


def masked_places(batch: Batch, config: RunConfig) -> set[int]:
    """The places of the samples that algorithm.mask_truncated, of the run or their source, leaves
    out of the loss, and of those that have no token for it (`without_old_tokens`).
    """
    tasks = tasks_of(config)
    places = set()
    first = 0
    for group in batch.groups:
        masks_truncated = tasks.get(group.source, config).algorithm.mask_truncated
        for place, sample in enumerate(group.samples, first):
            is_truncated = masks_truncated and sample.finish_reason == "length"
            if is_truncated or not sample.policy_versions:
                places.add(place)
        first += len(group.samples)
    return places


def without_old_tokens(batch: Batch, config: AsyncConfig) -> Batch:
    """The batch as the loss sees it. With async.too_old=mask, tokens older than
    async.max_staleness are context, like the environment's tokens: they have no loss, and no
    denominator counts them.
    """
    if config.too_old != MASK:
        return batch
    assert config.max_staleness is not None
    oldest = batch.step - config.max_staleness
    numbers = dict(batch.numbers)
    groups = []
    place = 0
    for group in batch.groups:
        samples = []
        for sample in group.samples:
            runs = [run for run in sample.policy_versions if run[0] >= oldest]
            samples.append(msgspec.structs.replace(sample, policy_versions=runs))
            if len(runs) < len(sample.policy_versions) and place in numbers:
                mask = _young(numbers[place], sample.policy_versions, oldest)
                numbers[place] = numbers[place]._replace(policy_mask=mask)
            place += 1
        groups.append(msgspec.structs.replace(group, samples=samples))
    return msgspec.structs.replace(batch, groups=groups, numbers=numbers)


def _young(
    sample: SampleNumbers, runs: Sequence[tuple[Version, int]], oldest: Version
) -> np.ndarray:
    """[T] bool: the policy's tokens of version `oldest` or newer. `runs`: of all its tokens."""
    mask = np.ones(len(sample.token_ids), np.bool_)
    if sample.policy_mask is not None:
        mask = sample.policy_mask.copy()
    versions = np.repeat([version for version, _ in runs], [tokens for _, tokens in runs])
    mask[mask] = versions >= oldest
    return mask


def old_token_metrics(batch: Batch, config: AsyncConfig) -> dict[str, float]:
    """With async.too_old=mask, the share of the policy's tokens that are too old, and the number of
    groups that have such tokens, which `reject` would have generated again.
    """
    if config.too_old != MASK:
        return {}
    young = without_old_tokens(batch, config)
    tokens = sum(sample.policy_tokens for sample in batch.samples)
    young_tokens = sum(sample.policy_tokens for sample in young.samples)
    differing = sum(group != other for group, other in zip(batch.groups, young.groups, strict=True))
    return {
        "staleness/masked_fraction": 1 - young_tokens / tokens,
        "staleness/masked_groups": differing,
    }


def batch_rewards(batch: Batch, config: RunConfig | None = None) -> Tensor:
    """Rewards [G, n] of episodes, float64.

    With `config`, the rewards that training uses instead (rewards/score.py), by the tasks of the
    groups' sources. Raises ValueError if groups have different numbers of episodes.
    """
    tasks = tasks_of(config) if config else {}
    groups = [episodes(group.samples) for group in batch.groups]
    if len(set(map(len, groups))) != 1:
        raise ValueError(f"groups of step {batch.step} have different numbers of samples")

    rewards = []
    for group, group_episodes in zip(batch.groups, groups, strict=True):
        task = tasks.get(group.source, config)
        for branches in group_episodes:
            rewards.append(trained_reward(branches, task) if task else branches[0].reward)
    return torch.tensor(rewards, dtype=torch.float64).view(len(groups), -1)


def batch_metrics(
    batch: Batch, version: Version, shaped_rewards: Tensor | None = None
) -> dict[str, float]:
    """Metrics of a batch that the trainer uses at weight version `version`.

    `shaped_rewards` [G, n]: the rewards after penalties, if there are any.

    They cover all groups that were generated for the step, including dropped ones. Only staleness,
    penalties and zero_advantage_fraction are restricted to trained groups. The staleness of a token
    is `version` minus the version that sampled it; the environment's tokens have none. Each episode
    has one reward; reward/std is over all that were sent, reward/mean also over those that
    async.idle=samples has not sent.
    """
    trained_on = batch_rewards(batch) if shaped_rewards is None else shaped_rewards
    samples = batch.generated
    groups = [*batch.groups, *batch.dropped]
    rewards = torch.tensor(
        [sample.reward for sample in samples if not sample.branch], dtype=torch.float64
    )
    reward_mean = rewards.mean().item()
    if any(group.unsent_rewards for group in groups):
        # of every prompt its mean, however many samples it has
        reward_mean = fmean(fmean(group.rewards) for group in groups)
    lags = []
    token_counts = []
    for sample in batch.samples:
        for sampled_by, count in sample.policy_versions:
            lags.append(version - sampled_by)
            token_counts.append(count)
    tokens = sum(sample.tokens for sample in samples)
    own_tokens = sum(sample.policy_tokens for sample in samples)
    is_equal = (trained_on == trained_on[:, :1]).all(dim=1)
    metrics = {
        "reward/mean": reward_mean,
        "reward/std": rewards.std(correction=0).item(),
        "staleness/mean": fmean(lags, weights=token_counts),
        "staleness/max": float(max(lags)),
        "environment_tokens/fraction": 1 - own_tokens / tokens,
        "zero_advantage_fraction": is_equal.double().mean().item(),
    }
    if shaped_rewards is not None:
        metrics["reward/penalty/mean"] = (batch_rewards(batch) - shaped_rewards).mean().item()
    metrics |= kept_metrics((sample.kept for sample in samples), own_tokens)
    metrics |= failure_metrics(samples)
    metrics |= teacher_failures(samples)
    return metrics | _sample_means(samples)


def idle_samples_metrics(batch: Batch) -> dict[str, float]:
    """With async.idle=samples: the episodes sampled per prompt, the share that is trained on, and
    the mean reward of that share. reward/mean is of all of them.
    """
    sampled = sum(len(group.rewards) for group in batch.groups)
    unsent = sum(len(group.unsent_rewards) for group in batch.groups)
    trained_rewards = [sample.reward for sample in batch.samples if not sample.branch]
    return {
        "idle/samples": sampled / len(batch.groups),
        "idle/sent_fraction": 1 - unsent / sampled,
        "reward/trained_mean": fmean(trained_rewards),
    }


def step_times(
    batch: Batch,
    step_s: float,
    train_s: float,
    batch_wait_s: float,
    weights_wait_s: float,
    sync_s: float,
    pause_s: float,
) -> dict[str, float]:
    """The times of one step, in seconds; docs/asynchrony.md defines each.

    The bubble is the time that perfect overlap would have saved. It is the idle time of whichever
    side idled less.
    """
    trainer_wait_s = batch_wait_s + weights_wait_s
    return {
        "time/step_s": step_s,
        "time/train_s": train_s,
        "time/generate_s": batch.generate_s,
        "time/rollout_s": batch.rollout_s,
        "time/reward_s": batch.reward_s,
        "time/sync_s": sync_s,
        "time/sync_pause_s": pause_s,
        "time/trainer_wait_s": trainer_wait_s,
        "time/weights_wait_s": weights_wait_s,
        "time/generator_wait_s": batch.generator_wait_s,
        "time/due_wait_s": batch.due_wait_s,
        "time/bubble_s": min(trainer_wait_s + sync_s, batch.generator_wait_s),
    }


def dropped_metrics(batch: Batch) -> dict[str, float]:
    """What dynamic sampling has dropped. prompts/dropped_right and _wrong count prompts whose
    samples are all right, or all wrong. prompts/unanswered counts prompts with an episode that
    sampled nothing.
    """
    answered = [group for group in batch.dropped if not any_unanswered(group.samples)]
    dropped = []
    for group in answered:
        dropped.append([sample.reward for sample in group.samples if not sample.branch])
    unanswered = len(batch.dropped) - len(answered)
    metrics: dict[str, float] = {"prompts/unanswered": unanswered} if unanswered else {}
    metrics |= {
        "prompts/dropped": len(dropped),
        "prompts/dropped_right": sum(min(rewards) >= CORRECT for rewards in dropped),
        "prompts/dropped_wrong": sum(max(rewards) < CORRECT for rewards in dropped),
    }
    if dropped:
        metrics["reward/dropped_mean"] = fmean(chain(*dropped))
    if batch.groups:
        trained_rewards = [sample.reward for sample in batch.samples if not sample.branch]
        metrics["reward/trained_mean"] = fmean(trained_rewards)
    return metrics


def source_metrics(batch: Batch, mixture: Mixture, curriculum: bool) -> dict[str, float]:
    """For each of several sources: how many of its prompts this step trains on, how many it drops,
    and the means over the samples of both together. `prompts/rested` counts the prompts that the
    curriculum has left out.
    """
    metrics: dict[str, float] = {"prompts/rested": batch.rested} if curriculum else {}
    if len(mixture.names) == 1:
        return metrics
    for number, name in enumerate(mixture.names):
        groups = [group for group in batch.groups if mixture.source(group.ordinal) == number]
        dropped = [group for group in batch.dropped if mixture.source(group.ordinal) == number]
        samples = [sample for group in [*groups, *dropped] for sample in group.samples]
        metrics[f"source/{name}/prompts"] = len(groups)
        if dropped:
            metrics[f"source/{name}/dropped"] = len(dropped)
        if samples:
            rewards = [fmean(group.rewards) for group in [*groups, *dropped]]
            metrics[f"source/{name}/reward"] = fmean(rewards)
            metrics |= {f"source/{name}/{key}": x for key, x in _sample_means(samples).items()}
    return metrics


def _sample_means(samples: Sequence[SampleSummary]) -> dict[str, float]:
    """Means over samples of what their episodes were like.

    rollout/<name> and reward/<name>/mean are those of Sample.metrics and reward_parts, over the
    samples that have them.
    """
    metrics = {
        "response_tokens/mean": fmean(sample.tokens for sample in samples),
        "turns/mean": fmean(sample.turns for sample in samples),
        "truncated_fraction": fmean(sample.finish_reason == "length" for sample in samples),
        FAILED_FRACTION: failure_metrics(samples)[FAILED_FRACTION],
        **episode_metrics(samples),
    }
    for name, value in _means([sample.reward_parts for sample in samples]).items():
        metrics[f"reward/{name}/mean"] = value
    for name, value in _means([sample.metrics for sample in samples]).items():
        metrics[f"rollout/{name}"] = value
    return metrics


def too_many_dropped(batch: Batch, config: RunConfig) -> str | None:
    """If too few prompts are left for a batch, the reason why the run must stop; otherwise None."""
    if batch.groups:
        return None
    metrics = dropped_metrics(batch)
    rollout = config.rollout
    generated = (
        f"at least {rollout.max_num_gen_batches} times "
        f"rollout.prompts_per_step={rollout.prompts_per_step} prompts were generated for it"
    )
    if "reward/dropped_mean" not in metrics:
        return (
            f"{generated}, and too few are left for a batch: each of the others has an episode "
            "that sampled nothing (prompts/unanswered)"
        )
    equal = (
        f"in {metrics['prompts/dropped']} of them all samples had the same reward (mean reward "
        f"{metrics['reward/dropped_mean']:.3f}; {metrics['prompts/dropped_right']} all right, "
        f"{metrics['prompts/dropped_wrong']} all wrong)"
    )
    return (
        f"{generated}, and too few are left for a batch: {equal}. Such prompts teach nothing. "
        "Check whether the task is too hard or too easy for the model, or the reward is wrong; or "
        "raise rollout.n or rollout.max_num_gen_batches"
    )


def _means(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For each name, the mean of its values over the mappings that have it."""
    names = sorted({name for mapping in counts for name in mapping})
    result: dict[str, float] = {}
    for name in names:
        result[name] = fmean(mapping[name] for mapping in counts if name in mapping)
    return result
