"""The methods of configs/examples in plain PyTorch, as references for MegaRL's runs.

    python tests/tools/plain_rl.py METHOD CONFIG [key=value …]

METHOD is ppo, online_dpo, judge, best_of_n or distill; CONFIG is MegaRL's configuration of that
method. Runs begin with the checkpoints that MegaRL's commands wrote (sft.output,
reward_model.output, the path of a teacher), and have the same batches, steps and learning rates.
MegaRL also gives the task's rows, in the order of its runs, and the verifier. All other code is
here and in transformers.

One process samples, scores and learns in turn, so data is never stale. Sampling is at temperature
1. Prints one JSON object: the mean reward of the first and of the last 10 steps, and the share of
right greedy answers to held-out prompts before and after.
"""

from __future__ import annotations

import copy
import json
import math
import re
import sys
import time
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    logging,
)

from megarl.data.prompts import row_index
from megarl.data.synthetic import synthetic_rows
from megarl.rewards.verify import last_number_reward

DEFAULTS = {
    "sft": {"output": "${run_dir}/sft/hf"},
    "reward_model": {"output": "${run_dir}/reward_model/hf"},
    "trainer": {"minibatches": 1, "epochs": 1},
    "critic": {"warmup_steps": 0},
    "algorithm": {"beta": 0.1, "gamma": 1.0, "gae_lambda": 0.95},
    "eval": {"limit": None},
}
CLIP = 0.2
VALUE_CLIP = 0.2  # of PPO


@dataclass(frozen=True)
class Responses:
    """B responses behind their prompts: prompts are padded on the left, responses on the right."""

    ids: Tensor  # [B, L]
    token_mask: Tensor  # [B, L] 1 for a token, 0 for padding
    # [B, L - 1] 1 where the policy wrote the token ids[:, 1:], end-of-text included; else 0
    written: Tensor

    def __getitem__(self, places: Tensor) -> Responses:
        return Responses(*(getattr(self, field.name)[places] for field in fields(self)))


def logits(model: Any, responses: Responses) -> Tensor:
    """[B, L - 1, vocabulary] for the tokens ids[:, 1:]."""
    return model(responses.ids, attention_mask=responses.token_mask).logits[:, :-1]


def logprobs(model: Any, responses: Responses) -> Tensor:
    """[B, L - 1], 0 where the policy did not write."""
    token_logprobs = (
        logits(model, responses).log_softmax(-1).gather(2, responses.ids[:, 1:, None])[:, :, 0]
    )
    return token_logprobs * responses.written


def scores(model: Any, responses: Responses) -> Tensor:
    """[B, L]: the score of a one-score model at each token."""
    return model.score(
        model.model(responses.ids, attention_mask=responses.token_mask).last_hidden_state
    )[:, :, 0]


def mean(terms: Tensor, written: Tensor) -> Tensor:
    """The mean over the policy's tokens."""
    return (terms * written).sum() / written.sum()


class Optimizer:
    def __init__(self, model: Any, settings: DictConfig, steps: int):
        self.parameters = list(model.parameters())
        self.clip = settings.clip_grad
        self.adam = torch.optim.AdamW(
            self.parameters, settings.lr, tuple(settings.betas), weight_decay=settings.weight_decay
        )

        def rate(steps_taken: int) -> float:
            if steps_taken < settings.warmup_steps:
                return (steps_taken + 1) / settings.warmup_steps
            if settings.schedule == "constant":
                return 1.0
            part = (steps_taken + 1 - settings.warmup_steps) / (steps - settings.warmup_steps)
            return (
                settings.min_lr_ratio
                + (1 - settings.min_lr_ratio) * (1 + math.cos(math.pi * part)) / 2
            )

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adam, rate)

    def step(self, loss: Tensor) -> None:
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.adam.step()
        self.schedule.step()


