"""Held-out evaluation through SGLang: pass@k and mean reward of every held-out set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import chain
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from megarl.base.rollout_types import Group, Prompt, Sample
from megarl.config.errors import RunError
from megarl.config.schema import BY_CALLS, RunConfig
from megarl.config.tasks import source_of, task_of, with_source_keys
from megarl.data.prompts import HeldOutSet, held_out_sets
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.evaluation.measures import Measures, open_measures
from megarl.evaluation.scores import interval
from megarl.generator.seeds import seed_of
from megarl.messaging.rendezvous import Rendezvous
from megarl.observe.status import StatusBoard, work
from megarl.plan.resolve import RunPlan
from megarl.rewards import ifeval
from megarl.rewards.score import (
    CORRECT,
    episode_metrics,
    failure_metrics,
    parts_in_evaluation,
    too_many_failed_episodes,
    too_many_failures,
)
from megarl.rewards.verify import ANSWERS, majority_at, vote
from megarl.roles.opening import open_scorers, open_served
from megarl.rollouts.rollout import Rollout, open_fleet, open_rollouts
from megarl.trainer.hf_files import check_finite


def pass_at(k: int, samples: int, correct: int) -> float:
    """Unbiased estimate of the probability that any of `k` samples is right, if `correct` of
    `samples` are (arXiv:2107.03374, (1)).
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def instruction_scores(groups: Sequence[Group]) -> dict[str, float]:
    """IFEval's accuracies, over prompts and over all instructions.

    A response that could not be graded counts as following none.
    """
    counts = [float(ifeval.instructions(group.prompt.answer)) for group in groups]
    result: dict[str, float] = {}
    for measure in ifeval.MEASURES:
        shares = [
            fmean(sample.reward_parts.get(measure, 0.0) for sample in group.samples)
            for group in groups
        ]
        weights = counts if measure.startswith("instruction") else None
        low, high = interval(shares, len(groups[0].samples), weights)
        result[measure] = fmean(shares, weights)
        result[f"ci95/{measure}/low"] = low
        result[f"ci95/{measure}/high"] = high
    return result


def scores(groups: Sequence[Group], graded: bool = False, grader: str = "") -> dict[str, float]:
    """The scores of one set: pass@k for k = 1, 2, 4, … and n, avg@n (the share of right samples),
    and maj@k if `grader` reads answers. n is the number of samples per prompt. Each score comes
    with the ends of its confidence interval. If responses are `graded`, none is right or wrong, and
    there is only the mean reward.
    """
    episodes = [[sample for sample in group.samples if not sample.branch] for group in groups]
    samples = list(chain.from_iterable(episodes))
    result: dict[str, float] = {} if graded else _answer_scores(episodes, grader)
    if grader == ifeval.NAME and not graded:
        result |= instruction_scores(groups)
    return {
        **result,
        "samples": len(samples),
        "prompts": len(groups),
        "reward/mean": fmean(sample.reward for sample in samples),
        "response_tokens/mean": fmean(len(sample.token_ids) for sample in samples),
        "truncated_fraction": fmean(sample.finish_reason == "length" for sample in samples),
    }


def _answer_scores(episodes: Sequence[Sequence[Sample]], grader: str) -> dict[str, float]:
    """The scores that count right answers. `episodes`: [prompts][n]."""
    n = len(episodes[0])
    correct = [sum(sample.reward >= CORRECT for sample in samples) for samples in episodes]
    ks = sorted({n, *(1 << power for power in range(n.bit_length()))})
    shares = {f"pass@{k}": [pass_at(k, n, count) for count in correct] for k in ks}
    if n > 1:
        shares[f"avg@{n}"] = [count / n for count in correct]
    if n > 1 and grader in ANSWERS:
        votes = [
            [vote(grader, sample.text, sample.reward >= CORRECT) for sample in samples]
            for samples in episodes
        ]
        for k in ks:
            if k > 2:
                shares[f"maj@{k}"] = [majority_at(k, prompt_votes) for prompt_votes in votes]
    result: dict[str, float] = {"correct": sum(correct)}
    for name, prompt_shares in shares.items():
        low, high = interval(prompt_shares, n)
        result[name] = fmean(prompt_shares)
        result[f"ci95/{name}/low"] = low
        result[f"ci95/{name}/high"] = high
    return result


