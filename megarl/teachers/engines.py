"""Teachers on engines: their log-probs for the responses to a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from megarl.base.rollout_types import Failure, Prompt, Sample
from megarl.base.teacher_scores import TeacherFormat, TeacherScores
from megarl.config.errors import ConfigError
from megarl.data.tokenizer import Tokenizer, tokenizer_of
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import EngineError
from megarl.generator.fleet import Fleet
from megarl.rewards.score import ROLE, excerpt
from megarl.roles.plan import ServedRole


class ServedTeacher:
    """One teacher.

    A request to a lost engine goes to another engine, or waits until one is back.
    """

    def __init__(self, role: ServedRole, fleet: Fleet, top_k: int):
        settings = role.settings
        self._name = role.name
        self._fleet = fleet
        self._top_k = top_k
        self._room = min(
            role.spec.max_position_embeddings,
            settings.kv_cache_tokens or role.spec.max_position_embeddings,
        )
        self._places = asyncio.Semaphore(settings.engines * settings.max_concurrency)

    async def judge(self, prompt: Prompt, sample: Sample) -> TeacherScores | Failure:
        length = len(prompt.token_ids) + len(sample.token_ids)
        if length >= self._room:
            return self._failed("error", f"{length} tokens, for a context of {self._room}", sample)
        try:
            async with self._places:
                return await self._fleet.ask(
                    lambda engine: engine.judge(
                        prompt.token_ids, sample.token_ids.tolist(), self._top_k
                    )
                )
        except EngineUnreachable:
            raise
        except (EngineError, TimeoutError) as error:
            return self._failed(
                "timeout" if isinstance(error, TimeoutError) else "error", str(error), sample
            )

    def _failed(self, kind: str, reason: str, sample: Sample) -> Failure:
        return Failure(
            kind, f"{ROLE}{self._name}: {reason}", excerpt(sample.text), f"{ROLE}{self._name}"
        )


class ServedTeachers:
    """Sends each finished response once to each teacher.

    If a teacher fails, the sample is left out of its distillation and records the failure.
    """

    def __init__(self, teachers: Sequence[ServedTeacher], form: TeacherFormat):
        self._teachers = teachers
        self._form = form

    async def judged(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Sample]:
        return list(await asyncio.gather(*(self._judged(prompt, sample) for sample in samples)))

    async def _judged(self, prompt: Prompt, sample: Sample) -> Sample:
        answers = await asyncio.gather(
            *(teacher.judge(prompt, sample) for teacher in self._teachers)
        )
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        packed = self._form.pack(
            [None if isinstance(answer, Failure) else answer for answer in answers],
            len(sample.token_ids),
        )
        return replace(sample, teachers=packed, failures=sample.failures + failures)


def check_tokens(key: str, path: str, policy: Tokenizer) -> None:
    """Raises ConfigError if a teacher's tokens are not the policy's."""
    if not policy.same_ids(tokenizer_of(path, key)):
        must = f"its tokens must be those of the policy's tokenizer {policy.source}"
        raise ConfigError(f"{key}={path}: {must}: it judges token by token")
