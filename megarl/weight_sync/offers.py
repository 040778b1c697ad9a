"""Offers of weight versions by the trainer ranks."""

from __future__ import annotations

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

    async def next(self, serving: Version, again: bool = False) -> Offered:
        """Waits for the next version that every rank has offered. With `again` that can only be `serving`, for engines that have come back.

        The first offer has no deadline here: whoever needs the weights has one. Raises TimeoutError that names the ranks still missing.
        """
        while True:
            for version, offers in self._open.items():
                if len(offers) == len(self._trainers) and (not again or version == serving):
                    del self._open[version]
                    return Offered(version, list(offers.values()))
            missing = ", ".join(name for name in self._trainers if name not in {rank for offers in self._open.values() for rank in offers})
            timeout_s = self._timeout_s if self._open and missing else None
            sender, offer = await self._link.arrival(WeightsOffer, timeout_s, f"weights newer than version {serving} from {missing}")
            self._open.setdefault(offer.version, {})[sender] = offer
