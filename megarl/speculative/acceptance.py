"""How many drafted tokens the engines keep."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.errors import RunError

ACCEPTED = "speculative/accept_rate"
FALLEN = 0.8  # of the first acceptance: what drafts has grown stale


@dataclass
class Acceptance:
    """Follows the acceptance over a run. `stale`: what drafts, if nobody trains it; otherwise empty."""

    stale: str = ""
    first: float = 0.0
    told: bool = False

    def metrics(self, version: int, drafted: int, accepted: int, verified: int) -> dict[str, float]:
        """Of the tokens since the version before: `drafted` ones, those of them that were kept, and in how many passes. Raises RunError if
        more were kept than drafted."""
        if accepted > drafted:
            raise RunError(f"weights version {version}: engines say that they kept {accepted} of {drafted} drafted tokens")
        if not verified:
            return {}
        rate = accepted / max(1, drafted)
        self.first = self.first or rate
        found = {ACCEPTED: rate, "speculative/accept_length": 1 + accepted / verified}
        return found | ({"speculative/untrained_versions": version} if self.stale else {})

    def warning(self, version: int, rate: float | None) -> str:
        """A line for the terminal, once."""
        if self.told or not self.stale or rate is None or rate >= FALLEN * self.first:
            return ""
        self.told = True
        return (
            f"weights version {version}: engines keep {rate:.0%} of what is drafted, at first {self.first:.0%}: {self.stale} "
            "stays as it was, and the policy has moved on. Log-probs are not affected; rollouts take longer"
        )