class Method:
    """Learns from the rule's rewards.

    A method has its own `loss`, and may have its own `rewards` or `train`.
    """

    def __init__(self, config: DictConfig):
        self.config = config
        self.n = config.rollout.n
        self.tokenizer = AutoTokenizer.from_pretrained(config.sft.output)
        self.policy = AutoModelForCausalLM.from_pretrained(config.sft.output)
        self.steps = config.max_steps * config.trainer.minibatches * config.trainer.epochs
        self.optimizer = Optimizer(self.policy, config.trainer.optimizer, self.steps)

    def rewards(self, responses: Responses, prompts: list[str], answers: list[str]) -> Tensor:
        """[B]"""
        return torch.tensor(
            [
                last_number_reward(text, answer)
                for text, answer in zip(self.texts(responses), answers)
            ]
        )

    def train(self, responses: Responses, rewards: Tensor) -> None:
        self.optimizer.step(self.loss(responses, rewards))

    def loss(self, responses: Responses, rewards: Tensor) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def respond(
        self, model: Any, prompts: list[str], max_tokens: int, greedy: bool = False
    ) -> Responses:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        ids = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=not greedy, top_k=0)
        response_ids = ids[:, inputs.input_ids.shape[1] :]
        ends = (response_ids == self.tokenizer.eos_token_id).int()
        written = (ends.cumsum(1) - ends == 0).int()  # up to the first end-of-text
        return Responses(
            ids,
            torch.cat([inputs.attention_mask, written], 1),
            F.pad(written, (ids.shape[1] - 1 - response_ids.shape[1], 0)),
        )

    def texts(self, responses: Responses) -> list[str]:
        ids = responses.ids[:, 1:].where(responses.written.bool(), self.tokenizer.pad_token_id)
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def right(self) -> float:
        """The share of right greedy answers to the held-out prompts."""
        rows = synthetic_rows(self.config.data.eval.source, "eval", self.config.seed, "data.eval")
        rows = [rows[index] for index in range(self.config.eval.limit or len(rows))]
        responses = self.respond(
            self.policy, [row.prompt for row in rows], self.config.rollout.max_tokens, greedy=True
        )
        return fmean(
            last_number_reward(text, row.answer) for text, row in zip(self.texts(responses), rows)
        )

    def run(self) -> dict[str, float]:
        config = self.config
        metrics = []
        start_s = time.perf_counter()
        rows = synthetic_rows(config.data.train.source, "train", config.seed, "data.train")
        size = config.rollout.prompts_per_step
        before = self.right()
        for step in range(config.max_steps):
            places = [
                row_index(step * size + i, len(rows), f"prompts/{config.seed}", True)
                for i in range(size)
            ]
            batch = [rows[place] for place in places for _ in range(self.n)]
            responses = self.respond(
                self.policy, [row.prompt for row in batch], config.rollout.max_tokens
            )
            rewards = self.rewards(
                responses, [row.prompt for row in batch], [row.answer for row in batch]
            )
            self.train(responses, rewards)
            metrics.append(rewards.mean().item())
            print(f"step {step}: reward {metrics[-1]:.3f}", file=sys.stderr)
        result = {
            "reward_first": fmean(metrics[:10]),
            "reward_last": fmean(metrics[-10:]),
            "right_before": before,
            "right_after": self.right(),
        }
        return {**result, "seconds": time.perf_counter() - start_s}


