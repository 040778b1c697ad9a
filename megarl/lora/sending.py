"""Updates of adapters alone, at the trainer rank: the frozen weights are written once to each set of engines, in full.

From then on the rank offers every version as what has changed since the last one, like a delta (`deltas`): the generator grants that if its
engines hold the version before, in memory that need not be opened anew. The audit covers all that an engine computes with, the frozen
weights too: their hashes must be those of what was sent to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.base.rollout_types import Version
from megarl.kernels.audit import MASK
from megarl.lora.layout import is_adapter
from megarl.messaging.messages import WeightsOffer
from megarl.reshard.map import Copy
from megarl.weight_sync.writing import Sent


class AdaptersAlone:
    """`begin` for each set of engines; then a full update, whose parts are `note`d; after that `copies` alone are sent."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []  # of adapters, in sending order
        self.begun = False
        self._bytes = self._full_bytes = 0
        self._base: dict[int, dict[str, int]] = {}  # shares of the frozen weights, as of `Sent`

    def begin(self, copies: Sequence[Copy]) -> None:
        self.begun = True
        self.copies = [copy for copy in copies if is_adapter(copy.destination_tensor)]
        self._bytes, self._full_bytes = (sum(copy.bytes for copy in some) for some in (self.copies, copies))
        self._base = {}

    def note(self, parts: Sequence[Sent]) -> None:
        """Of a full update. A tensor's boxes may be in both parts, those that land and all others."""
        self._base = {}
        for rank, shares in ((rank, shares) for sent in parts for rank, shares in sent.shares.items()):
            base = self._base.setdefault(rank, {})
            base |= {name: (base.get(name, 0) + share) & MASK for name, share in shares.items() if not is_adapter(name)}

    def with_base(self, sent: Sent) -> Sent:
        """What the engines should hold after an update of `copies`."""
        ranks = self._base.keys() | sent.shares.keys()
        return Sent(sent.bytes, {rank: self._base.get(rank, {}) | sent.shares.get(rank, {}) for rank in ranks})

    def offer(self, version: Version) -> WeightsOffer:
        if not self.begun:
            return WeightsOffer(version)
        return WeightsOffer(version, version - 1, self._bytes, self._bytes, self._full_bytes)
