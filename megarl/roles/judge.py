"""Scores by a judge on engines: a model that reads responses and writes a verdict.

Its input quotes hostile text, and its output depends on that. So only the last verdict in its
answer counts, numbers out of range and unknown words are failures, and lengths are limited.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from statistics import fmean

from msgspec.structs import replace

from megarl.config.errors import ConfigError
from megarl.data.chat import load_chat_template
from megarl.data.tokenizer import Tokenizer, tokenizer_of
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import EngineError, Sampling
from megarl.generator.fleet import Fleet
from megarl.generator.seeds import Seeds, seed_of
from megarl.rewards.score import Part, Score, ScoreRequest
from megarl.roles.plan import ServedRole, pairs
from megarl.roles.settings import CHAT, PAIRWISE, RoleConfig

# The input of a model that reads other models' text, as token ids.


_FIELD = re.compile(r"\{[a-z_]+\}")


class Template:
    """A text with fields such as {response}. `encode` fills them in and tokenises the result.

    Values may be hostile. So the name of a special token in a value is plain text, which cannot end
    or open a turn. Only special tokens in the template itself count. Otherwise the ids equal those
    of the whole text: a token may span the border between template and value.
    """

    def __init__(
        self, tokenizer: Tokenizer, text: str, fields: Sequence[str], rendered: bool = False
    ):
        """`rendered`: a chat template has made the text."""
        self._tokenizer = tokenizer
        special = tokenizer.special_tokens
        marks = sorted(special, key=len, reverse=True)
        cuts = re.compile("|".join(map(re.escape, [*(f"{{{field}}}" for field in fields), *marks])))
        # ids of special tokens, texts, and names of fields
        self._pieces: list[int | str | tuple[str]] = []
        end = 0
        for found in cuts.finditer(text):
            self._pieces += [
                text[end : found.start()],
                special[found[0]] if found[0] in special else (found[0][1:-1],),
            ]
            end = found.end()
        self._pieces.append(text[end:])
        begun = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        self._begin = [] if begun or rendered else tokenizer.encode_prompt("")

    def encode(self, **values: str) -> list[int]:
        ids = list(self._begin)
        text = ""
        for piece in self._pieces:
            if isinstance(piece, int):
                ids += [*self._tokenizer.encode_text(text), piece]
                text = ""
            else:
                text += piece if isinstance(piece, str) else values[piece[0]]
        return ids + self._tokenizer.encode_text(text)


def chat_text(tokenizer: Tokenizer, key: str, *contents: str) -> str:
    """A user's message, and the assistant's if there is a second one, in the tokenizer's chat
    template. Raises ConfigError, also if the template leaves out a field of the messages.
    """
    template = load_chat_template(tokenizer, f"{key}={CHAT}")
    roles = ("user", "assistant")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    try:
        text = template.render(messages, answered=len(contents) > 1)
    except ValueError as error:
        raise ConfigError(
            f"{key}: {str(error).replace('chat template', f'chat template of {tokenizer.source}', 1)}"
        ) from error
    if lost := [
        field for content in contents for field in _FIELD.findall(content) if field not in text
    ]:
        raise ConfigError(
            f"{key}: the chat template of {tokenizer.source} leaves out {', '.join(lost)}"
        )
    return text


UNDECIDED = "undecided"  # part of a pairwise score: the share of comparisons without a verdict
_SHOWN_CHARS = 200


class NoVerdict(Exception):
    """The judge gave no verdict, for a `reason`. `kind`: of the Failure (base/rollout_types.py)."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


