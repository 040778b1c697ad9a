"""Decides where a response ends that contains a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_STRINGS = 32  # of a request; SGLang takes no more
Decode = Callable[[Sequence[int]], str]
"""The text of tokens, including special ones."""


class StopStrings:
    """SGLang ends a request at a stop string, which saves sampling the tokens after it. But it checks only the request's last few tokens
    (0.5.23, schedule_batch.py: one more than the string itself has). It misses a string that was sampled in more, shorter tokens, and one
    whose first part was sampled by an earlier request. So the end of a response is decided here.

    The string belongs to the response, its tokens and its text, since the policy sampled it.
    """

    def __init__(self, strings: Sequence[str], decode: Decode):
        self._strings, self._decode = strings, decode

    def end(self, token_ids: Sequence[int]) -> int | None:
        """The number of tokens up to the end of the first stop string; None if there is none."""
        if not self._said(token_ids):
            return None
        least, most = 1, len(token_ids)
        while least < most:
            middle = (least + most) // 2
            least, most = (least, middle) if self._said(token_ids[:middle]) else (middle + 1, most)
        return least

    def _said(self, token_ids: Sequence[int]) -> bool:
        text = self._decode(token_ids)
        return any(string in text for string in self._strings)


def cut(text: str, strings: Sequence[str]) -> tuple[str, str | None]:
    """The text in front of its first stop string, and that string: the one that ends first, of several that end there the longest."""
    found = [(at + len(string), -len(string), string) for string in strings if (at := text.find(string)) >= 0]
    if not found:
        return text, None
    end, _, string = min(found)
    return text[: end - len(string)], string
