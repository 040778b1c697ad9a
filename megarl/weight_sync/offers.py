"""Offers of weight versions by the trainer ranks."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.messaging.link import Hub
from megarl.messaging.messages import WeightsOffer
from megarl.types import Version


class Offers:
    """Collects the offers of the ranks `trainers`. Once one rank has offered a version, the others must follow within `timeout_s`."""

    def __init__(self, link: Hub, trainers: Sequence[str], timeout_s: float):
        self._link, self._trainers, self._timeout_s = link, trainers, timeout_s
        self._open: dict[Version, set[str]] = {}  # by whom

    async def next(self, serving: Version, again: bool = False) -> Version:
        """Waits for the next version that every rank has offered. With `again` that can only be `serving`, for engines that have come back.

        The first offer has no deadline here: whoever needs the weights has one. Raises TimeoutError that names the ranks still missing.
        """
        while True:
            for version, ranks in self._open.items():
                if len(ranks) == len(self._trainers) and (not again or version == serving):
                    del self._open[version]
                    return version
            missing = ", ".join(name for name in self._trainers if name not in set().union(*self._open.values()))
            timeout_s = self._timeout_s if self._open and missing else None
            sender, offer = await self._link.arrival(WeightsOffer, timeout_s, f"weights newer than version {serving} from {missing}")
            self._open.setdefault(offer.version, set()).add(sender)