class Judge:
    """Scores responses.

    A request to a lost engine goes to another engine, or waits until one is back.
    """

    def __init__(self, role: ServedRole, fleet: Fleet, seed: int = 0):
        """`seed` is the run's.

        A verdict depends on it and on the question alone. Raises ConfigError.
        """
        settings = role.settings
        self._key = f"roles.{role.name}"
        self._settings = settings
        self._fleet = fleet
        self._room = min(
            role.spec.max_position_embeddings,
            settings.kv_cache_tokens or role.spec.max_position_embeddings,
        )
        self._room -= settings.max_tokens
        self._places = asyncio.Semaphore(settings.engines * settings.max_concurrency)
        self._tokenizer, self._template = questions(role)
        self._seed = seed_of(seed, role.name)
        self._sampling = Sampling(
            settings.max_tokens, settings.temperature, stop_token_ids=self._tokenizer.eos_ids
        )

    async def score(self, part: Part, request: ScoreRequest) -> Score:
        """The score of a single response."""
        try:
            return Score(
                await self._ask(
                    prompt=request.prompt, response=request.response, answer=request.answer
                )
            )
        except NoVerdict as error:
            return part.failed(error.kind, str(error), request)

    async def compare(
        self, part: Part, prompt: str, answer: str, responses: Sequence[str]
    ) -> list[Score]:
        """The scores of a prompt's responses: for each, the share of comparisons that it has won.

        Comparisons without a verdict do not count. A response without any verdict has failed.
        """
        games = [
            game
            for pair in pairs(len(responses), self._settings.opponents)
            for game in (pair, pair[::-1])
        ]

        async def play(first: int, second: int) -> float | NoVerdict:
            try:
                return await self._ask(
                    prompt=prompt,
                    answer=answer,
                    response_a=responses[first],
                    response_b=responses[second],
                )
            except NoVerdict as error:
                return error

        results = await asyncio.gather(*(play(*game) for game in games))
        scores = []
        for index, response in enumerate(responses):
            own = [
                (game, result) for game, result in zip(games, results, strict=True) if index in game
            ]
            won = [
                result if game[0] == index else 1 - result
                for game, result in own
                if not isinstance(result, NoVerdict)
            ]
            lost = [result for _, result in own if isinstance(result, NoVerdict)]
            score = (
                Score(fmean(won))
                if won
                else part.failed(lost[0].kind, str(lost[0]), ScoreRequest(response, answer))
            )
            scores.append(Score(score.reward, {UNDECIDED: len(lost) / len(own)}, score.failures))
        return scores

    async def _ask(self, **values: str) -> float:
        """Raises NoVerdict."""
        # in a thread, since the quoted text may be long
        ids = await asyncio.to_thread(self._template.encode, **values)
        if len(ids) >= self._room:
            raise NoVerdict(
                "error",
                f"{self._key}: {len(ids)} tokens to read, where its context has room for "
                f"{self._room}",
            )
        try:
            async with self._places:
                [answer] = await self._fleet.generate(
                    ids, replace(self._sampling, seed=Seeds(self._seed).next(ids)), 1
                )
        except EngineUnreachable:
            raise
        except (EngineError, TimeoutError) as error:
            raise NoVerdict(
                "timeout" if isinstance(error, TimeoutError) else "error", str(error)
            ) from error
        text = self._tokenizer.decode(answer.token_ids)
        if (found := verdict_score(text, self._settings)) is None:
            raise NoVerdict("error", f"{self._key} gave no verdict: …{text[-_SHOWN_CHARS:]!a}")
        return found


def questions(role: ServedRole) -> tuple[Tokenizer, Template]:
    """The judge's tokenizer and its question. Raises ConfigError."""
    settings = role.settings
    key = f"roles.{role.name}"
    assert settings.template is not None  # checked with the settings
    tokenizer = tokenizer_of(settings.path, f"{key}.path", settings.chat_template)
    text = (
        chat_text(tokenizer, f"{key}.template", settings.template)
        if settings.chat
        else settings.template
    )
    fields = ("response_a", "response_b") if settings.mode == PAIRWISE else ("response",)
    return tokenizer, Template(tokenizer, text, ("prompt", "answer", *fields), settings.chat)


def verdict_score(text: str, settings: RoleConfig) -> float | None:
    """The score of the last verdict in the text.

    None without a verdict, or if it is neither a number in range nor a known word.
    """
    found = [match[1] for match in re.finditer(settings.verdict or "", text)]
    if not found or found[-1] is None:
        return None
    if settings.verdict_scores:
        score = settings.verdict_scores.get(found[-1].strip())
        return None if score is None else float(score)
    low, high = settings.verdict_range
    try:
        number = float(found[-1])
    except ValueError:
        return None
    return (number - low) / (high - low) if low <= number <= high else None
