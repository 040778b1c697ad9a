"""Records the state of every prompt of a run: trained on, dropped, rested, finished and held for training, or none of these.

Each checkpoint holds the ledger beside the weights that it belongs to. After a resume, prompts that are not in it are generated (again),
so nothing else has to be saved for each prompt to be trained on, dropped, or left out by the curriculum, exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from megarl.messaging.messages import GroupReady
from megarl.types import Ordinal

LEDGER_FILE = "ledger.msgpack"


class Ledger(msgspec.Struct, frozen=True):
    consumed_below: Ordinal = 0  # all prompts below it have been trained on or dropped, or have rested
    consumed_beyond: list[Ordinal] = []  # and so have these
    groups: list[GroupReady] = []  # finished, but not yet trained on
    dropped: list[Ordinal] = []  # all those of the run
    untold: list[GroupReady] = []  # of these, the ones that no batch has reported yet
    rested: list[Ordinal] = []  # all those of the run that the curriculum has left out
    outside: list[Ordinal] = []  # all those of the run whose pass rate was outside the curriculum's band
    rejected: list[Ordinal] = []  # finished, found too old, and not yet trained on or dropped
    rested_untold: int = 0  # so many of those that have rested no batch has reported yet

    def trained(self) -> set[Ordinal]:
        """All prompts that have been trained on."""
        return {*range(self.consumed_below), *self.consumed_beyond}.difference(self.dropped, self.rested)

    def told(self) -> set[Ordinal]:
        """The dropped prompts that batches have reported."""
        return set(self.dropped).difference(group.ordinal for group in self.untold)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def load(cls, checkpoint: Path | str) -> Ledger:
        """Loads the ledger of a checkpoint folder. Raises RuntimeError if it is missing or cannot be read."""
        path = Path(checkpoint) / LEDGER_FILE
        try:
            return msgspec.msgpack.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise RuntimeError(f"{path}: no ledger of a run: {error}") from error


class Consumed:
    """The set of ordinals that have been trained on or dropped, or have rested. It stays small, since they come nearly in order."""

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
