"""Scores by a judge on engines: a model that reads responses and writes a verdict.

Its input quotes hostile text, and its output depends on that. So only the last verdict in its
answer counts, numbers out of range and unknown words are failures, and lengths are limited.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from msgspec.structs import replace

from megarl.config.errors import ConfigError
from megarl.data.chat import load_chat_template
from megarl.data.tokenizer import Tokenizer, tokenizer_of
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import EngineError, Sampling
from megarl.generator.fleet import Fleet
from megarl.generator.seeds import Seeds, seed_of
from megarl.rewards.score import RewardPart, Score, ScoreRequest
from megarl.roles.plan import ServedRole, pairs
from megarl.roles.settings import CHAT, PAIRWISE, RoleConfig

_FIELD = re.compile(r"\{[a-z_]+\}")


class Template:
    """The input of a model that reads other models' text: a text with fields such as {response}.
    `encode` fills them in and tokenises the result.

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
        borders = [*(f"{{{field}}}" for field in fields), *marks]
        # ids of special tokens, texts, and names of fields
        self._pieces: list[int | str | tuple[str]] = []
        end = 0
        for match in re.finditer("|".join(map(re.escape, borders)), text):
            self._pieces.append(text[end : match.start()])
            if match[0] in special:
                self._pieces.append(special[match[0]])
            else:
                self._pieces.append((match[0][1:-1],))
            end = match.end()
        self._pieces.append(text[end:])
        has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        self._begin = [] if has_bos or rendered else tokenizer.encode_prompt("")

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
        name = f"chat template of {tokenizer.source}"
        problem = str(error).replace("chat template", name, 1)
        raise ConfigError(f"{key}: {problem}") from error
    missing_fields = [field for field in _FIELD.findall(" ".join(contents)) if field not in text]
    if missing_fields:
        raise ConfigError(
            f"{key}: the chat template of {tokenizer.source} leaves out {', '.join(missing_fields)}"
        )
    return text


UNDECIDED = "undecided"  # part of a pairwise score: the share of comparisons without a verdict
_SHOWN_CHARS = 200


class NoVerdict(Exception):
    """The judge gave no verdict, for a `reason`. `kind`: of the Failure (base/rollout_types.py)."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


# (first, second) -> how much of a win it is for the first, in this order
Games = Mapping[tuple[int, int], float | NoVerdict]


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

    async def score(self, part: RewardPart, request: ScoreRequest) -> Score:
        """The score of a single response."""
        try:
            score = await self._ask(
                prompt=request.prompt, response=request.response, answer=request.answer
            )
            return Score(score)
        except NoVerdict as error:
            return part.failed(error.kind, str(error), request)

    async def compare(
        self, part: RewardPart, prompt: str, answer: str, responses: Sequence[str]
    ) -> list[Score]:
        """The scores of a prompt's responses: for each, the share of comparisons that it has won.

        Comparisons without a verdict do not count. A response without any verdict has failed.
        """
        return win_shares(part, answer, responses, await self.play(prompt, answer, responses))

    async def play(self, prompt: str, answer: str, responses: Sequence[str]) -> Games:
        """Compares responses, each pair in both orders."""
        games: list[tuple[int, int]] = []
        for first, second in pairs(len(responses), self._settings.opponents):
            games += [(first, second), (second, first)]

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
        return dict(zip(games, results, strict=True))

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
                sampling = replace(self._sampling, seed=Seeds(self._seed).next(ids))
                [answer] = await self._fleet.generate(ids, sampling, 1)
        except EngineUnreachable:
            raise
        except (EngineError, TimeoutError) as error:
            kind = "timeout" if isinstance(error, TimeoutError) else "error"
            raise NoVerdict(kind, str(error)) from error
        text = self._tokenizer.decode(answer.token_ids)
        score = verdict_score(text, self._settings)
        if score is None:
            raise NoVerdict("error", f"{self._key} gave no verdict: …{text[-_SHOWN_CHARS:]!a}")
        return score


def comparisons_of(games: Games) -> list[tuple[int, int, float]]:
    """The mean of both orders of each pair of responses, without those that lack a verdict."""
    comparisons = []
    for (first, second), result in games.items():
        if first > second:
            continue
        reverse = games[second, first]
        if not isinstance(result, NoVerdict) and not isinstance(reverse, NoVerdict):
            comparisons.append((first, second, (result + 1 - reverse) / 2))
    return comparisons


def win_shares(
    part: RewardPart,
    answer: str,
    responses: Sequence[str],
    games: Games,
) -> list[Score]:
    """The scores of `Judge.compare`, from the results of `Judge.play`."""
    wins: list[list[float]] = [[] for _ in responses]
    errors: list[list[NoVerdict]] = [[] for _ in responses]
    for (first, second), result in games.items():
        if isinstance(result, NoVerdict):
            errors[first].append(result)
            errors[second].append(result)
        else:
            wins[first].append(result)
            wins[second].append(1 - result)
    scores = []
    for index, response in enumerate(responses):
        if wins[index]:
            score = Score(fmean(wins[index]))
        else:
            error = errors[index][0]
            score = part.failed(error.kind, str(error), ScoreRequest(response, answer))
        undecided = len(errors[index]) / (len(errors[index]) + len(wins[index]))
        scores.append(Score(score.reward, {UNDECIDED: undecided}, score.failures))
    return scores


def questions(role: ServedRole) -> tuple[Tokenizer, Template]:
    """The judge's tokenizer and its question. Raises ConfigError."""
    settings = role.settings
    key = f"roles.{role.name}"
    assert settings.template is not None  # checked with the settings
    tokenizer = tokenizer_of(settings.path, f"{key}.path", settings.chat_template)
    text = settings.template
    if settings.chat:
        text = chat_text(tokenizer, f"{key}.template", text)
    fields = ("response_a", "response_b") if settings.mode == PAIRWISE else ("response",)
    return tokenizer, Template(tokenizer, text, ("prompt", "answer", *fields), settings.chat)


def verdict_score(text: str, settings: RoleConfig) -> float | None:
    """The score of the last verdict in the text.

    None without a verdict, or if it is neither a number in range nor a known word.
    """
    verdict: str | None = None
    for match in re.finditer(settings.verdict or "", text):
        verdict = match[1]
    if verdict is None:
        return None
    if settings.verdict_scores:
        score = settings.verdict_scores.get(verdict.strip())
        return None if score is None else float(score)
    low, high = settings.verdict_range
    try:
        number = float(verdict)
    except ValueError:
        return None
    return (number - low) / (high - low) if low <= number <= high else None
