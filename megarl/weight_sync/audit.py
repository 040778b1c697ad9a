"""The audit compares what the trainer ranks say they sent with what lies in the engines' memory, and that with what it was before."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from megarl.config.errors import RunError
from megarl.config.schema import STRICT
from megarl.reshard.forwarding import Relay
from megarl.reshard.map import ReshardMap
from megarl.reshard.tensors import SentTensors
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


def packed(hashes: Mapping[str, int]) -> bytes:
    """The hashes of a rank's tensors as they travel: uint64, in the order of names."""
    return np.array([hashes[name] for name in sorted(hashes)], dtype=np.uint64).tobytes()


def packed_shares(shares: Mapping[int, Mapping[str, int]]) -> bytes:
    """The shares of one sender, by generator rank and name, as they travel: uint64, in this order."""
    return b"".join(packed(shares[rank]) for rank in sorted(shares))


def compare(found: Sequence[bytes | None], shares: Sequence[bytes], tensors: SentTensors, relays: Collection[Relay] = ()) -> None:
    """Compares what each generator rank has `found` (`packed`; None: it is lost) with the sum of the trainer ranks' `shares`
    (`packed_shares`), modulo 2^64. `tensors`: of the map and its relays. Raises AuditError.

    A relayed tensor must equal what was sent to its leader. The engines are paused meanwhile, and a large model has a million shares: so
    they travel and are summed as arrays.
    """
    sent, held = np.zeros((2, tensors.places[-1]), dtype=np.uint64)
    for rank, of_sender in enumerate(shares):
        sent[tensors.sent_by(rank)] += _read(of_sender, len(tensors.sent_by(rank)), f"trainer rank {rank} has sent hashes of")
    leading, relayed = tensors.relayed
    sent[relayed] = sent[leading]
    for rank, hashes in enumerate(found):
        places = slice(*tensors.places[rank : rank + 2])
        expected = places.stop - places.start
        held[places] = sent[places] if hashes is None else _read(hashes, expected, f"generator rank {rank} has hashed")
    if wrong := [tensors.name(place) for place in np.flatnonzero(held != sent).tolist()]:
        leaders = {(relay.destination_rank, relay.tensor): relay.source_rank for relay in relays}
        lines = [f"{name} on generator rank {rank} is not what {_sent(tensors.map, rank, name, leaders)}" for rank, name in wrong]
        raise AuditError("weight audit failed:\n" + "\n".join(lines))


def _read(hashes: bytes, expected: int, who: str) -> np.ndarray:
    found = np.frombuffer(hashes, dtype=np.uint64)
    if len(found) != expected:
        raise AuditError(f"weight audit failed: {who} {len(found)} tensors, the reshard map has {expected}")
    return found


def _sent(map: ReshardMap, rank: int, name: str, leaders: Mapping[tuple[int, str], int]) -> str:
    """Which trainer ranks should have filled a tensor, and which generator rank passed it on."""
    leader = leaders.get((rank, name), rank)
    ranks = {copy.source_rank for copy in map.writes_to(leader) if copy.destination_tensor == name}
    by_relay = "" if leader == rank else f", passed on by generator rank {leader}"
    return f"trainer rank {', '.join(str(source) for source in sorted(ranks))} sent{by_relay}"
