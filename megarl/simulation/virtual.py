"""The clock and the transport of a simulated run: an event loop in virtual time, and a link within
one process.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from megarl.messaging.waiting import Pulse


class Deadlock(RuntimeError):
    """A deadlock: all coroutines wait, and no event is left."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when nothing else is left to do.

    Coroutines that wait by `asyncio.sleep`, timeouts, events and futures run as in real time, but
    without waiting. The loop waits for no file, thread or process. `run_until_complete` raises
    Deadlock when no timer is left either.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        self._now_s += float(seconds)


class _Jump(selectors.SelectSelector):
    """Lets the loop jump by a time instead of waiting for it."""

    def __init__(self, loop: VirtualLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("everything waits, and nothing is left that could happen")
        self._loop.jump(max(0.0, timeout))
        return []


class Wire:
    """Both ends of the link between generator and trainer. Messages arrive at once."""

    def __init__(self) -> None:
        self.generator = GeneratorEnd()
        self.trainer = TrainerEnd()
        self.generator.peer = self.trainer
        self.trainer.peer = self.generator


class _End:
    def __init__(self) -> None:
        self._inbox: Mapping[type[Any], deque[Any]] = defaultdict(deque)
        self.arrived = Pulse()
        self.count = 0  # of messages that have arrived

    def put(self, message: Any) -> None:
        self._inbox[type(message)].append(message)
        self.count += 1
        self.arrived.beat()

    def take(self, kind: type[Any]) -> list[Any]:
        messages = list(self._inbox[kind])
        self._inbox[kind].clear()
        return messages


class GeneratorEnd(_End):
    """Does for `RolloutsSender` what `Hub` does in a run."""

    peer: TrainerEnd

    def send(self, peer: str, message: Any) -> None:
        self.peer.put(message)

    async def arrival(
        self, kind: type[Any], timeout_s: float | None, awaited: str
    ) -> tuple[str, Any]:
        """Raises TimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.arrived.until(lambda: bool(self._inbox[kind]))
        except TimeoutError:
            raise TimeoutError(f"generator.0 waited {timeout_s:.0f} s for {awaited}") from None
        return "trainer.0", self._inbox[kind].popleft()


class TrainerEnd(_End):
    """Does for `Intake` what `Peer` does in a run."""

    peer: GeneratorEnd

    def send(self, message: Any) -> None:
        self.peer.put(message)

    def drain(self, kind: type[Any]) -> list[Any]:
        return self.take(kind)
