"""async.idle: which samples are sent, when further ones are sampled, and how ranks agree on further
passes.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batches import batch_of
from hypothesis import given
from hypothesis import strategies as st
from loops import DEADLINE_S, settle

from megarl.algorithms.batches import batch_metrics, idle_samples_metrics
from megarl.algorithms.registry import make_algorithm
from megarl.base.rollout_types import UNANSWERED, Failure, Group, Prompt, Sample
from megarl.config.load import load_config
from megarl.config.schema import AsyncConfig, RunConfig, TrainerConfig
from megarl.data.order import Mixture
from megarl.executors.batch_steps import BatchSteps
from megarl.executors.idle_updates import IdleUpdates
from megarl.messaging.waiting import Pulse
from megarl.rollouts.channel import pack, summary_of
from megarl.rollouts.idle import FurtherSamples, chosen, most_telling
from megarl.rollouts.stream import Admission

CONFIGS = Path(__file__).parents[2] / "configs"


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), st.data())
def test_chosen_rewards_have_the_largest_variance(rewards: list[float], data):
    n = data.draw(st.integers(1, len(rewards)))
    places = most_telling(rewards, n)
    assert places == sorted(set(places)) and len(places) == n
    largest = max(np.var(subset) for subset in itertools.combinations(rewards, n))
    assert np.var([rewards[place] for place in places]) == pytest.approx(largest, abs=1e-6)


def test_choice_of_pods_by_hand():
    assert most_telling([0, 0, 0, 1, 0, 1, 0, 0], 4) == [0, 1, 3, 5]
    assert most_telling([0.5, 0.9, 0.1, 0.6, 0.4, 0.2], 3) == [1, 2, 5]
    assert most_telling([1.0, 1.0, 1.0, 1.0], 2) == [0, 1], "the first, if all are equal"


def sample(reward: float, **fields) -> Sample:
    return Sample([1], [0.0], [0], f"reward {reward}", reward, "stop", **fields)


def group(*samples: Sample, first: int = 1) -> Group:
    return Group(Prompt(0, [first], "", ""), list(samples))


def test_episodes_are_chosen_with_all_their_branches():
    further = [group(sample(0.0), sample(0.0, branch=1)), group(sample(0.6))]
    result = chosen(group(sample(0.5), sample(1.0)), further, 2)
    assert [(s.reward, s.branch) for s in result.samples] == [(1.0, 0), (0.0, 0), (0.0, 1)]
    assert result.unsent_rewards == [0.5, 0.6]


def test_failed_episodes_are_the_last_choice():
    failed = sample(0.0, failures=[Failure("error", "it broke")])
    result = chosen(group(sample(0.5), sample(1.0)), [group(failed), group(sample(0.4))], 2)
    assert [s.reward for s in result.samples] == [1.0, 0.4]
    assert sorted(result.unsent_rewards) == [0.0, 0.5]
    assert [s.reward for s in chosen(group(sample(0.5), failed), [], 2).samples] == [0.5, 0.0]


def test_episodes_of_two_prompts_are_not_mixed():
    with pytest.raises(RuntimeError, match="prompt 0: async.idle=samples needs episodes that"):
        chosen(group(sample(0.5)), [group(sample(1.0), first=2)], 1)


class Engines:
    """Further episodes that finish when a test says so. `idle` ends with a beat of `pulse`."""

    def __init__(self):
        self.idle = True
        self.pulse = Pulse()
        self.running: dict[int, asyncio.Future] = {}
        self.cancelled: list[int] = []

    async def sample(self, ordinal: int, number: int) -> Group:
        self.running[number] = asyncio.get_running_loop().create_future()
        try:
            return group(sample(await self.running[number]))
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise

    def finish(self, **rewards: float) -> None:
        for number, reward in rewards.items():
            self.running.pop(int(number[1:])).set_result(reward)


def extended(body, most: int = 5, first: Group = group(sample(0.5), sample(0.5))) -> Group:
    async def run():
        engines = Engines()
        further = FurtherSamples(engines.sample, 2, most)
        task = asyncio.create_task(further(first, lambda: engines.idle, engines.pulse))
        async with asyncio.timeout(DEADLINE_S):
            await settle()
            await body(engines)
            return await task

    return asyncio.run(run())


def test_prompt_gets_more_samples_up_to_the_most():
    async def body(engines):
        assert sorted(engines.running) == [0, 1], "no more than n at a time"
        engines.finish(_1=1.0)
        await settle()
        assert sorted(engines.running) == [0]
        engines.finish(_0=0.25)
        await settle()
        assert sorted(engines.running) == [2], "five in all"
        engines.finish(_2=0.0)

    result = extended(body)
    assert [s.reward for s in result.samples] == [1.0, 0.0]
    assert result.unsent_rewards == [0.5, 0.5, 0.25]


def test_newer_weights_end_further_sampling():
    async def body(engines):
        engines.finish(_1=1.0)
        await settle()
        engines.idle = False
        engines.pulse.beat()
        await settle()
        assert engines.cancelled == [0]

    result = extended(body)
    assert [s.reward for s in result.samples] == [0.5, 1.0]
    assert result.unsent_rewards == [0.5]


def test_unanswered_prompt_gets_no_more_samples():
    unanswered = Sample([], [], [], "", 0.0, UNANSWERED)

    async def body(engines):
        assert not engines.running

    assert extended(body, first=group(unanswered)).samples == [unanswered]


def test_generator_is_idle_while_the_trainer_has_its_batch():
    admission = Admission(prompts_per_step=2, run_ahead=1, max_in_flight=4, end=8)
    assert admission.begin(0) == [0, 1, 2, 3]
    admission.finish(1)
    assert not admission.is_idle(0), "the trainer waits for its first batch"
    admission.finish(2)
    assert admission.is_idle(0) and not admission.is_idle(1)
    assert admission.begin(1) == [4, 5] and not admission.is_idle(1)
    admission.begin(2)
    for ordinal in (0, 3, 4, 5):
        admission.finish(ordinal)
    assert not admission.is_idle(2), "every prompt of the run has begun"


def test_generator_is_not_idle_while_a_source_lacks_prompts():
    """Prompts 0, 2, 4, … are of one source, the others of another."""
    mixture = Mixture([Fraction(1), Fraction(1)], ["fast", "slow"])
    admission = Admission(prompts_per_step=2, run_ahead=1, max_in_flight=4, end=8, mixture=mixture)
    fast, slow, again_fast, _ = admission.begin(0)
    admission.finish(fast)
    admission.finish(again_fast)
    assert not admission.is_idle(0), (
        "two prompts have finished, but the first batch needs a slow one"
    )
    admission.finish(slow)
    assert admission.is_idle(0) and admission.in_flight == 1


def test_mean_reward_is_of_all_samples():
    """Of each prompt its mean, so that prompts with more samples do not count more."""
    first = chosen(group(sample(0.0), sample(1.0)), [group(sample(0.0)), group(sample(0.0))], 2)
    batch = batch_of([first, group(sample(1.0), sample(1.0))])
    assert batch.groups[0].rewards == [0.0, 1.0, 0.0, 0.0]
    assert summary_of(pack(first)).unsent_rewards == [0.0, 0.0]
    metrics = batch_metrics(batch, 0)
    assert metrics["reward/mean"] == pytest.approx((0.25 + 1.0) / 2)
    assert idle_samples_metrics(batch) == {
        "idle/samples": 3.0,
        "idle/sent_fraction": pytest.approx(4 / 6),
        "reward/trained_mean": 0.75,
    }


UPDATES = RunConfig(
    async_=AsyncConfig(idle="updates", max_updates=5), trainer=TrainerConfig(epochs=2), max_steps=9
)


def made(
    config: RunConfig, step: int, sizes: list[float], comes_after: int, rank_0=None
) -> tuple[int, list[bool], dict]:
    """The passes of one rank whose effective sample sizes are `sizes`, its answers to rank 0, and
    its metrics. `rank_0`: rank 0's decisions; None: this is rank 0.
    """
    asked: list[bool] = []

    def awaits(step_asked: int, wanted: bool) -> bool:
        assert step_asked == step + 1
        is_awaited = len(asked) < comes_after
        asked.append(wanted and is_awaited if rank_0 is None else rank_0[len(asked)])
        return asked[-1]

    idle = IdleUpdates(config, 0.7, awaits)
    remaining = iter(sizes)
    passes = sum(1 for _ in idle.passes(step, lambda: next(remaining)))
    metrics = {name: value for name, value in idle.metrics.items() if name.startswith("idle/")}
    return passes, asked, metrics


def test_passes_end_with_the_next_batch_the_bound_or_the_most():
    fine = [0.99] * 9
    assert made(UPDATES, 3, fine, 99)[0] == 3, "five passes, of which two were planned"
    assert made(UPDATES, 3, fine, 2)[::2] == (1, {"idle/updates": 1, "idle/ess": 0.99})
    assert made(UPDATES, 3, [0.9, 0.8, 0.69], 99)[::2] == (2, {"idle/updates": 2, "idle/ess": 0.69})
    assert made(UPDATES, 3, [math.nan], 99)[::2] == (0, {"idle/updates": 0}), "nothing to train on"
    assert made(UPDATES, 8, fine, 99)[:2] == (0, []), "no batch follows the last one"
    twice = replaced(UPDATES, async_=AsyncConfig(idle="updates"))
    assert made(twice, 3, fine, 99)[0] == 2


def test_all_ranks_do_what_rank_0_does():
    """Though their sums may differ in the last bit, and only rank 0 knows what has arrived."""
    sizes = [0.9, 0.7, 0.69]
    passes, decisions, _ = made(UPDATES, 3, sizes, 99)
    assert passes == 2
    for other in ([0.9, np.nextafter(0.7, 0), 0.69], [0.9, 0.7, 0.71]):
        assert made(UPDATES, 3, other, 0, rank_0=decisions)[:2] == (passes, decisions)


@dataclass
class Step:
    """A StepResult, whose class would import Megatron."""

    tokens: int
    learning_rate: int
    token_rows: dict = field(default_factory=dict)

    def check_tokens(self, tokens: int) -> None:
        assert self.tokens == tokens


class FakeTrainer:
    """One rank of one. Each optimizer step raises the log-prob of every second token by 1."""

    topology = SimpleNamespace(dp=1)
    coordinate = SimpleNamespace(dp=0)

    def __init__(self) -> None:
        self.learning_rate = self
        self.position = self.steps = 10
        self.drift = 0.0
        self.proximal: list[list | None] = []
        self.places: list[list[int]] = []

    def seek(self, position: int, steps: int) -> None:
        self.position = position
        self.steps = steps

    def shares(self, sequences):
        return [list(range(len(sequences)))]

    def summed(self, values):
        return values

    def token_logprobs(self, sequences, temperature, model="policy"):
        return [
            np.where(np.arange(len(row)) % 2, -0.5 + self.drift, -0.5).astype(np.float32)
            for row in sequences
        ]

    def train_step(self, sequences, loss, denominator, *, proximal_logprobs, **_):
        self.position += 1
        self.steps += 1
        self.drift += 1.0
        self.proximal.append(proximal_logprobs)
        self.places.append([int(row.token_ids[1]) for row in sequences])
        return Step(sum(int(row.loss_mask.sum()) for row in sequences), self.position)


def test_further_passes_repeat_the_mini_batches_at_their_rates():
    """One token of two has drifted by d: the effective sample size is (1 + e^d)^2 / 2 (1 + e^2d)."""
    config = load_config(
        CONFIGS / "quickstart.yaml",
        ["trainer.minibatches=2", "rollout.prompts_per_step=4", "algorithm.ratio=proximal",
         "async.idle=updates", "async.max_updates=4", "async.capacity=2"],
    )  # fmt: skip
    groups = []
    for ordinal in range(4):
        samples = [
            Sample([10 * ordinal + i, 7], [-0.5] * 2, [0] * 2, "", i, "stop") for i in (0, 1)
        ]
        groups.append(Group(Prompt(ordinal, [1], "", ""), samples))
    measured = []

    class Idle(IdleUpdates):
        def passes(self, step, measure):
            for _ in range(2):
                measured.append(measure())
                yield

    trainer: Any = FakeTrainer()
    idle = Idle(config, 0.0, lambda step, wanted: True)
    steps = BatchSteps(trainer, make_algorithm(config.algorithm), config, idle=idle)
    results = steps.train(batch_of(groups))
    assert [result.learning_rate for result in results] == [11, 12, 13, 14, 13, 14]
    assert trainer.position == 12, "the schedule goes by planned steps"
    assert trainer.steps == 16, "the optimizer has made more"
    assert trainer.places == trainer.places[:2] * 3
    for proximal in trainer.proximal:
        assert all((row == -0.5).all() for row in proximal), "of the weights before the batch"
    for drift, size in zip((2.0, 4.0), measured, strict=True):
        ratio = math.exp(drift)
        assert size == pytest.approx((1 + ratio) ** 2 / (2 * (1 + ratio**2)))
