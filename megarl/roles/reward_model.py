"""Scores by a reward model on engines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from megarl.base.rollout_types import TurnReward
from megarl.config.errors import ConfigError, RunError
from megarl.config.schema import MAX_REWARD
from megarl.data.tokenizer import Tokenizer, tokenizer_of
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import EngineError
from megarl.generator.fleet import Fleet
from megarl.rewards.score import RewardPart, Score, ScoreRequest
from megarl.roles.judge import Template, chat_text
from megarl.roles.plan import ServedRole
from megarl.roles.settings import CHAT, STEPS

MOST_STEPS = 1024  # of a response of one turn, so that a policy cannot ask for any number of scores
_MOST_TOKENS_OF_CHARACTER = 4  # of its bytes in UTF-8
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
        self._step_places = asyncio.Semaphore(settings.engines * settings.max_concurrency)
        self._encode = reading(role, policy)
        self._policy = policy
        self._separator = settings.step_separator if settings.scores == STEPS else None

    async def score(self, part: RewardPart, request: ScoreRequest) -> Score:
        """With scores=steps, the reward is that of the last step, which is the whole response."""
        if self._separator is None:
            return await self._score(part, request)
        ends = await asyncio.to_thread(step_ends, request, self._policy, self._separator)
        if len(ends) == 1:
            return await self._score(part, request)
        scores = await asyncio.gather(*(self._score_step(part, request, end) for end in ends))
        for score in scores:
            if score.failures:
                return score
        turns = [TurnReward(end, score.reward) for end, score in zip(ends, scores, strict=True)]
        return Score(scores[-1].reward, turn_rewards=turns)

    async def _score_step(self, part: RewardPart, request: ScoreRequest, end: int) -> Score:
        # few at a time, since the texts of all steps of a long response are large together
        async with self._step_places:
            step = await asyncio.to_thread(up_to, request, end, self._policy)
            return await self._score(part, step)

    async def _score(self, part: RewardPart, request: ScoreRequest) -> Score:
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


def step_ends(request: ScoreRequest, policy: Tokenizer, separator: str) -> list[int]:
    """How many of the response's tokens come before the end of each turn, or, if it has one turn,
    of each step. The last is the response's end.

    A step ends with the token that completes `separator`, unless nothing is left but white space.
    The last of MOST_STEPS steps has all that is left.
    """
    ids = request.token_ids
    ends = list(request.turn_ends[:-1])
    if not ends:
        ends = _step_ends(_pieces(ids, policy), separator)[: MOST_STEPS - 1]
    return [*ends, len(ids)]


def up_to(request: ScoreRequest, end: int, policy: Tokenizer) -> ScoreRequest:
    """The request for the first `end` tokens of the response."""
    ids = list(request.token_ids[:end])
    return replace(request, response=policy.decode_turn(ids), token_ids=ids)


def _pieces(ids: Sequence[int], policy: Tokenizer) -> list[str]:
    """What each token adds to the text of the tokens before it.

    A character of several tokens is added by its last one.
    """
    pieces = []
    context = 0  # a token decoded without the one before it may lose its leading space
    done = 0
    for end in range(1, len(ids) + 1):
        text = policy.decode_turn(ids[context:end])
        piece = text[len(policy.decode_turn(ids[context:done])) :]
        if piece.endswith("\ufffd") and end - done < _MOST_TOKENS_OF_CHARACTER:
            piece = ""
        else:
            context = done
            done = end
        pieces.append(piece)
    return pieces


def _step_ends(pieces: Sequence[str], separator: str) -> list[int]:
    """How many of the pieces come before the end of each step but the last."""
    last = max((number for number, piece in enumerate(pieces) if piece.strip()), default=0)
    ends = []
    text_of_step = ""
    for number, piece in enumerate(pieces[:last], start=1):
        text_of_step += piece
        if separator in text_of_step:
            if text_of_step.strip():
                ends.append(number)
            text_of_step = ""
    return ends


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
