"""Scores by a reward model on engines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from megarl.config.errors import ConfigError, RunError
from megarl.config.schema import MAX_REWARD
from megarl.data.tokenizer import Tokenizer, tokenizer_of
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import EngineError
from megarl.generator.fleet import Fleet
from megarl.rewards.score import RewardPart, Score, ScoreRequest
from megarl.roles.judge import Template, chat_text
from megarl.roles.plan import ServedRole
from megarl.roles.settings import CHAT

Encode = Callable[[ScoreRequest], list[int]]


class RewardModel:
    """A failed score is one that is not finite or has an absolute value above MAX_REWARD.

    A request that an engine refuses, or does not answer in time, is a failure too. A request to a
    lost engine goes to another engine, or waits until one is back.
    """

    def __init__(self, role: ServedRole, fleet: Fleet, policy: Tokenizer):
        """`policy`: the policy's tokenizer. Raises ConfigError."""
        settings = role.settings
        self._key = f"roles.{role.name}"
        self._fleet = fleet
        self._spec = role.spec
        self._room = min(
            role.spec.max_position_embeddings,
            settings.kv_cache_tokens or role.spec.max_position_embeddings,
        )
        self._places = asyncio.Semaphore(settings.engines * settings.max_concurrency)
        self._encode = reading(role, policy)

    async def score(self, part: RewardPart, request: ScoreRequest) -> Score:
        # in a thread, since the response may be long
        ids = await asyncio.to_thread(self._encode, request)
        if not ids:
            raise RunError(
                f"{part.setting}: it was given no tokens; a rollout's own ScoreRequest needs "
                f"token_ids, or set {self._key}.template"
            )
        fault = ""
        if len(ids) >= self._room:
            fault = f"{len(ids)} tokens, for a context of {self._room}"
        elif max(ids) >= self._spec.vocab_size:
            fault = f"token {max(ids)} is not its own"
        if fault:
            return part.failed("error", f"{self._key}: {fault}", request)
        try:
            async with self._places:
                score = await self._fleet.ask(lambda engine: engine.classify(ids))
        except EngineUnreachable:
            raise
        except (EngineError, TimeoutError) as error:
            kind = "timeout" if isinstance(error, TimeoutError) else "error"
            return part.failed(kind, str(error), request)
        if not math.isfinite(score) or abs(score) > MAX_REWARD:
            return part.failed(
                "error",
                f"{self._key} gave the score {score:g}; at most {MAX_REWARD:g} in size is allowed",
                request,
            )
        return Score(score)


def reading(role: ServedRole, policy: Tokenizer) -> Encode:
    """How a response becomes the model's input. Raises ConfigError."""
    settings = role.settings
    key = f"roles.{role.name}"
    tokenizer = tokenizer_of(settings.path, f"{key}.path", settings.chat_template)
    if settings.template is None:
        if not policy.same_ids(tokenizer):
            raise ConfigError(
                f"{key}.template=null: must be set: the tokens of {settings.path} are not "
                f"those of the policy's tokenizer {policy.source}, so it has to read text"
            )
        return lambda request: [*request.prompt_token_ids, *request.token_ids]
    text = settings.template
    is_chat = text == CHAT
    if is_chat:
        text = chat_text(tokenizer, f"{key}.template", "{prompt}", "{response}")
    template = Template(tokenizer, text, ("prompt", "response", "answer"), is_chat)
    return lambda request: template.encode(
        prompt=request.prompt, response=request.response, answer=request.answer
    )