class BestOfN(Method):
    """Supervised learning of each prompt's best response."""

    def loss(self, responses: Responses, rewards: Tensor) -> Tensor:
        best = rewards.view(-1, self.n).argmax(1) + self.n * torch.arange(len(rewards) // self.n)
        return -logprobs(self.policy, responses[best]).sum(1).mean()


class OnlineDpo(Method):
    """DPO (arXiv:2305.18290, equation 7) on each prompt's best and worst response by a reward
    model's scores.
    """

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.reference = copy.deepcopy(self.policy)
        self.reward_model = AutoModelForSequenceClassification.from_pretrained(
            config.reward_model.output
        )

    @torch.no_grad()
    def rewards(self, responses: Responses, prompts: list[str], answers: list[str]) -> Tensor:
        last = (responses.token_mask * torch.arange(responses.ids.shape[1])).argmax(1)
        return scores(self.reward_model, responses).gather(1, last[:, None])[:, 0]

    def loss(self, responses: Responses, rewards: Tensor) -> Tensor:
        groups = rewards.view(-1, self.n)
        first = self.n * torch.arange(len(rewards) // self.n)
        pairs = responses[
            torch.stack([first + groups.argmax(1), first + groups.argmin(1)], 1).flatten()
        ]
        with torch.no_grad():
            reference = logprobs(self.reference, pairs)
        best, worst = (logprobs(self.policy, pairs) - reference).sum(1).view(-1, 2).unbind(1)
        paired = groups.amax(1) > groups.amin(1)
        return (-F.logsigmoid(self.config.algorithm.beta * (best - worst)) * paired).mean()


class Judge(Method):
    """The policy gradient, with the mean reward of a prompt's responses as the baseline.

    A model writes a verdict, which is the reward.
    """

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.judge = AutoModelForCausalLM.from_pretrained(config.roles.judge.path)

    def rewards(self, responses: Responses, prompts: list[str], answers: list[str]) -> Tensor:
        settings = self.config.roles.judge
        questions = [
            settings.template.format(prompt=p, response=text)
            for p, text in zip(prompts, self.texts(responses))
        ]
        verdict_texts = self.texts(
            self.respond(self.judge, questions, settings.max_tokens, greedy=True)
        )
        verdicts = [re.findall(settings.verdict, text) for text in verdict_texts]
        return torch.tensor([float(numbers[-1]) if numbers else 0.0 for numbers in verdicts])

    def loss(self, responses: Responses, rewards: Tensor) -> Tensor:
        groups = rewards.view(-1, self.n)
        advantages = (groups - groups.mean(1, keepdim=True)).view(-1, 1)
        return -mean(advantages * logprobs(self.policy, responses), responses.written)


class Ppo(Method):
    """Clipped policy and values (arXiv:1707.06347), advantages by GAE (arXiv:1506.02438)."""

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.critic = AutoModelForSequenceClassification.from_pretrained(
            config.sft.output, num_labels=1
        )
        torch.nn.init.zeros_(self.critic.score.weight)
        self.critic_optimizer = Optimizer(self.critic, config.critic.optimizer, self.steps)
        self.batches = 0

    def values(self, responses: Responses) -> Tensor:
        """[B, L - 1]: the value before each token, 0 where the policy did not write."""
        return scores(self.critic, responses)[:, :-1] * responses.written

    def advantages(self, responses: Responses, rewards: Tensor, values: Tensor) -> Tensor:
        """[B, L - 1]"""
        gamma = self.config.algorithm.gamma
        gae_lambda = self.config.algorithm.gae_lambda
        last = (responses.written * torch.arange(values.shape[1])).argmax(1)
        of_tokens = torch.zeros_like(values).scatter(1, last[:, None], rewards[:, None])
        gae = torch.zeros_like(values)
        following = torch.zeros(len(values))
        advantage = torch.zeros(len(values))
        for t in reversed(range(values.shape[1])):
            advantage = (
                of_tokens[:, t] + gamma * following - values[:, t] + gamma * gae_lambda * advantage
            )
            gae[:, t] = advantage = advantage * responses.written[:, t]
            following = values[:, t]
        return gae

    def train(self, responses: Responses, rewards: Tensor) -> None:
        written = responses.written
        with torch.no_grad():
            old = logprobs(self.policy, responses)
            values = self.values(responses)
        advantages = self.advantages(responses, rewards, values)
        returns = advantages + values
        average = mean(advantages, written)
        whitened = (advantages - average) / (
            mean((advantages - average) ** 2, written) + 1e-8
        ).sqrt()
        for _ in range(self.config.trainer.epochs):
            for rows in torch.randperm(len(rewards)).chunk(self.config.trainer.minibatches):
                if self.batches >= self.config.critic.warmup_steps:
                    self.optimizer.step(self.loss(responses[rows], whitened[rows], old[rows]))
                self.critic_optimizer.step(
                    self.value_loss(responses[rows], returns[rows], values[rows])
                )
        self.batches += 1

    def loss(self, responses: Responses, advantages: Tensor, old: Tensor) -> Tensor:  # type: ignore[override]
        ratio = (logprobs(self.policy, responses) - old).exp()
        return -mean(
            torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages),
            responses.written,
        )

    def value_loss(self, responses: Responses, returns: Tensor, old: Tensor) -> Tensor:
        values = self.values(responses)
        near = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)
        return (
            mean(torch.maximum((values - returns) ** 2, (near - returns) ** 2), responses.written)
            / 2
        )


class Distill(Method):
    """On-policy distillation: the reverse KL divergence from a teacher, over the vocabulary, at
    each token of the policy's responses.
    """

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.teacher = AutoModelForCausalLM.from_pretrained(config.roles.teacher.path)

    def loss(self, responses: Responses, rewards: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = logits(self.teacher, responses).log_softmax(-1)
        policy_logprobs = logits(self.policy, responses).log_softmax(-1)
        return mean(
            (policy_logprobs.exp() * (policy_logprobs - teacher)).sum(-1), responses.written
        )


METHODS = {
    "ppo": Ppo,
    "online_dpo": OnlineDpo,
    "judge": Judge,
    "best_of_n": BestOfN,
    "distill": Distill,
}


def begin(method: str, path: str, overrides: list[str]) -> Method:
    config = OmegaConf.merge(DEFAULTS, OmegaConf.load(path), OmegaConf.from_dotlist(overrides))
    assert isinstance(config, DictConfig) and config.rollout.temperature == 1.0
    torch.manual_seed(config.seed)
    return METHODS[method](config)


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in METHODS:
        sys.exit(
            f"usage: python tests/tools/plain_rl.py {{{','.join(METHODS)}}} CONFIG [key=value …]"
        )
    logging.set_verbosity_error()  # it warns of a critic's new head, which is meant
    print(json.dumps(begin(sys.argv[1], sys.argv[2], sys.argv[3:]).run()))
