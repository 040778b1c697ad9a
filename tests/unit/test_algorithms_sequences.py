"""From a batch to train sequences: contents, denominator, gradient equality, metrics."""

from __future__ import annotations

import pytest
import torch

from megarl.algorithms.aipo import aipo_loss
from megarl.algorithms.base import group_advantages
from megarl.algorithms.sequences import batch_metrics, batch_rewards, to_train_sequences
from megarl.types import Batch, Group, Prompt, Sample, TrainSequence


def sample(tokens: list[int], reward: float, versions: list[int] | None = None, finish: str = "stop") -> Sample:
    return Sample(token_ids=tokens, logprobs=[-0.1 * (i + 1) for i in range(len(tokens))], versions=versions or [0] * len(tokens),
                  text="", reward=reward, finish_reason=finish)


def group(ordinal: int, prompt: list[int], samples: list[Sample]) -> Group:
    return Group(Prompt(ordinal=ordinal, token_ids=prompt, text="", answer=""), samples)


def batch() -> Batch:
    groups = [
        group(0, [1, 4, 5], [sample([6, 2], 1.0), sample([7, 8, 2], 0.0)]),
        group(1, [1, 9], [sample([3, 2], 1.0), sample([3, 3, 3, 2], 1.0)]),  # equal rewards: zero advantage
        group(2, [1], [sample([5], 0.0), sample([4, 2], 1.0)]),
    ]
    return Batch(step=3, groups=groups, generate_s=0.0, generator_wait_s=0.0)


def test_positions_are_masked_and_aligned():
    b = batch()
    sequences, denominator = to_train_sequences(b, group_advantages(batch_rewards(b)), skip_zero=False)
    assert denominator == 2 + 3 + 2 + 4 + 1 + 2
    assert len(sequences) == 6
    assert sequences[1] == TrainSequence(
        token_ids=[1, 4, 5, 7, 8, 2], loss_mask=[False] * 3 + [True] * 3,
        mu_logprobs=[0.0, 0.0, 0.0, -0.1, -0.2, pytest.approx(-0.3)], advantages=[0.0] * 3 + [-0.5] * 3,
    )


def model_gradient(sequences: list[TrainSequence], denominator: float) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10)).double()
    for s in sequences:
        logits = model(torch.tensor(s.token_ids[:-1]))
        logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(s.token_ids[1:])[:, None]).T
        rows = [torch.tensor([field[1:]], dtype=torch.float64) for field in (s.mu_logprobs, s.advantages)]
        out = aipo_loss(logprobs, *rows, torch.tensor([s.loss_mask[1:]]), rho=4.0)
        (out.loss / denominator).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_skipping_zero_advantages_leaves_the_gradient_unchanged():
    b = batch()
    advantages = group_advantages(batch_rewards(b))
    every, denominator = to_train_sequences(b, advantages, skip_zero=False)
    kept, same_denominator = to_train_sequences(b, advantages, skip_zero=True)
    assert len(every) == 6 and len(kept) == 4 and denominator == same_denominator == 14
    expected = model_gradient(every, denominator)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(model_gradient(kept, same_denominator), expected, rtol=0, atol=1e-15)


def test_a_batch_without_signal_gives_no_sequences_but_a_denominator():
    b = Batch(step=0, groups=[group(0, [1], [sample([2], 1.0), sample([3, 2], 1.0)])], generate_s=0.0, generator_wait_s=0.0)
    assert to_train_sequences(b, group_advantages(batch_rewards(b)), skip_zero=True) == ([], 3.0)


def test_metrics():
    groups = [
        group(0, [1], [sample([5, 6, 2], 1.0, [4, 4, 5]), sample([5], 0.0, [5], "length")]),
        group(1, [1], [sample([5, 2], 1.0, [3, 5]), sample([2], 1.0, [6])]),
    ]
    got = batch_metrics(Batch(step=6, groups=groups, generate_s=0.0, generator_wait_s=0.0), version=6)
    assert got == {
        "reward/mean": 0.75, "reward/std": pytest.approx(0.1875**0.5), "staleness/mean": pytest.approx(10 / 7), "staleness/max": 3.0,
        "response_tokens/mean": 1.75, "truncated_fraction": 0.25, "zero_advantage_fraction": 0.5,
    }


def test_ragged_groups_are_refused():
    groups = [group(0, [1], [sample([2], 1.0)]), group(1, [1], [sample([2], 1.0), sample([2], 0.0)])]
    with pytest.raises(ValueError, match="step 2"):
        batch_rewards(Batch(step=2, groups=groups, generate_s=0.0, generator_wait_s=0.0))
