"""The log-probs of teachers on engines for a response, and their packed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TeacherScores:
    """The log-probs of one teacher on engines for the T tokens of a response.

    `TeacherFormat` packs them into bytes that travel with the rollout.
    """

    # [T, k] int32, the likeliest tokens at each place; [T, 0] if only the tokens' own log-probs are
    # needed
    ids: np.ndarray
    # [T, k] float32 of these, or [T, 1] of the tokens themselves; NaN where the teacher gave none
    logprobs: np.ndarray


@dataclass(frozen=True)
class TeacherFormat:
    """The byte layout: for each token, and for each teacher in turn, its ids (int32) and then its
    log-probs (float32).
    """

    teachers: int
    top_k: int  # 0: the log-probs of the tokens themselves

    @property
    def token_bytes(self) -> int:
        return 4 * self.teachers * self._width

    @property
    def _width(self) -> int:
        return 2 * self.top_k or 1

    def pack(self, scores: Sequence[TeacherScores | None], tokens: int) -> bytes:
        """Packs the `scores` of each teacher for `tokens` tokens.

        None stands for a teacher that failed.
        """
        missing_scores = TeacherScores(
            ids=np.zeros((tokens, self.top_k), np.int32),
            logprobs=np.full((tokens, self.top_k or 1), np.nan, np.float32),
        )
        parts: list[np.ndarray] = []
        for teacher_scores in scores:
            teacher_scores = teacher_scores or missing_scores
            parts += [teacher_scores.ids.view(np.float32), teacher_scores.logprobs]
        return np.ascontiguousarray(np.concatenate(parts, axis=1), np.float32).tobytes()

    def unpack(self, packed: bytes, tokens: int) -> list[TeacherScores]:
        """The scores of each teacher.

        Raises: ValueError if `packed` has another number of tokens.
        """
        numbers = np.frombuffer(packed, np.float32).reshape(tokens, self.teachers, self._width)
        scores = []
        for teacher_numbers in numbers.swapaxes(0, 1):
            ids = np.ascontiguousarray(teacher_numbers[:, : self.top_k]).view(np.int32)
            scores.append(TeacherScores(ids, teacher_numbers[:, self.top_k :]))
        return scores
