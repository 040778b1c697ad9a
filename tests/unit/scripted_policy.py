"""A policy with given responses, for rollouts without an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from megarl.base.rollout_types import Prompt, Sample
from megarl.config.schema import ModelConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.generator.completions import Completion, Sampling
from megarl.rewards.score import Score, ScoreRequest
from megarl.rollouts.environments.base import RolloutContext, ToolError, sample_problems
from megarl.rollouts.environments.tool_calls import ToolCalls

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs/models/tiny-llama")
TOKENIZER = load_tokenizer(ModelConfig(path=TINY))
EOS = TOKENIZER.eos_id
VOCABULARY = 500


class ScriptedPolicy:
    """A fake policy that says given texts, turn by turn; "$" at the end stands for end-of-text.

    It records its requests.
    """

    def __init__(self, *turns: str):
        self._turns = list(turns)
        self.asked: list[tuple[list[int], Sampling]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        self.asked.append((prompt_ids, sampling))
        return [self._say(self._turns.pop(0), sampling, version=len(self.asked)) for _ in range(n)]

    def _say(self, text: str, sampling: Sampling, version: int) -> Completion:
        ids = TOKENIZER.encode_text(text.removesuffix("$")) + [EOS] * text.endswith("$")
        ended = ids[-1] in sampling.stop_token_ids
        assert len(ids) <= sampling.max_tokens and not set(ids[:-1]) & set(sampling.stop_token_ids)
        return Completion(
            ids, [-0.5 * version] * len(ids), [version] * len(ids), "stop" if ended else "length"
        )

    def context(self) -> RolloutContext:
        async def score(request: ScoreRequest) -> Score:
            return Score(float(request.response == request.answer), {"index": request.sample_index})

        async def run_in_worker(function: Any, *arguments: Any) -> Any:
            try:
                return function(*arguments)
            except ValueError as error:
                raise ToolError(str(error)) from error

        return RolloutContext(TOKENIZER, self.generate, score, run_in_worker, tool_timeout_s=0.05)


def prompt(text: str = "12*12=", answer: str = "144") -> Prompt:
    return Prompt(ordinal=7, token_ids=TOKENIZER.encode_prompt(text), text=text, answer=answer)


SAMPLING = Sampling(max_tokens=64, stop_token_ids=(EOS,))
MARKS: dict[str, Any] = {"call_open": "<", "call_close": ">", "result": "{result};"}


def sample_of(policy: ScriptedPolicy, sampling: Sampling = SAMPLING, **arguments: Any) -> Sample:
    rollout = ToolCalls(TOKENIZER, **{**MARKS, **arguments})
    [sample] = asyncio.run(rollout(policy.context(), prompt(), sampling, 1))
    assert sample_problems([sample], 1, sampling.max_tokens, VOCABULARY) == []
    return sample
