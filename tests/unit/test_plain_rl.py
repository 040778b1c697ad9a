"""The plain scripts of the methods run, and their losses have the same gradients as MegaRL's."""

from __future__ import annotations

import math
from pathlib import Path

import plain_rl
import pytest
import torch
from losses import F64, packed_loss_of
from run_tools import ROOT, make_model
from transformers import AutoModelForSequenceClassification

from megarl.algorithms.registry import make_algorithm
from megarl.config.schema import AlgorithmConfig
from megarl.critic.losses import Gae, Moments

SETTINGS = [
    "max_steps=2",
    "rollout.prompts_per_step=4",
    "rollout.n=3",
    "eval.limit=4",
    "critic.warmup_steps=1",
]
PROMPTS = ["1+2=", "7+0+9+1+5=", "3-", "1"]  # of different lengths, so they are padded


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models far from uniform. Some of their responses end, others do not."""
    root = tmp_path_factory.mktemp("models")
    policy = make_model(root / "policy", initializer_range=0.2)
    teacher = make_model(root / "teacher", initializer_range=0.1)
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(
        root / "scores"
    )
    return {"policy": policy, "teacher": teacher, "scores": root / "scores"}


def begin(name: str, models: dict[str, Path]) -> plain_rl.Method:
    example = name if name != "distill" else "distillation"
    paths = [
        f"sft.output={models['policy']}",
        f"reward_model.output={models['scores']}",
        f"roles.teacher.path={models['teacher']}",
    ]
    return plain_rl.begin(name, str(ROOT / f"configs/examples/{example}.yaml"), [*SETTINGS, *paths])


def responses_of(method: plain_rl.Method) -> plain_rl.Responses:
    return method.respond(
        method.policy, [prompt for prompt in PROMPTS for _ in range(method.n)], 12
    )


@pytest.mark.parametrize("name", plain_rl.METHODS)
def test_each_method_runs_and_pushes_its_loss_down(name: str, models: dict[str, Path]) -> None:
    method = begin(name, models)
    metrics = method.run()
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0 <= metrics["right_after"] <= 1
    if name == "ppo":
        return
    responses = responses_of(method)
    rewards = torch.randn(12)
    before = method.loss(responses, rewards).item()
    for group in method.optimizer.adam.param_groups:
        group["lr"] = 1e-4
    method.train(responses, rewards)
    assert method.loss(responses, rewards).item() < before


@pytest.mark.parametrize("name", ["ppo", "online_dpo", "judge", "best_of_n"])
def test_losses_have_the_gradients_of_megarls(name: str, models: dict[str, Path]) -> None:
    method = begin(name, models)
    method.policy.double()
    torch.manual_seed(0)
    responses = responses_of(method)
    rewards = torch.randint(0, 2, (12,), dtype=F64)
    written = responses.written.bool()
    log_pi = plain_rl.logprobs(method.policy, responses)
    old = log_pi.detach() + 0.2 * torch.randn_like(log_pi) * written
    settings = {
        "name": "aipo" if name == "judge" else name,
        "ratio": "proximal" if name == "ppo" else "behavior",
    }
    algorithm = make_algorithm(AlgorithmConfig(**settings))
    advantages = algorithm.advantages(rewards.view(4, 3)).reshape(12, 1).expand_as(log_pi)
    if isinstance(method, plain_rl.Ppo):
        values = torch.randn_like(log_pi) * written
        of_tokens = [
            torch.zeros(int(mask.sum()), dtype=F64).index_fill(0, mask.sum() - 1, float(r))
            for mask, r in zip(written, rewards)
        ]
        estimates = Gae(1.0, 0.95, True).estimates(
            [r.numpy() for r in of_tokens], [v[m].numpy() for v, m in zip(values, written)]
        )
        rows = [estimate.advantages for estimate in estimates]
        plain_advantages = method.advantages(responses, rewards, values)
        for row, mask, expected in zip(plain_advantages, written, rows):
            torch.testing.assert_close(row[mask], torch.from_numpy(expected))
        moments = Moments(Moments.of(rows))
        plain_advantages = (plain_advantages - plain_rl.mean(plain_advantages, written)) * written
        advantages = torch.zeros_like(plain_advantages).masked_scatter(
            written, torch.cat([torch.from_numpy(moments.whitened(row)) for row in rows])
        )
        torch.testing.assert_close(
            plain_advantages / (plain_rl.mean(plain_advantages**2, written) + 1e-8).sqrt(),
            advantages,
        )
        loss = method.loss(responses, advantages, old)
    else:
        loss = method.loss(responses, rewards)
    if isinstance(method, plain_rl.OnlineDpo):
        with torch.no_grad():
            for parameter in method.reference.double().parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
            reference = plain_rl.logprobs(method.reference, responses)
        loss = method.loss(responses, rewards)
        group_loss = algorithm.group_loss
        assert group_loss is not None
        weighed = group_loss.weigh(
            algorithm.advantages(rewards.view(4, 3)),
            (log_pi.detach() - reference).sum(1).view(4, 3),
        )
        assert weighed.loss / 4 == pytest.approx(loss.item())
        advantages = weighed.weights.reshape(12, 1).expand_as(log_pi)
    mu = old if name == "ppo" else log_pi.detach()
    flat = [tensor[written] for tensor in (log_pi, mu, advantages, written)]
    sum_ = packed_loss_of(written.sum(1).tolist(), *flat, proximal=mu[written], **settings).loss
    expected = sum_ / algorithm.denominator(tokens=int(written.sum()), samples=12)
    parameters = list(method.policy.parameters())
    for plain_gradient, megarl_gradient in zip(
        torch.autograd.grad(loss, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(plain_gradient, megarl_gradient, rtol=1e-8, atol=1e-12)
