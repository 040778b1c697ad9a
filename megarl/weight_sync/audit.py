"""The audit compares what the trainer ranks say they sent with what lies in the engines' memory, and that with what it was before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from megarl.config.errors import RunError
from megarl.config.schema import STRICT
from megarl.kernels.audit import MASK
from megarl.reshard.forwarding import Relay
from megarl.reshard.map import ReshardMap
from megarl.weight_sync.commands import UNPROVEN, UNPROVEN_OUTSIDE, Changes, Held


class AuditError(RunError):
    """An engine's memory does not hold what was sent, or has changed since the last audit."""


def check_unchanged(changes: Sequence[Changes], urls: Sequence[str]) -> None:
    """`changes` by generator rank, `urls` of the engines. Raises AuditError."""
    per_engine = len(changes) // len(urls)
    lines = [
        f"{name} on generator rank {rank} of engine {urls[rank // per_engine]} has changed since {_when(each.since)}"
        for rank, each in enumerate(changes)
        for name in each.tensors
    ]
    if lines:
        raise AuditError("weight audit failed: something other than an update has written to an engine's memory:\n" + "\n".join(lines))


def check_proven(ranks_of: Mapping[Held, Sequence[int]], strict: bool) -> None:
    """Names the memory that may be copies of old weights. Raises AuditError if `strict` and models hold such; what others hold may as well
    be the working memory of kernels. `ranks_of`: all memory, with the generator ranks that have it."""
    unproven = [(held, ranks) for held, ranks in ranks_of.items() if held.kind in (UNPROVEN, UNPROVEN_OUTSIDE)]
    if not unproven:
        return
    told = "engines hold memory that updates neither write nor make again; if it depends on weights, it is out of date:"
    for held, ranks in unproven:
        told += f"\n{held.name} {list(held.shape)} {held.dtype} ({held.detail}) on generator rank {', '.join(map(str, ranks))}"
    if strict and any(held.kind == UNPROVEN for held, _ in unproven):
        raise AuditError(f"weights.audit={STRICT}: {told}\nweights.audit=on goes on with it")
    print(f"warning: {told}", flush=True)


def _when(version: int) -> str:
    return f"the audit of version {version}" if version >= 0 else "the engine's first update began"


def compare(
    found: Sequence[Mapping[str, int]],
    shares: Iterable[Mapping[int, Mapping[str, int]]],
    map: ReshardMap,
    relays: Collection[Relay] = (),
) -> None:
    """Compares `found[generator rank][tensor]` with the sum of the senders' shares modulo 2^64. Raises AuditError.

    A relayed tensor must equal what was sent to its leader. The engines are paused meanwhile, and a large model has a million shares:
    so dict operations handle them in bulk, and only tensors with several senders are summed one by one.
    """
    sent: list[dict[str, int]] = [{} for _ in found]
    for of_sender in shares:
        for rank, tensors in of_sender.items():
            _add(sent[rank], tensors)
    leaders = {(relay.destination_rank, relay.tensor): relay.source_rank for relay in relays}
    for (rank, name), leader in leaders.items():
        sent[rank][name] = sent[leader].get(name, 0)
    differing = [rank for rank, hashes in enumerate(found) if hashes != sent[rank]]
    wrong = sorted((rank, name) for rank in differing for name in _differing(found[rank], sent[rank]))
    if wrong:
        lines = [f"{name} on generator rank {rank} is not what {_sent(map, rank, name, leaders)}" for rank, name in wrong]
        raise AuditError("weight audit failed:\n" + "\n".join(lines))


def _add(sums: dict[str, int], shares: Mapping[str, int]) -> None:
    common = sums.keys() & shares.keys()
    added = {name: (sums[name] + shares[name]) & MASK for name in common}
    sums.update(shares)
    sums.update(added)


def _differing(one: Mapping[str, int], other: Mapping[str, int]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _sent(map: ReshardMap, rank: int, name: str, leaders: Mapping[tuple[int, str], int]) -> str:
    """Which trainer ranks should have filled a tensor, and which generator rank passed it on."""
    leader = leaders.get((rank, name), rank)
    ranks = {copy.source_rank for copy in map.writes_to(leader) if copy.destination_tensor == name}
    by_relay = "" if leader == rank else f", passed on by generator rank {leader}"
    return f"trainer rank {', '.join(str(source) for source in sorted(ranks))} sent{by_relay}"
