"""Offers of weight versions by the trainer ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.messaging.link import Hub
from megarl.messaging.messages import WeightsOffer
from megarl.types import Version


@dataclass(frozen=True)
class Offered:
    """A version that every rank has offered."""

    version: Version
    offers: list[WeightsOffer]


class Offers:
    """Collects the offers of the ranks `trainers`. Once one rank has offered a version, the others must follow within `timeout_s`."""

    def __init__(self, link: Hub, trainers: Sequence[str], timeout_s: float):
        self._link, self._trainers, self._timeout_s = link, trainers, timeout_s
        self._open: dict[Version, dict[str, WeightsOffer]] = {}  # by whom
        self._pending: Counter[str] = Counter()  # how many of them are each rank's

    async def next(self, serving: Version, again: bool = False) -> Offered:
        """Waits for the next version that every rank has offered. With `again` that can only be `serving`, for engines that have come back.

        The first offer has no deadline here: whoever needs the weights has one. Raises TimeoutError that names the ranks still missing.
        """

        def awaited() -> str:
            return f"weights newer than version {serving} from {', '.join(self._missing())}"

        while True:
            for version, offers in self._open.items():
                if len(offers) == len(self._trainers) and (not again or version == serving):
                    del self._open[version]
                    self._pending -= Counter(offers.keys())
                    return Offered(version, list(offers.values()))
            timeout_s = self._timeout_s if self._open and len(self._pending) < len(self._trainers) else None
            for sender, offer in await self._link.arrivals(WeightsOffer, timeout_s, awaited):
                of_version = self._open.setdefault(offer.version, {})
                self._pending[sender] += sender not in of_version
                of_version[sender] = offer

    def _missing(self) -> list[str]:
        return [name for name in self._trainers if name not in self._pending]
