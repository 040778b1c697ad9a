"""A reshard map as a person reads it: in short, one rank's part, all copies as JSON lines; and its numbers as one JSON object."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any, Iterator, Optional

from megarl.config.errors import ConfigError
from megarl.reshard.box import Box
from megarl.reshard.kinds import Kind
from megarl.reshard.map import Copy, ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.reshard.rows import QUANTISE, SCALE, ZEROS

LINK_BYTES_PER_S = 50e9  # one 400 Gb/s NIC per GPU


def to_json(map: ReshardMap, link_bytes_per_s: float = LINK_BYTES_PER_S) -> dict[str, Any]:
    """Summary numbers of a proven map. `build_s`: planning and proof. `predicted_s`: the busiest rank's bytes over its link.

    Raises ProofError when the map does not write every destination byte exactly once.
    """
    begin = time.perf_counter()
    prove_exactly_once(map)
    proof_s = time.perf_counter() - begin
    summary = map.summary()
    busiest = max(
        summary.bytes / summary.trainer_ranks * summary.sender_max_over_mean,
        summary.bytes / summary.generator_ranks * summary.receiver_max_over_mean,
    )
    return dataclasses.asdict(summary) | {
        "exactly_once": True,
        "plan_hash": map.plan_hash,
        "build_s": map.build_s + proof_s,
        "predicted_s": busiest / link_bytes_per_s,
    }


def render(map: ReshardMap) -> str:
    """One line per destination parameter: how it is cut on both sides, copies, joined writes and bytes over all ranks."""
    summary = map.summary()
    header = ("parameter", f"{map.destination.name} shards", f"from {map.source.name} shards", "copies", "writes", "bytes")
    lines = [header] + [_line(map, k, kind) for k, kind in enumerate(map.destination.kinds)]
    lines.append(("total", "", "", f"{summary.copies:,}", f"{summary.writes:,}", _size(summary.bytes)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = "  ".join("-" * width for width in widths)
    text = [_row(line, widths) for line in lines]
    balance = (
        f"{summary.trainer_ranks} senders (max/mean {summary.sender_max_over_mean:.4f}), "
        f"{summary.generator_ranks} receivers (max/mean {summary.receiver_max_over_mean:.4f}), "
        f"bytes/minimum {summary.bytes / summary.bytes_minimum:.4f}, plan {map.plan_hash}"
    )
    return "\n".join([text[0], rule, *text[1:-1], rule, text[-1], balance])


def _line(map: ReshardMap, k: int, kind: Kind) -> tuple[str, ...]:
    rows = [row for row in map.rows if row.kind == k]
    times = kind.instances * kind.ranks.shape[2]
    sources = sorted({holder.kind for row in rows for holder in row.holders if row.transform != ZEROS})
    origin = "; ".join(f"{map.source.kinds[s].name} {_cut(map.source.kinds[s])}" for s in sources)
    copies, writes = sum(map.times(row) for row in rows), sum(map.times(row) for row in map.write_rows if row.kind == k)
    notes = " + zeros" if any(row.transform == ZEROS for row in rows) else ""
    notes += ", tiles cut" if any(row.cut for row in rows) else ""
    size = _size(times * sum(map.row_bytes(row) for row in rows))
    return kind.name, _cut(kind) + notes, origin, f"{copies:,}", f"{writes:,}", size


def _cut(kind: Kind) -> str:
    """Such as `8 x (18, 64) bfloat16`; the largest shard speaks for all."""
    tensor = kind.shards[0]
    return f"{len(kind.shards)} x {tuple(tensor.shape)} {tensor.dtype}"


def _row(cells: tuple[str, ...], widths: list[int]) -> str:
    numbers = len(cells) - 3
    aligned = [cell.rjust(width) if i >= numbers else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths))]
    return "  ".join(aligned).rstrip()


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def copies_of(map: ReshardMap, rank: str) -> list[Copy]:
    """The copies of "trainer:17", which it sends, or of "generator:3", which it receives. Raises ConfigError for anything else."""
    side, _, number = rank.partition(":")
    sides = {"trainer": (map.source, map.copies_from), "generator": (map.destination, map.copies_to)}
    if side not in sides or not number.isdecimal():
        raise ConfigError(f"--rank {rank}: must be trainer:N or generator:N")
    layout, copies = sides[side]
    if int(number) >= layout.world_size:
        raise ConfigError(f"--rank {rank}: the {side} has ranks 0 to {layout.world_size - 1}")
    return copies(int(number))


def render_copies(rank: str, copies: list[Copy]) -> Iterator[str]:
    """One line per copy, then their sum."""
    sends = rank.startswith("trainer")
    for copy in copies:
        peer = f"to generator {copy.destination_rank}" if sends else f"from trainer {copy.source_rank}"
        origin = "zeros" if copy.source_tensor is None else f"{copy.source_tensor} {_indices(copy.source_box)}"
        transform = "" if copy.transform in ("identity", ZEROS) else f" {copy.transform}"
        if copy.quantisation is not None and copy.quantisation.cut:
            transform += " (tiles cut)"
        yield f"{peer}: {copy.destination_tensor} {_indices(copy.destination_box)} <- {origin}{transform}, {_size(copy.bytes)}"
    peers = {copy.destination_rank if sends else copy.source_rank for copy in copies}
    yield f"{rank}: {len(copies):,} copies, {len(peers)} peers, {_size(sum(copy.bytes for copy in copies))}"


def dump_lines(map: ReshardMap) -> Iterator[str]:
    """The whole map as JSON lines: one of the map itself, then one per copy, sender by sender in forward order."""
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


def _pair(box: Optional[Box]) -> Optional[tuple[tuple[int, ...], tuple[int, ...]]]:
    return None if box is None else (box.start, box.shape)


def _indices(box: Optional[Box]) -> str:
    assert box is not None
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.end)) + "]"
