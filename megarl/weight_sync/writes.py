"""The trainer ranks' reports of what they have written, collected at the generator."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.messaging.link import Hub
from megarl.messaging.messages import WeightsWritten
from megarl.types import Version


class Writes:
    """Collects the WeightsWritten messages of one version. A rank sends one for each part; the last has no `more`.

    `parts` lists (rank's name, message)."""

    def __init__(self, link: Hub, trainers: Sequence[str], version: Version, timeout_s: float):
        self._link, self._trainers, self._timeout_s = link, trainers, timeout_s
        self._version = version
        self._unheard, self._unfinished = set(trainers), set(trainers)  # ranks of which nothing has come, or not yet everything
        self.parts: list[tuple[str, WeightsWritten]] = []

    async def landed(self) -> None:
        """Returns when each rank has written its first part, so that all landing boxes are there. Raises as `done` does."""
        await self._until_none_of(self._unheard)

    async def done(self) -> None:
        """Returns when all is written. Raises RuntimeError where a rank failed or wrote another version, TimeoutError where it is late."""
        await self._until_none_of(self._unfinished)

    async def _until_none_of(self, missing: set[str]) -> None:
        def awaited() -> str:
            return f"{', '.join(name for name in self._trainers if name in missing)} to write weights version {self._version}"

        while missing:
            for sender, message in await self._link.arrivals(WeightsWritten, self._timeout_s, awaited):
                if sender not in self._unfinished or message.version != self._version:
                    raise RuntimeError(f"{self._link.name} waited for {awaited()}, but {sender} has written version {message.version}")
                if message.error:
                    raise RuntimeError(f"{sender} could not write weights version {self._version}: {message.error}")
                self._unheard.discard(sender)
                if not message.more:
                    self._unfinished.discard(sender)
                self.parts.append((sender, message))
