"""Combines several transports of one trainer rank: each generator rank is served by the one that suits the pair."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from megarl.messaging.host import Host
from megarl.reshard.deltas import Changes
from megarl.reshard.map import Copy
from megarl.weight_sync.transports.base import Endpoint, OwnerGone, PeerUnreachable, Transport
from megarl.weight_sync.transports.choice import transport_between, transport_class


class PairwiseTransport:
    """`setting` is weights.transport, `host` the Host of this trainer rank, as the generator knows it.

    With `may_lose`, writing goes on without engines that have ended. An engine whose memory was mapped has surely ended, and the
    generator goes on without it too. Ranks that could not be reached over the network may still run, so the generator must be told of
    them (`unwritten`).
    """

    def __init__(self, setting: str, host: Host, rank: int, timeout_s: float, may_lose: bool = False):
        self._may_lose = may_lose
        self.unwritten: set[int] = set()  # generator ranks, since `connect`
        self._setting, self._host, self._rank, self._timeout_s = setting, host, rank, timeout_s
        self._transports: list[Transport] = []
        self._towards: dict[int, Transport] = {}  # by generator rank

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        """`endpoints` has, for every generator rank, one endpoint for each kind of transport that some trainer rank writes to it by."""
        chosen: dict[str, list[Endpoint]] = defaultdict(list)
        for endpoint in endpoints:
            if endpoint.kind == transport_between(self._setting, self._host, endpoint.host):
                chosen[endpoint.kind].append(endpoint)
        for kind, of_kind in chosen.items():
            transport = transport_class(kind)(self._rank, self._timeout_s)
            transport.connect(of_kind)
            self._transports.append(transport)
            self._towards |= {endpoint.rank: transport for endpoint in of_kind}

    def prepare(self, sources: Iterable[torch.Tensor]) -> None:
        tensors = list(sources)
        for transport in self._transports:
            with self._going_on():
                transport.prepare(tensors)

    def write(self, copy: Copy, values: torch.Tensor) -> None:
        self._towards[copy.destination_rank].write(copy, values)

    def room(self, rank: int) -> float:
        return self._towards[rank].room(rank)

    def write_changes(self, rank: int, changes: Changes, version: int) -> None:
        self._towards[rank].write_changes(rank, changes, version)

    def fence(self) -> None:
        for transport in self._transports:
            with self._going_on():
                transport.fence()

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        self._transports, self._towards, self.unwritten = [], {}, set()

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except (OwnerGone, PeerUnreachable) as error:
            if not self._may_lose:
                raise
            if isinstance(error, PeerUnreachable):
                self.unwritten |= error.ranks
