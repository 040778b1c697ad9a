"""Stop strings: where a response ends that has said one."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopStrings:
    """SGLang ends a request at a stop string, which saves the tokens after it. But it looks at the last few tokens of the request only
    (0.5.21, schedule_batch.py: one more than the string has by itself). It misses a string that was sampled in more and shorter tokens, and
    one whose first part an earlier request has sampled. So the end of a response is decided here.

    The string is part of the response, in its tokens and its text, since the policy sampled it.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]):
        """`decode` gives the text of tokens, special ones included."""
        self._strings, self._decode = strings, decode

    def end(self, token_ids: Sequence[int]) -> int | None:
        """How many tokens it takes until the first stop string is said; None if none is."""
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
