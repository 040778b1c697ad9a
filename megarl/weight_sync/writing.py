"""Writes one update from a trainer rank: its copies of the reshard map, one after the other, through a transport."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megarl.kernels.audit import MASK, Hashes
from megarl.reshard.deltas import Changes
from megarl.reshard.execute import AmaxTable, Payloads
from megarl.reshard.map import Copy
from megarl.weight_sync.transports.base import Endpoint


class Writer(Protocol):
    """A connected Transport, or several behind one interface (PairwiseTransport)."""

    def prepare(self, sources: Iterable[torch.Tensor]) -> None: ...

    def write(self, copy: Copy, values: torch.Tensor) -> None: ...

    def write_changes(self, rank: int, changes: Changes, version: int) -> None: ...

    def fence(self) -> None: ...


Shares = dict[int, dict[str, int]]  # generator rank → tensor → this sender's share of its audit hash


@dataclass(frozen=True)
class Sent:
    bytes: int
    shares: Shares  # empty without audit


def send(
    transport: Writer,
    copies: Sequence[Copy],
    sources: Mapping[str, torch.Tensor],
    shapes: Mapping[int, Mapping[str, tuple[int, ...]]],
    audit: bool,
    amax: AmaxTable | None = None,
    payloads: Payloads | None = None,
) -> Sent:
    """Carries out `copies`, all of one source rank, and fences.

    `sources` are the rank's parameters by their names in the trainer layout, `shapes` the shapes of destination tensors by rank and name,
    `amax` the maxima of the tiles that the copies cut; `payloads` is kept from one update to the next. The shares are hashes of the values
    as they should arrive, computed at the source, so that the audit covers the whole way.
    """
    hashes = Hashes()
    payloads = payloads or Payloads()
    payloads.begin(sources)
    transport.prepare(sources.values())
    for copy in copies:
        values = payloads.of(copy, amax)
        transport.write(copy, values)
        if audit:
            rank, name = copy.destination_rank, copy.destination_tensor
            hashes.add((rank, name), values, copy.destination_box, shapes[rank][name])
    transport.fence()
    shares: dict[int, dict[str, int]] = defaultdict(dict)
    for (rank, name), share in hashes.totals().items():
        shares[rank][name] = share
    return Sent(sum(copy.bytes for copy in copies), dict(shares))


def shares_of(parts: Sequence[Sent]) -> Shares:
    """Of all parts of an update together. A tensor's boxes may be in several."""
    whole: Shares = defaultdict(dict)
    for rank, of_rank in ((rank, of_rank) for sent in parts for rank, of_rank in sent.shares.items()):
        known = whole[rank]
        known |= {name: (known.get(name, 0) + share) & MASK for name, share in of_rank.items()}
    return whole


def landing_first(copies: Iterable[Copy], endpoints: Iterable[Endpoint]) -> tuple[list[Copy], list[Copy]]:
    """Splits `copies` into (those whose boxes land, all others)."""
    landings = {(endpoint.rank, landing.tensor, landing.start) for endpoint in endpoints for landing in endpoint.landings}
    parts: tuple[list[Copy], list[Copy]] = [], []
    for copy in copies:
        lands = (copy.destination_rank, copy.destination_tensor, copy.destination_box.start) in landings
        parts[0 if lands else 1].append(copy)
    return parts


def shapes_of(endpoints: Sequence[Endpoint]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Shape of every destination tensor, by generator rank and name."""
    return {endpoint.rank: {tensor.name: tensor.shape for tensor in endpoint.tensors} for endpoint in endpoints}
