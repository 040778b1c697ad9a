"""The reward of the part `loop`.

A random model gets 0.5, and can learn it within a few steps: no text is needed.
"""

from __future__ import annotations

from collections.abc import Sequence


def even_ids(token_ids: Sequence[int]) -> float:
    """The share of a response's token ids that are even."""
    even = sum(token_id % 2 == 0 for token_id in token_ids)
    return even / max(1, len(token_ids))
