"""Reports a reshard map: its numbers as one JSON object, one rank's part as text, all copies as JSON lines. (`table` has the table.)"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

from megarl.box import Box
from megarl.config.errors import ConfigError
from megarl.reshard.balance import sender_bound
from megarl.reshard.forwarding import Forwarding
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.reshard.relays import busiest_bytes, delta_bytes, summary
from megarl.reshard.rows import QUANTISE, SCALE, ZEROS
from megarl.reshard.schedule import batches_from, batches_to
from megarl.reshard.table import size, sum_messages

LINK_BYTES_PER_S = 50e9  # one 400 Gb/s NIC per rank


def to_json(
    map: ReshardMap, forwarding: Forwarding | None = None, link_bytes_per_s: float = LINK_BYTES_PER_S, changed: float = 0.01
) -> dict[str, Any]:
    """The summary numbers of a map, after proving it, and of relays beside it.

    `build_s`: time for planning and proof. `predicted_s`: the bytes that the busiest rank sends or receives (`busiest_bytes`), divided by
    `link_bytes_per_s`; without latency or quantisation. `delta_predicted_s`: the same of an update that carries only what has changed, if
    that is a share `changed` of the elements (`relays.delta_bytes`). `sender_bound`: the least `sender_max_over_mean` that the sizes of the
    trainer's stages allow. `messages`: see `schedule.messages`.

    Raises ProofError if the map does not write every destination byte exactly once.
    """
    begin = time.perf_counter()
    prove_exactly_once(map)
    proof_s = time.perf_counter() - begin
    return dataclasses.asdict(summary(map, forwarding)) | {
        "exactly_once": True,
        "plan_hash": map.plan_hash,
        "build_s": map.build_s + proof_s,
        "predicted_s": busiest_bytes(map, forwarding) / link_bytes_per_s,
        "delta_predicted_s": delta_bytes(map, forwarding, changed) / link_bytes_per_s,
        "delta_changed": changed,
        "link_bytes_per_s": link_bytes_per_s,
        "sender_bound": sender_bound(map),
        "messages": sum_messages(map, map.write_rows),
    }


def copies_of(map: ReshardMap, rank: str) -> list[Copy]:
    """The copies that "trainer:17" sends, or that "generator:3" receives. Raises ConfigError for anything else."""
    sends, number = _parsed(map, rank)
    return map.copies_from(number) if sends else map.copies_to(number)


def own_part_s(map: ReshardMap, rank: str) -> float:
    """Measures how long a rank takes to write out its own part, all writes in the batches of a run, right after it has built and proven the
    map. Returns the median of several times, in seconds. Raises ConfigError as `copies_of` does."""
    sends, number = _parsed(map, rank)
    batches, times = batches_from if sends else batches_to, []
    for _ in range(5):
        fresh = dataclasses.replace(map)  # a copy without cached parts
        prove_exactly_once(fresh)
        begin = time.perf_counter()
        part = batches(fresh, number)
        times.append(time.perf_counter() - begin)
        del part  # a run keeps it, so the time to free it does not count
    return statistics.median(times)


def _parsed(map: ReshardMap, rank: str) -> tuple[bool, int]:
    """(whether it is a trainer rank, its number)"""
    side, _, number = rank.partition(":")
    layouts = {"trainer": map.source, "generator": map.destination}
    if side not in layouts or not number.isdecimal():
        raise ConfigError(f"--rank {rank}: must be trainer:N or generator:N")
    if int(number) >= layouts[side].world_size:
        raise ConfigError(f"--rank {rank}: the {side} has ranks 0 to {layouts[side].world_size - 1}")
    return side == "trainer", int(number)


def render_copies(rank: str, copies: list[Copy], part_s: float) -> Iterator[str]:
    """One line per copy, then their sum, and how long the rank takes to write them out."""
    sends = rank.startswith("trainer")
    for copy in copies:
        peer = f"to generator {copy.destination_rank}" if sends else f"from trainer {copy.source_rank}"
        origin = "zeros" if copy.source_tensor is None else f"{copy.source_tensor} {_indices(copy.source_box)}"
        transform = "" if copy.transform in ("identity", ZEROS) else f" {copy.transform}"
        if copy.quantisation is not None and copy.quantisation.cut:
            transform += " (tiles cut)"
        yield f"{peer}: {copy.destination_tensor} {_indices(copy.destination_box)} <- {origin}{transform}, {size(copy.bytes)}"
    peers = {copy.destination_rank if sends else copy.source_rank for copy in copies}
    total = size(sum(copy.bytes for copy in copies))
    yield f"{rank}: {len(copies):,} copies, {len(peers)} peers, {total}, planned in {part_s * 1e3:.1f} ms"


def dump_lines(map: ReshardMap) -> Iterator[str]:
    """The whole map as JSON lines: one for the map itself, then one per copy, sender by sender in forward order."""
    head = {"plan_hash": map.plan_hash, "trainer_ranks": map.source.world_size, "generator_ranks": map.destination.world_size}
    yield json.dumps(head)
    for rank in range(map.source.world_size):
        for copy in map.copies_from(rank):
            yield json.dumps(copy_fields(copy))


def copy_fields(copy: Copy) -> dict[str, Any]:
    """A copy as plain values; boxes as [start, shape]."""
    fields: dict[str, Any] = {
        "source_rank": copy.source_rank,
        "source_tensor": copy.source_tensor,
        "source_box": _pair(copy.source_box),
        "destination_rank": copy.destination_rank,
        "destination_tensor": copy.destination_tensor,
        "destination_box": _pair(copy.destination_box),
        "transform": copy.transform,
        "dtype": copy.dtype,
        "depth": copy.depth,
        "bytes": copy.bytes,
    }
    if copy.transform in (QUANTISE, SCALE) and copy.quantisation is not None:
        how = copy.quantisation
        fields["quantisation"] = {"rule": how.rule.name, "tiles_of": how.tiles_of, "origin": how.origin, "cut": how.cut}
    return fields


def _pair(box: Box | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    return None if box is None else (box.start, box.shape)


def _indices(box: Box | None) -> str:
    assert box is not None
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.end)) + "]"
