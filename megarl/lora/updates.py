"""Updates of adapters alone, at both ends.

The frozen weights are written in full once to each set of engines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch

from megarl.base.rollout_types import Version
from megarl.config.schema import RunConfig
from megarl.lora.layout import is_adapter
from megarl.messaging.messages import WeightsGrant, WeightsOffer
from megarl.observe.status import TraceWriter
from megarl.reshard.map import Copy, ReshardMap
from megarl.weight_sync.commands import PassOn, Receive, Spread
from megarl.weight_sync.transports.base import Endpoint
from megarl.weight_sync.updates import DeltaUpdate
from megarl.weight_sync.writing import (
    FullUpdates,
    PartAndShares,
    RankTransport,
    Shares,
    WrittenPart,
)


class AdapterUpdates(FullUpdates):
    """The trainer's end.

    Once connected, the rank offers every version as a change to the last one, like a delta.

    The generator grants it if its engines have the previous version, and their memory need not be
    opened again. The audit also covers the frozen weights: their hashes must equal the hashes of
    the values that were sent.
    """

    def __init__(self, transport: RankTransport, map: ReshardMap, rank: int, config: RunConfig):
        super().__init__(transport, map, rank, config)
        # copies of adapters in sending order; None until connected
        self._adapters: Sequence[Copy] | None = None
        self._frozen: Shares = {}  # shares of the frozen weights, as last written

    def offer(
        self, version: Version, base: Version, model: Mapping[str, torch.Tensor], trace: TraceWriter
    ) -> WeightsOffer:
        if self._adapters is None:
            return super().offer(version, base, model, trace)
        # The amax of tiles does not change, since the weights are frozen.
        adapter_bytes = sum(copy.bytes for copy in self._adapters)
        all_bytes = sum(copy.bytes for copy in self.copies)
        return WeightsOffer(version, version - 1, adapter_bytes, adapter_bytes, all_bytes)

    def connect(
        self, map: ReshardMap, endpoints: Sequence[Endpoint], model: Mapping[str, torch.Tensor]
    ) -> None:
        super().connect(map, endpoints, model)
        self._adapters = [copy for copy in self.copies if is_adapter(copy.destination_tensor)]

    def write(
        self, grant: WeightsGrant, model: Mapping[str, torch.Tensor]
    ) -> Iterator[PartAndShares]:
        if grant.delta:
            assert self._adapters is not None  # not None, since it has offered adapters alone
            part = self._send(self._adapters, model)
            yield part, with_frozen(self._frozen, part)
            return
        for part, shares in super().write(grant, model):
            if shares is not None:
                self._frozen = {}
                for rank, rank_shares in shares.items():
                    frozen = itertools.filterfalse(is_adapter, rank_shares)
                    self._frozen[rank] = {name: rank_shares[name] for name in frozen}
            yield part, shares


def with_frozen(frozen: Shares, part: WrittenPart) -> Shares:
    """The shares of the engines' expected memory after adapters were `part`."""
    result = {}
    for rank in frozen.keys() | part.shares.keys():
        result[rank] = frozen.get(rank, {}) | part.shares.get(rank, {})
    return result


class AdapterUpdate(DeltaUpdate):
    """The generator's end: only the policy's adapter is written."""

    passing_on: ClassVar = PassOn(adapters=True)

    async def receive(self) -> None:
        await self.workers.run_all(Receive(adapters=True))

    async def spread(self) -> None:
        await self.workers.run_all(Spread(adapters=True))