async def answer_all(
    rollout: Rollout,
    held_out: HeldOutSet,
    tokenizer: Tokenizer,
    at_once: int,
    config: RunConfig,
    measures: Measures | None = None,
) -> dict[str, Any]:
    """Evaluates one set and returns its scores.

    At most `at_once` samples run at a time. The deadline of a rollout counts from its start, and so
    must not include waiting for a place in an engine.
    """
    start_s = time.monotonic()
    places = asyncio.Semaphore(max(1, at_once // held_out.samples))
    # Every evaluation of a set has the same seeds, at whatever step.
    seed = seed_of(config.seed, "evaluation", held_out.name)
    sampling = replace(held_out.sampling, stop_token_ids=tokenizer.eos_ids, seed=seed)

    async def answer(prompt: Prompt) -> Group:
        async with places:
            group = await rollout(prompt, sampling, held_out.samples)
        answered(1)
        return group

    with work(
        f"held-out prompts of {held_out.name or 'data.eval'}",
        len(held_out.prompts),
        line="evaluation",
    ) as answered:
        groups = await asyncio.gather(*map(answer, held_out.prompts))
    measured = await measures.of(held_out, groups) if measures else {}
    samples = [sample for group in groups for sample in group.samples]
    parts = parts_in_evaluation(config, held_out.name)
    source = source_of(config, f"eval.suites.{held_out.name}")
    task = task_of(config, source)
    problem = too_many_failures(task.reward, samples, parts)
    problem = problem or too_many_failed_episodes(task.rollout, samples)
    if problem:
        problem = with_source_keys(problem, config, source)
        raise RunError(f"evaluation of {held_out.name or 'data.eval'}: {problem}")
    graded = any(part.role is not None for part in parts)
    # a program's output may be scored instead
    scored_by_text = len(parts) == 1 and task.rollout.name not in BY_CALLS
    grader = parts[0].name if scored_by_text else ""
    return {
        **scores(groups, graded, grader),
        **measured,
        **failure_metrics(samples),
        **episode_metrics(samples),
        "seconds": time.monotonic() - start_s,
        "sampling": _sampling_settings(held_out),
    }


def _sampling_settings(held_out: HeldOutSet) -> dict[str, Any]:
    """The settings that the scores depend on, under the names of their keys."""
    sampling = held_out.sampling
    return {
        "samples": held_out.samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
    }


async def evaluate_sets(
    plan: RunPlan,
    rollout: Rollout,
    sets: Sequence[HeldOutSet],
    tokenizer: Tokenizer,
    places: int,
    measures: Measures | None = None,
) -> dict[str, Any]:
    """Evaluates one set after the other.

    At most `places` samples run at a time. Returns the scores of data.eval and, under
    "suites", the scores of each set of eval.suites.
    """
    suites = {
        held_out.name: await answer_all(rollout, held_out, tokenizer, places, plan.config, measures)
        for held_out in sets
    }
    result = suites.pop("", {})
    if suites:
        result["suites"] = suites
    return result


async def evaluate_engines(plan: RunPlan, rendezvous: Rendezvous) -> dict[str, Any]:
    """Evaluates every held-out set under the weights that the engines were started with."""
    if Path(plan.weights_path).is_dir():
        # while the engines start, since no trainer rank will check the weights
        check_finite(plan.spec, Path(plan.weights_path))
    tokenizer = load_tokenizer(plan.config.model)
    status = StatusBoard(Path(plan.config.run_dir) / "eval", "evaluate.0").for_work()
    status.set("waiting for start-up from the engines")
    async with AsyncExitStack() as resources:
        fleet = await open_fleet(plan, rendezvous, resources)
        served = await open_served(plan, rendezvous, resources)
        scorers = open_scorers(plan, served, tokenizer)
        rollouts = await open_rollouts(plan, fleet, scorers, tokenizer, resources, training=False)
        logs = Path(plan.config.run_dir) / "eval" / "logs"
        measures = await open_measures(plan, served, scorers, tokenizer, resources, logs)
        sets = held_out_sets(plan.config, tokenizer, plan.spec)
        status.set("evaluating")
        return await evaluate_sets(plan, rollouts.held_out, sets, tokenizer, plan.places, measures)
