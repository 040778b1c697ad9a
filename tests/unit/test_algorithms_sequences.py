"""From a batch to train sequences: contents, denominator, equal gradients, metrics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from batches import batch_of
from msgspec.structs import replace

from megarl.algorithms.advantages import mean_baseline
from megarl.algorithms.base import Algorithm
from megarl.algorithms.batches import batch_metrics, batch_rewards, minibatches, to_train_sequences
from megarl.algorithms.registry import make_algorithm
from megarl.base.rollout_types import Batch, Group, Prompt, Sample, TrainSequence
from megarl.config.schema import AlgorithmConfig, TrainerConfig

AIPO = make_algorithm(AlgorithmConfig())


def sample(
    tokens: list[int], reward: float, versions: list[int] | None = None, finish: str = "stop"
) -> Sample:
    return Sample(
        token_ids=tokens,
        logprobs=[-0.1 * (i + 1) for i in range(len(tokens))],
        versions=versions or [0] * len(tokens),
        text="",
        reward=reward,
        finish_reason=finish,
    )


def turns(tokens: list[int], mask: list[bool], reward: float, garbage: float = 0.0) -> Sample:
    """A sample of several turns.

    The environment's tokens have `garbage` as log-prob and as version.
    """
    one_turn = sample(tokens, reward)
    logprobs = [
        logprob if by_policy else garbage
        for logprob, by_policy in zip(one_turn.logprobs, mask, strict=True)
    ]
    versions = [0 if by_policy else int(garbage) for by_policy in mask]
    return replace(
        one_turn, logprobs=logprobs, versions=versions, policy_mask=mask, metrics={"tool_calls": 1}
    )


def group(ordinal: int, prompt: list[int], samples: list[Sample]) -> Group:
    return Group(Prompt(ordinal=ordinal, token_ids=prompt, text="", answer=""), samples)


def batch() -> Batch:
    groups = [
        group(0, [1, 4, 5], [sample([6, 2], 1.0), sample([7, 8, 2], 0.0)]),
        # equal rewards: zero advantage
        group(1, [1, 9], [sample([3, 2], 1.0), sample([3, 3, 3, 2], 1.0)]),
        group(2, [1], [sample([5], 0.0), sample([4, 2], 1.0)]),
    ]
    return batch_of(groups, step=3)


def denominator(batch: Batch, algorithm: Algorithm) -> float:
    """The denominator of a batch that is one mini-batch."""
    (minibatch,) = minibatches(batch, [], algorithm, TrainerConfig(), seed=0)
    return minibatch.denominator


def test_positions_are_masked_and_aligned():
    b = batch()
    sequences = [*to_train_sequences(b, mean_baseline(batch_rewards(b)), skip_zero=False).values()]
    assert denominator(b, AIPO) == 2 + 3 + 2 + 4 + 1 + 2
    assert denominator(b, make_algorithm(AlgorithmConfig(loss_mean="sequence"))) == 6
    assert len(sequences) == 6
    assert sequences[1] == TrainSequence(
        token_ids=[1, 4, 5, 7, 8, 2],
        loss_mask=[False] * 3 + [True] * 3,
        mu_logprobs=[0.0, 0.0, 0.0, -0.1, -0.2, -0.1 * 3],
        advantages=[0.0] * 3 + [-0.5] * 3,
    )


def model_gradient(sequences: list[TrainSequence], divisor: float) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(10, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10)
    ).double()
    for s in sequences:
        ids = torch.from_numpy(s.token_ids).long()
        logits = model(ids[:-1])
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        mu = torch.from_numpy(s.mu_logprobs[1:]).double()
        advantages = torch.from_numpy(s.advantages[1:]).double()
        mask = torch.from_numpy(s.loss_mask[1:])
        boundaries = torch.tensor([0, len(logprobs)], dtype=torch.int32)
        microbatch = SimpleNamespace(
            boundaries=boundaries,
            mu_logprobs=mu,
            advantages=advantages,
            loss_mask=mask,
            reference_logprobs=None,
            proximal_logprobs=None,
        )
        (AIPO.loss(logprobs, microbatch).loss / divisor).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


T = True
F = False


def groups_of_turns(garbage: float = 0.0) -> list[Group]:
    return [
        group(
            0,
            [1, 4, 5],
            [turns([6, 7, 9, 9, 2], [T, T, F, F, T], 1.0, garbage), sample([7, 8, 2], 0.0)],
        ),
        group(
            1,
            [1, 9],
            [
                turns([3, 8, 3, 8, 2], [T, F, T, F, T], 0.0, garbage),
                turns([5, 6, 4], [T, T, F], 1.0, garbage),
            ],
        ),
    ]


def batch_of_turns(garbage: float = 0.0) -> Batch:
    return batch_of(groups_of_turns(garbage), step=3)


def test_environment_tokens_are_only_context():
    """Against the written-out sum over only the policy's tokens, in float64: the gradient, and that
    garbage on other tokens has no effect.
    """
    b = batch_of_turns()
    advantages = mean_baseline(batch_rewards(b))
    sequences = [*to_train_sequences(b, advantages, skip_zero=False).values()]
    tokens = denominator(b, AIPO)
    assert tokens == 3 + 3 + 3 + 2
    masks = [[F, F, F, T, T, F, F, T], [F, F, F, T, T, T], [F, F, T, F, T, F, T], [F, F, T, T, F]]
    assert [s.loss_mask.tolist() for s in sequences] == masks

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(10, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10)
    ).double()
    loss = torch.zeros((), dtype=torch.float64)
    for g, row in zip(groups_of_turns(), advantages.tolist()):
        for s, advantage in zip(g.samples, row):
            context = list(g.prompt.token_ids)
            for token, mu, by_policy in zip(
                s.token_ids, s.logprobs, s.policy_mask or [True] * len(s.token_ids)
            ):
                if by_policy:
                    logprob = torch.log_softmax(model(torch.tensor(context[-1])), -1)[token]
                    loss -= torch.exp(logprob.detach() - mu).clamp(max=4.0) * advantage * logprob
                context.append(token)
    (loss / tokens).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(model_gradient(sequences, tokens), expected, rtol=0, atol=1e-15)
    with_garbage = to_train_sequences(batch_of_turns(garbage=-9.0), advantages, skip_zero=False)
    assert [*with_garbage.values()] == sequences
    for s in sequences:
        assert not s.mu_logprobs[~s.loss_mask].any()
        assert not s.advantages[~s.loss_mask].any()


def test_metrics_of_turns():
    metrics = batch_metrics(batch_of_turns(), version=2)
    assert metrics == batch_metrics(batch_of_turns(garbage=-9.0), version=2)
    assert metrics["turns/mean"] == pytest.approx((2 + 1 + 3 + 1) / 4)
    assert metrics["response_tokens/mean"] == 16 / 4
    assert metrics["environment_tokens/fraction"] == pytest.approx(5 / 16)
    assert metrics["rollout/tool_calls"] == 1.0
    assert metrics["staleness/mean"] == metrics["staleness/max"] == 2


def test_skipping_zero_advantages_leaves_the_gradient_unchanged():
    b = batch()
    advantages = mean_baseline(batch_rewards(b))
    complete = [*to_train_sequences(b, advantages, skip_zero=False).values()]
    nonzero = [*to_train_sequences(b, advantages, skip_zero=True).values()]
    assert len(complete) == 6 and len(nonzero) == 4
    expected = model_gradient(complete, 14)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(
        model_gradient(nonzero, denominator(b, AIPO)), expected, rtol=0, atol=1e-15
    )


def test_batch_without_signal_has_only_a_denominator():
    b = batch_of([group(0, [1], [sample([2], 1.0), sample([3, 2], 1.0)])])
    assert to_train_sequences(b, mean_baseline(batch_rewards(b)), skip_zero=True) == {}
    assert denominator(b, AIPO) == 3.0


def test_metrics():
    groups = [
        group(0, [1], [sample([5, 6, 2], 1.0, [4, 4, 5]), sample([5], 0.0, [5], "length")]),
        group(1, [1], [sample([5, 2], 1.0, [3, 5]), sample([2], 1.0, [6])]),
    ]
    metrics = batch_metrics(batch_of(groups, step=6), version=6)
    assert metrics == {
        "reward/mean": 0.75,
        "reward/std": pytest.approx(0.1875**0.5),
        "staleness/mean": pytest.approx(10 / 7),
        "staleness/max": 3.0,
        "response_tokens/mean": 1.75,
        "truncated_fraction": 0.25,
        "zero_advantage_fraction": 0.5,
        "environment_tokens/fraction": 0.0,
        "turns/mean": 1.0,
        "reward/timeouts": 0,
        "reward/errors": 0,
        "reward/out_of_memory": 0,
        "reward/exits": 0,
        "reward/failed_fraction": 0.0,
        "rollout/failed_fraction": 0.0,
    }


def test_ragged_groups_are_refused():
    groups = [
        group(0, [1], [sample([2], 1.0)]),
        group(1, [1], [sample([2], 1.0), sample([2], 0.0)]),
    ]
    with pytest.raises(ValueError, match="step 2"):
        batch_rewards(batch_of(groups, step=2))
