"""Exchanges the amax of tiles that several trainer ranks hold parts of, before an update is quantised: over gloo, in a group of its own.

Messages are point to point, between ranks that share a tile: one per pair and direction. It holds the amax of all tiles of the parts
they share, in forward order. Both ends derive its content from the map, so it carries no names.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.messaging.members import members_only
from megarl.reshard.amax import AmaxPart, amax_parts, peers
from megarl.reshard.execute import AmaxTable, Entry
from megarl.reshard.map import ReshardMap


class AmaxExchange:
    """Construct it on every trainer rank: where the map cuts a tile, that is collective over the default process group, unless the exchange
    for the map `before` has a group already. (A group that is not used any more keeps its connections all the same.)"""

    def __init__(self, map: ReshardMap, rank: int, timeout_s: float, before: AmaxExchange | None = None):
        self._rank, self._timeout_s = rank, timeout_s
        self._parts = amax_parts(map, rank)
        self._awaited = {peer: _shared(amax_parts(map, peer), rank) for peer in peers(self._parts)}
        cuts = any(row.cut for row in map.rows)
        together = cuts and map.source.world_size > 1
        self._group: dist.ProcessGroup | None = before._group if before else None
        if together and self._group is None:
            with members_only():
                group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="amax")
            assert isinstance(group, dist.ProcessGroup)  # all ranks are members
            self._group = group

    def table(self, tensors: Mapping[str, torch.Tensor]) -> AmaxTable:
        """The amax of every cut tile that this rank's copies touch, computed from the current values of `tensors`.

        Raises RuntimeError on NaN or infinity, naming the tensor, and TimeoutError naming the two ranks where one does not answer.
        """
        table = AmaxTable.measure(self._parts, tensors)
        measured = [(part.peers, amax) for part, (_, _, amax) in zip(self._parts, table.entries)]
        incoming, outgoing, received = [], [], {}
        for peer, awaited in self._awaited.items():
            message = torch.cat([amax.reshape(-1) for having, amax in measured if peer in having]).cpu()
            received[peer] = torch.empty(sum(part.tiles.numel for part in awaited))
            outgoing.append((dist.isend(message, peer, group=self._group), f"to trainer rank {peer}", message))
            incoming.append((dist.irecv(received[peer], peer, group=self._group), f"from trainer rank {peer}", received[peer]))
        for work, whither, _ in incoming + outgoing:  # incoming and outgoing keep the tensors alive until then
            self._wait(work, whither)
        for peer, values in received.items():
            table.merge(_entries(self._awaited[peer], values, measured[0][1].device))
        return table

    def _wait(self, work: dist.Work | None, whither: str) -> None:
        assert work is not None
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            what = f"trainer rank {self._rank}: amax of cut tiles {whither}"
            raise TimeoutError(f"{what}: not through within {self._timeout_s:.0f} s: {error}") from error


def _shared(parts: list[AmaxPart], peer: int) -> list[AmaxPart]:
    return [part for part in parts if peer in part.peers]


def _entries(parts: list[AmaxPart], values: torch.Tensor, device: torch.device) -> list[Entry]:
    pieces = values.to(device).split([part.tiles.numel for part in parts])
    return [(part.tiles_of, part.tiles, piece.view(part.tiles.shape)) for part, piece in zip(parts, pieces)]
