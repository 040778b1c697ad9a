"""What teachers on engines say of a response, packed into bytes that travel with a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TeacherScores:
    """By one teacher, of T tokens."""

    ids: np.ndarray  # [T, k] int32, the likeliest tokens at each place; [T, 0] if it was asked for the tokens' own log-probs alone
    logprobs: np.ndarray  # [T, k] float32 of these, or [T, 1] of the tokens themselves; NaN where it has said nothing


@dataclass(frozen=True)
class TeacherFormat:
    """The bytes of a token are, of each teacher in turn, its ids (int32) and then its log-probs (float32)."""

    teachers: int
    top_k: int  # 0: the log-probs of the tokens themselves

    @property
    def token_bytes(self) -> int:
        return 4 * self.teachers * self._width

    @property
    def _width(self) -> int:
        return 2 * self.top_k or 1

    def pack(self, told: Sequence[TeacherScores | None], tokens: int) -> bytes:
        """`told` by each teacher, of `tokens` tokens; None if it failed."""
        nothing = TeacherScores(np.zeros((tokens, self.top_k), np.int32), np.full((tokens, self.top_k or 1), np.nan, np.float32))
        parts = [part for one in told for part in ((one or nothing).ids.view(np.float32), (one or nothing).logprobs)]
        return np.ascontiguousarray(np.concatenate(parts, axis=1), np.float32).tobytes()

    def unpack(self, packed: bytes, tokens: int) -> list[TeacherScores]:
        """Raises: ValueError if `packed` is not of so many tokens."""
        numbers = np.frombuffer(packed, np.float32).reshape(tokens, self.teachers, self._width)
        return [
            TeacherScores(np.ascontiguousarray(one[:, : self.top_k]).view(np.int32), one[:, self.top_k :]) for one in numbers.swapaxes(0, 1)
        ]
