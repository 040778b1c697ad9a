"""The share of drafted tokens that the engines accept."""

from __future__ import annotations

from dataclasses import dataclass

ACCEPTED = "speculative/accept_rate"
FALLEN = 0.8  # below this share of the first acceptance, the draft model counts as stale


@dataclass
class Acceptance:
    """Follows the acceptance over a run. `stale`: the description of a draft model that is never trained; otherwise empty."""

    stale: str = ""
    first: float = 0.0
    told: bool = False

    def metrics(self, version: int, drafted: int, accepted: int, verified: int) -> dict[str, float]:
        """Metrics since the last version, from the numbers of drafted tokens, accepted ones, and verifying passes."""
        if not verified:
            return {}
        rate = accepted / max(1, drafted)
        self.first = self.first or rate
        found = {ACCEPTED: rate, "speculative/accept_length": 1 + accepted / verified}
        return found | ({"speculative/untrained_versions": version} if self.stale else {})

    def warning(self, version: int, rate: float | None) -> str:
        """A warning for the terminal, given once; otherwise empty."""
        if self.told or not self.stale or rate is None or rate >= FALLEN * self.first:
            return ""
        self.told = True
        return (
            f"weights version {version}: engines keep {rate:.0%} of what is drafted, at first {self.first:.0%}: {self.stale} "
            "stays as it was, and the policy has moved on. Log-probs are not affected; rollouts take longer"
        )
