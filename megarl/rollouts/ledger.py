"""What has become of every prompt of a run: trained on, finished and held for training, or neither.

The ledger lies in each checkpoint, beside the weights that it belongs to. Prompts it does not know are generated (again)
after a resume, so nothing else needs to be remembered for each prompt to be trained on exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from megarl.messaging.messages import GroupReady
from megarl.types import Ordinal

LEDGER_FILE = "ledger.msgpack"


class Ledger(msgspec.Struct, frozen=True):
    consumed_below: Ordinal = 0  # all prompts below it are trained on
    consumed_beyond: list[Ordinal] = []  # and these
    groups: list[GroupReady] = []  # finished, not yet trained on

    def consumed(self) -> Iterator[Ordinal]:
        """All prompts that were trained on."""
        yield from range(self.consumed_below)
        yield from self.consumed_beyond

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def load(cls, checkpoint: Path | str) -> Ledger:
        """Of a checkpoint folder. Raises RuntimeError where there is none, or where it is not one."""
        path = Path(checkpoint) / LEDGER_FILE
        try:
            return msgspec.msgpack.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise RuntimeError(f"{path}: no ledger of a run: {error}") from error


class Consumed:
    """The set of ordinals that were trained on, kept small: they come nearly in order."""

    def __init__(self, below: Ordinal = 0, beyond: Sequence[Ordinal] = ()):
        self.below = below
        self.beyond = set(beyond)

    def __contains__(self, ordinal: Ordinal) -> bool:
        return ordinal < self.below or ordinal in self.beyond

    def add(self, ordinal: Ordinal) -> None:
        self.beyond.add(ordinal)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1
