"""What the trainer ranks say they sent against what lies in the engines' memory."""

from __future__ import annotations

from collections import defaultdict
from typing import Collection, Iterable, Mapping, Sequence

from megarl.reshard.audit import MASK
from megarl.reshard.map import ReshardMap
from megarl.reshard.forwarding import Relay


class AuditError(RuntimeError):
    """What lies in an engine's memory is not what was sent."""


def compare(
    found: Sequence[Mapping[str, int]],
    shares: Iterable[Mapping[int, Mapping[str, int]]],
    map: ReshardMap,
    relays: Collection[Relay] = (),
) -> None:
    """`found[generator rank][tensor]` against the sum of the senders' shares modulo 2^64. Raises AuditError.

    What a relay brought must be what was sent to its leader.
    """
    sent: dict[tuple[int, str], int] = defaultdict(int)
    for of_sender in shares:
        for rank, tensors in of_sender.items():
            for name, share in tensors.items():
                sent[rank, name] = (sent[rank, name] + share) & MASK
    leaders = {(relay.destination_rank, relay.tensor): relay.source_rank for relay in relays}
    sent |= {(rank, name): sent[leader, name] for (rank, name), leader in leaders.items()}
    there = {(rank, name): value for rank, hashes in enumerate(found) for name, value in hashes.items()}
    wrong = sorted(key for key in there.keys() | sent.keys() if there.get(key) != sent.get(key))
    if wrong:
        lines = [f"{name} on generator rank {rank} is not what {_sent(map, rank, name, leaders)}" for rank, name in wrong]
        raise AuditError("weight audit failed:\n" + "\n".join(lines))


def _sent(map: ReshardMap, rank: int, name: str, leaders: Mapping[tuple[int, str], int]) -> str:
    """Who should have filled a tensor, and how it got there."""
    leader = leaders.get((rank, name), rank)
    ranks = {copy.source_rank for copy in map.writes_to(leader) if copy.destination_tensor == name}
    by_relay = "" if leader == rank else f", passed on by generator rank {leader}"
    return f"trainer rank {', '.join(str(source) for source in sorted(ranks))} sent{by_relay}"
