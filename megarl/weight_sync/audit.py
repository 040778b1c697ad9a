"""The audit compares hashes of the engines' memory with hashes of the values that trainer ranks
sent, and with earlier hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np

from megarl.config.errors import RunError
from megarl.config.schema import STRICT
from megarl.reshard.forwarding import Relay, SentTensors
from megarl.reshard.map import ReshardMap
from megarl.weight_sync.commands import UNPROVEN, UNPROVEN_OUTSIDE, Changes, MemoryEntry


class AuditError(RunError):
    """An engine's memory differs from what was sent, or has changed since the last audit."""


def check_unchanged(changes: Sequence[Changes], urls: Sequence[str]) -> None:
    """Raises AuditError if memory has changed.

    `changes`: for each generator rank; `urls`: the engines' addresses.
    """
    per_engine = len(changes) // len(urls)
    lines = []
    for rank, rank_changes in enumerate(changes):
        for name in rank_changes.tensors:
            lines.append(
                f"{name} on generator rank {rank} of engine {urls[rank // per_engine]} has changed "
                f"since {_when(rank_changes.since)}"
            )
    if lines:
        raise AuditError(
            "weight audit failed: something other than an update has written to an engine's "
            "memory:\n" + "\n".join(lines)
        )


def check_proven(ranks_of: Mapping[MemoryEntry, Sequence[int]], strict: bool) -> None:
    """Prints which memory may be a copy of old weights.

    With `strict`, raises AuditError if a model has such memory. (Outside a model it may be the
    working memory of kernels.) `ranks_of`: all memory, with the generator ranks that have it.
    """
    unproven = []
    for entry, ranks in ranks_of.items():
        if entry.kind in (UNPROVEN, UNPROVEN_OUTSIDE):
            unproven.append((entry, ranks))
    if not unproven:
        return
    message = (
        "engines hold memory that updates neither write nor renew; if it depends on weights, "
        "it is out of date:"
    )
    for entry, ranks in unproven:
        message += (
            f"\n{entry.name} {list(entry.shape)} {entry.dtype} ({entry.detail}) on generator rank "
            f"{', '.join(map(str, ranks))}"
        )
    if strict and any(entry.kind == UNPROVEN for entry, _ in unproven):
        raise AuditError(f"weights.audit={STRICT}: {message}\nweights.audit=on continues with it")
    print(f"warning: {message}", flush=True)


def _when(version: int) -> str:
    if version >= 0:
        return f"the audit of version {version}"
    return "the engine's first update began"


def packed(hashes: Mapping[str, int]) -> bytes:
    """The hashes of a rank's tensors as they are sent: uint64, sorted by name."""
    return np.array([hashes[name] for name in sorted(hashes)], dtype=np.uint64).tobytes()


def packed_shares(shares: Mapping[int, Mapping[str, int]]) -> bytes:
    """The shares of one sender (generator rank -> name -> share) as they are sent: the number of
    distinct values (uint32), these values (uint64), and the index of each share among them.
    Replicas have equal shares, so this takes at most a third of the bytes.
    """
    return pack_shares(
        np.frombuffer(b"".join(packed(shares[rank]) for rank in sorted(shares)), dtype=np.uint64)
    )


def pack_shares(shares: np.ndarray) -> bytes:
    distinct, indices = np.unique(shares, return_inverse=True)
    return (
        len(distinct).to_bytes(4, "little")
        + distinct.tobytes()
        + indices.astype(_index_type(len(distinct))).tobytes()
    )


def _read_shares(shares: bytes) -> np.ndarray:
    count = int.from_bytes(shares[:4], "little")
    if count:
        distinct = np.frombuffer(shares, dtype=np.uint64, count=count, offset=4)
    else:
        distinct = np.zeros(0, np.uint64)
    if count:
        return distinct[np.frombuffer(shares, dtype=_index_type(count), offset=4 + distinct.nbytes)]
    return distinct


