"""A reshard map as a person reads it, and as one JSON object."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from megarl.reshard.kinds import Kind
from megarl.reshard.map import ReshardMap
from megarl.reshard.proof import prove_exactly_once
from megarl.reshard.rows import ZEROS

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
    writes = sum(row.kind == k for row in map.write_rows)
    padded = " + zeros" if any(row.transform == ZEROS for row in rows) else ""
    size = _size(times * sum(map.row_bytes(row) for row in rows))
    return kind.name, _cut(kind) + padded, origin, f"{times * len(rows):,}", f"{times * writes:,}", size


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
