"""How far the two sides of a run may be apart."""

from __future__ import annotations

from megarl.config.schema import AsyncConfig


def run_ahead(config: AsyncConfig) -> int | None:
    """How many steps the generator may be ahead of the trainer; None: no limit.

    It is the capacity, or `max_staleness` if that is less: a prompt begun further ahead would be too old when its turn comes.
    """
    return min([bound for bound in (config.capacity, config.max_staleness) if bound is not None], default=None)