def _index_type(count: int) -> type[np.unsignedinteger]:
    if count <= 1 << 16:
        return np.uint16
    return np.uint32


def digest_of(hashes: bytes) -> bytes:
    """The digest of a rank's hashes (`packed`).

    The hashes themselves are requested only if it differs from the expected one.
    """
    return hashlib.blake2b(hashes, digest_size=16).digest()


def expected_hashes_of(shares: Sequence[bytes], tensors: SentTensors) -> np.ndarray:
    """The expected hash of each place (SentTensors), uint64: the sum of the trainer ranks' `shares`
    (`packed_shares`) modulo 2^64. A relayed tensor must equal what was sent to its leader. Raises
    AuditError if shares are missing.
    """
    sums = np.zeros(tensors.places[-1], dtype=np.uint64)
    for rank, sender_shares in enumerate(shares):
        sums[tensors.sent_by(rank)] += _of_right_length(
            _read_shares(sender_shares),
            len(tensors.sent_by(rank)),
            f"trainer rank {rank} has sent hashes of",
        )
    leading, relayed = tensors.relayed
    sums[relayed] = sums[leading]
    return sums


def differing(digests: Sequence[bytes | None], sums: np.ndarray, tensors: SentTensors) -> list[int]:
    """The generator ranks whose hashes are not as `expected_hashes_of`, judged by their digests
    (None: the rank is lost).
    """
    of_ranks = zip(digests, pairwise(tensors.places.tolist()), strict=True)
    result: list[int] = []
    for rank, (digest, (a, b)) in enumerate(of_ranks):
        if digest is not None and digest != digest_of(sums[a:b].tobytes()):
            result.append(rank)
    return result


def compare(
    hashes_of_ranks: Sequence[bytes | None],
    shares: Sequence[bytes],
    tensors: SentTensors,
    relays: Collection[Relay] = (),
) -> None:
    """Compares `hashes_of_ranks`, what generator ranks have (`packed`; None: not asked), with the
    expected ones.

    `tensors`: of the map and its relays. Raises AuditError that names tensors and ranks.
    """
    expected_hashes = expected_hashes_of(shares, tensors)
    actual_hashes = expected_hashes.copy()
    for rank, hashes in enumerate(hashes_of_ranks):
        places = slice(*tensors.places[rank : rank + 2])
        if hashes is not None:
            count = places.stop - places.start
            actual_hashes[places] = _of_right_length(
                np.frombuffer(hashes, dtype=np.uint64), count, f"generator rank {rank} has hashed"
            )
    places_that_differ = []
    for place in np.flatnonzero(actual_hashes != expected_hashes).tolist():
        places_that_differ.append(tensors.name(place))
    if places_that_differ:
        leaders = {(relay.destination_rank, relay.tensor): relay.source_rank for relay in relays}
        lines = []
        for rank, name in places_that_differ:
            lines.append(
                f"{name} on generator rank {rank} is not what "
                f"{_senders(tensors.map, rank, name, leaders)}"
            )
        raise AuditError("weight audit failed:\n" + "\n".join(lines))


def _of_right_length(hashes: np.ndarray, count: int, subject: str) -> np.ndarray:
    if len(hashes) != count:
        raise AuditError(
            f"weight audit failed: {subject} {len(hashes)} tensors, the reshard map has {count}"
        )
    return hashes


def _senders(map: ReshardMap, rank: int, name: str, leaders: Mapping[tuple[int, str], int]) -> str:
    """A text that names the trainer ranks that should have written a tensor, and the generator rank
    that passed it on.
    """
    leader = leaders.get((rank, name), rank)
    ranks = set()
    for copy in map.writes_to(leader):
        if copy.destination_tensor == name:
            ranks.add(copy.source_rank)
    by_relay = "" if leader == rank else f", passed on by generator rank {leader}"
    return f"trainer rank {', '.join(str(source) for source in sorted(ranks))} sent{by_relay}"
