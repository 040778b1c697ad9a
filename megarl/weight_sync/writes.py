"""The trainer ranks' reports of what they have written, collected at the generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.messaging.link import Hub
from megarl.messaging.messages import WeightsWritten
from megarl.types import Version


class Writes:
    """Collects the WeightsWritten messages of one version. A rank sends one for each part; the last has no `more`.

    `parts` lists (rank's name, message)."""

    def __init__(self, link: Hub, trainers: Sequence[str], version: Version, timeout_s: float):
        self._link, self._trainers, self._timeout_s = link, trainers, timeout_s
        self._version = version
        self.parts: list[tuple[str, WeightsWritten]] = []

    async def landed(self) -> None:
        """Returns when each rank has written its first part, so that all landing boxes are there. Raises as `done` does."""
        await self._until(lambda: {name for name, _ in self.parts})

    async def done(self) -> None:
        """Returns when all is written. Raises RuntimeError where a rank failed or wrote another version, TimeoutError where it is late."""
        await self._until(self._finished)

    def _finished(self) -> set[str]:
        return {name for name, message in self.parts if not message.more}

    async def _until(self, heard_of: Callable[[], set[str]]) -> None:
        while missing := [name for name in self._trainers if name not in heard_of()]:
            awaited = f"{', '.join(missing)} to write weights version {self._version}"
            sender, message = await self._link.arrival(WeightsWritten, self._timeout_s, awaited)
            expected = sender in self._trainers and sender not in self._finished()
            if not expected or message.version != self._version:
                raise RuntimeError(f"{self._link.name} waited for {awaited}, but {sender} has written version {message.version}")
            if message.error:
                raise RuntimeError(f"{sender} could not write weights version {self._version}: {message.error}")
            self.parts.append((sender, message))
