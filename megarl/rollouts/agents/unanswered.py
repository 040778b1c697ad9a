"""Prompts of which an episode has sampled nothing. They are dropped; many of them end the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megarl.config.errors import RunError
from megarl.rollouts.agents.tree import Played

_RECENT = 100  # prompts


class Unanswered:
    """`most`: the share of the last 100 prompts that may be unanswered."""

    def __init__(self, name: str, most: float):
        self._name, self._most = name, most
        self._recent = deque[bool](maxlen=_RECENT)
        self.why = ""  # the last one was

    def count(self, played: Sequence[Played]) -> None:
        """Counts a prompt. Raises RunError if too many are unanswered."""
        self._recent.append(not all(tree.turns for tree, _, _ in played))
        if sum(self._recent) > self._most * _RECENT:
            share = f"{sum(self._recent)} of the last {len(self._recent)} prompts"
            limit = f"more than rollout.args.max_unanswered={self._most:g} of {_RECENT}"
            raise RunError(f"{self._name} sampled nothing from the policy for {share}, {limit}; for example {self.why}")
