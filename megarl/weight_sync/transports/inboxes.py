"""Memory of a worker's host into which trainer ranks write what has changed (Mooncake)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megarl.reshard.deltas import HEADER_BYTES, INBOX_SHARE
from megarl.reshard.map import ReshardMap
from megarl.weight_sync.transports.base import Incoming

SMALL_BYTES = 64  # and so much for each copy, whose delta may be little more than its numbers


def inboxes(map: ReshardMap | None, rank: int, trainers: Collection[int]) -> dict[str, Any]:
    """The fields of an Offer that say what may come as changes, and into inboxes of which size; none without `map`."""
    copies = [copy for copy in map.writes_to(rank) if copy.source_rank in trainers] if map is not None else []
    sizes: dict[int, int] = {}
    for copy in copies:
        sizes[copy.source_rank] = sizes.get(copy.source_rank, HEADER_BYTES) + SMALL_BYTES + int(copy.bytes * INBOX_SHARE)
    incoming = [Incoming(copy.source_rank, copy.destination_tensor, copy.destination_box, 0) for copy in copies]
    return {"incoming": incoming, "inboxes": list(sizes.items())}
