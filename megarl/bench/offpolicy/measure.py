"""What became of a policy: how well it does, and how far it has moved from the weights that its run began with.

Measured on a Hugging Face checkpoint by transformers, apart from all that trained it. Responses are sampled at temperature 1. At each of
their positions the KL divergence is over the whole vocabulary, so it is exact given the response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from megarl.bench.offpolicy import plain
from megarl.config.errors import ConfigError
from megarl.config.named import find_callable
from megarl.config.schema import RunConfig
from megarl.data.tokenizer import Tokenizer
from megarl.rewards.parts import parts_in_evaluation
from megarl.rewards.score import ScoreRequest, arguments_of, parameters_of, score_of
from megarl.rewards.verify import VERIFIERS
from megarl.types import Prompt

AT_ONCE = 256


@dataclass(frozen=True)
class Quality:
    score: float  # by the rule that judges policies, mean over prompts
    win_rate: float  # share of prompts whose response scores more than their demonstration; equal scores are half a win
    kl: float  # KL(policy || initial) of a response in nats, the sum over its tokens; mean over prompts
    perplexity: float  # of the initial policy on the responses' tokens, as the paper measures divergence
    tokens: float  # of a response, mean
    proxy: float | None  # the reward model's score, mean over prompts


@dataclass(frozen=True)
class HeldOut:
    prompts: Sequence[Prompt]
    demonstrations: Sequence[str]
    tokenizer: Tokenizer
    judge: Callable[[str, Prompt], float]  # scores a response


def judge_of(config: RunConfig) -> Callable[[str, Prompt], float]:
    """The rule that scores held-out responses. Raises ConfigError if there is none."""
    if config.data.eval is None:
        raise ConfigError("data.eval=null: policies are judged on held-out prompts: set data.eval.source")
    [part, *more] = parts_in_evaluation(config)
    if part.role is not None or more:
        raise ConfigError(f"{part.setting}: policies are judged by one rule: set eval.reward")
    if verify := VERIFIERS.get(part.name):
        return lambda response, prompt: score_of(verify(response, prompt.answer)).reward
    function = find_callable(part.name, part.setting, VERIFIERS)
    wanted = parameters_of(function, part.setting)

    def judge(response: str, prompt: Prompt) -> float:
        request = ScoreRequest(response, prompt.answer, prompt.text)
        return score_of(function(**dict(zip(wanted, arguments_of(request, wanted))))).reward

    return judge


@torch.no_grad()
def measure(policy: Path, initial: Path, reward_model: Path | None, held_out: HeldOut, max_tokens: int, seed: int) -> Quality:
    """Samples one response to each prompt from the checkpoint in `policy`."""
    torch.manual_seed(seed)
    own, first, proxy = _load(policy), _load(initial), reward_model and plain.load(reward_model)
    tokenizer, texts, proxy_scores = held_out.tokenizer, list[str](), list[float]()
    divergence, surprise, lengths = [], [], []
    for start in range(0, len(held_out.prompts), AT_ONCE):
        some = held_out.prompts[start : start + AT_ONCE]
        ids, mask = _padded([prompt.token_ids for prompt in some])
        full, counted = _sample(own, ids, mask, tokenizer.eos_ids, max_tokens)
        here = slice(ids.shape[1] - 1, -1)
        log_pi, log_first = (
            _logits(model, full, torch.cat([mask, counted], 1))[:, here].double().log_softmax(-1) for model in (own, first)
        )
        responses = full[:, ids.shape[1] :]
        divergence += ((log_pi.exp() * (log_pi - log_first)).sum(-1) * counted).sum(1).tolist()
        surprise += (-log_first.gather(2, responses[:, :, None])[:, :, 0] * counted).sum(1).tolist()
        lengths += counted.sum(1).tolist()
        each = [row[:length] for row, length in zip(responses.tolist(), lengths[start:], strict=True)]
        texts += [tokenizer.decode([token for token in row if token not in tokenizer.eos_ids]) for row in each]
        if proxy:
            proxy_scores += plain.scores(proxy, [[*prompt.token_ids, *row] for prompt, row in zip(some, each)]).tolist()
    scores, others = ([*map(held_out.judge, each, held_out.prompts)] for each in (texts, held_out.demonstrations))
    wins = [(score > other) + (score == other) / 2 for score, other in zip(scores, others, strict=True)]
    perplexity = math.exp(sum(surprise) / sum(lengths))
    return Quality(fmean(scores), fmean(wins), fmean(divergence), perplexity, fmean(lengths), fmean(proxy_scores) if proxy else None)


def _sample(model: Any, ids: torch.Tensor, mask: torch.Tensor, stop: Sequence[int], max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, t] prompts and responses; [b, r] which of the responses' tokens count: those up to end-of-text, with it."""
    sampled = dict(do_sample=True, top_k=0, max_new_tokens=max_tokens, eos_token_id=list(stop), pad_token_id=stop[0])
    full = model.generate(input_ids=ids, attention_mask=mask, **sampled)
    ends = torch.isin(full[:, ids.shape[1] :], torch.tensor(stop))
    return full, (ends.cumsum(1) - ends.long() == 0).long()


def _logits(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    places = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=places).logits


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # of reading a megabyte
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, t] ids and mask, rows ending together."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
